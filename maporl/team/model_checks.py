"""Check what a configuration says of models against their shapes and alphabets. No weights are read."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from maporl.config.parse import unknown
from maporl.config.schema import Config, TinySection
from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.team import memory
from maporl.text import check_pattern, matches
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.models.attention import fault
from trl_ext.models.weights import read_pretrained


def check_lora(config: Config) -> None:
    """Check that every module that a LoRA names is in its model. PEFT would leave out those that are not.

    Raises:
        ConfigError: it is not. The message names the module and those that the model has.
    """
    for name, section in config.agents.items():
        targets = None if section.lora is None or not section.weights else section.lora.target_modules
        if targets is None or targets == "all-linear":
            continue
        where, modules = f"agents.{name}.lora.target_modules", memory.shape_of(section).matrices
        names = sorted({module.rpartition(".")[2] for module in modules})
        if isinstance(targets, str):
            _check_pattern_of_modules(targets, modules, names, where)
        elif not targets:
            raise ConfigError(f"{where}: expected all-linear or at least one of {', '.join(names)}, got []")
        for target in targets if isinstance(targets, list) else []:
            if not any(f".{module}".endswith(f".{target}") for module in modules):
                raise ConfigError(f"{where}: {unknown(target, names)}; or all-linear in place of the list")


def _check_pattern_of_modules(pattern: str, modules: Sequence[str], names: list[str], where: str) -> None:
    try:
        check_pattern(where, pattern)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not any(next(matches(rf"\A(?:{pattern})\Z", module), None) for module in modules):
        raise ConfigError(
            f"{where}: the regular expression {pattern!r:.80} is the whole name of no module, such as {modules[-1]!r}; "
            f"give a list of some of {', '.join(names)}, or all-linear"
        )


def check_attention(config: Config) -> None:
    """Check that the models that name an attention implementation have it, and can use it on this run's device.

    Raises:
        ConfigError: one cannot. The message names it and says what to choose.
    """
    for name, section in config.agents.items():
        kind = section.attn_implementation
        if kind is None or not section.weights:
            continue
        where = f"agents.{name}.attn_implementation"
        _check_device(config, kind, where)
        if kind == "flash_attention_2" and memory.shape_of(section).bytes == 4 and not config.training.bf16:
            raise ConfigError(
                f"{where}: flash_attention_2 computes in half precision, and these weights are in float32; set "
                f"agents.{name}.dtype: bfloat16, or choose sdpa"
            )
        _check_architecture(AutoModelForCausalLM, section.model, section.tiny, kind, where)
    verifier = config.reward.verifier
    if verifier is not None and verifier.attn_implementation is not None:
        where = "reward.verifier.attn_implementation"
        if why := fault(verifier.attn_implementation):
            raise ConfigError(f"{where}: {why}")
        _check_device(config, verifier.attn_implementation, where)
        _check_architecture(
            AutoModelForSequenceClassification, verifier.model, None, verifier.attn_implementation, where
        )


def _check_device(config: Config, kind: str, where: str) -> None:
    """Check that the run's device computes this kind of attention."""
    if kind in ("flash_attention_2", "flex_attention") and memory.training_on_cpu(config):
        raise ConfigError(
            f"{where}: {kind} computes no gradients on a CPU, where this run trains; choose sdpa, or leave it out"
        )


def _check_architecture(loader: Any, source: str | None, tiny: TinySection | None, kind: str, where: str) -> None:
    """Check that an architecture has this kind of attention, by building it without weights."""
    try:
        with torch.device("meta"):
            if tiny is not None:
                build_tiny_model(tiny, build_tiny_tokenizer(tiny)).set_attn_implementation(kind)
            else:
                shape = read_pretrained(AutoConfig, str(source))
                loader.from_config(shape, trust_remote_code=False, attn_implementation=kind)
    except (ValueError, ImportError) as error:
        said = str(error).strip().partition("\n")[0].partition(". ")[0].partition(" Please ")[0]
        raise ConfigError(f"{where}: {said[:200]}; choose another one, or leave it out") from None


def check_alphabets(run: ResolvedRun) -> None:
    """Check that the alphabets of all tiny models that play have every character of every question.

    Raises:
        ConfigError: a question has a character that a player's alphabet lacks.
    """
    if not run.tinies:
        return  # the questions need not be read
    used = {character for task in run.splits for example in task for character in task.question(example)}
    for name, tiny in run.tinies.items():
        if missing := used - set(tiny.alphabet):
            raise ConfigError(
                f"agents.{name}.tiny.alphabet: questions have characters that {tiny.alphabet!r:.80} lacks: "
                f"{''.join(sorted(missing))!r:.80}; add them"
            )
