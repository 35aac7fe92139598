"""Check what a configuration says of models against their shapes and alphabets. No weights are read."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from maporl.config.parse import unknown
from maporl.config.schema import AgentSection, Config, TinySection
from maporl.errors import Fault
from maporl.run import ResolvedRun
from maporl.team import memory
from maporl.text import check_pattern, matches
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.models.attention import fault
from trl_ext.models.weights import read_pretrained


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what the models of agents and of the verifier lack: modules that a LoRA names, and kinds of attention."""
    for name, section in run.config.agents.items():
        yield from _lora(f"agents.{name}.lora.target_modules", section)
    for name, section in run.config.agents.items():
        yield from _attention(run.config, name, section)
    yield from _attention_of_verifier(run.config)


def _lora(key: str, section: AgentSection) -> Iterator[Fault]:
    """Yield modules that a LoRA names and the model lacks. PEFT would leave them out."""
    targets = None if section.lora is None or not section.weights else section.lora.target_modules
    if targets is None or targets == "all-linear":
        return
    modules = memory.shape_of(section).matrices
    names = sorted({module.rpartition(".")[2] for module in modules})
    if isinstance(targets, str):
        yield from _pattern_of_modules(key, targets, modules, names)
    elif not targets:
        yield Fault(key, f"expected all-linear or at least one of {', '.join(names)}, got []")
    for target in targets if isinstance(targets, list) else []:
        if not any(f".{module}".endswith(f".{target}") for module in modules):
            yield Fault(key, unknown(target, names), "or all-linear in place of the list")


def _pattern_of_modules(key: str, pattern: str, modules: Sequence[str], names: list[str]) -> Iterator[Fault]:
    try:
        check_pattern(key, pattern)
    except ValueError as error:
        yield Fault.of(error)
        return
    if not any(next(matches(rf"\A(?:{pattern})\Z", module), None) for module in modules):
        what = f"the regular expression {pattern!r:.80} is the whole name of no module, such as {modules[-1]!r}"
        yield Fault(key, what, f"give a list of some of {', '.join(names)}, or all-linear")


def _attention(config: Config, name: str, section: AgentSection) -> Iterator[Fault]:
    """Yield why an agent's model cannot have the attention that it names on this run's device."""
    kind = section.attn_implementation
    if kind is None or not section.weights:
        return
    key = f"agents.{name}.attn_implementation"
    yield from _device(config, key, kind)
    if kind == "flash_attention_2" and memory.shape_of(section).bytes == 4 and not config.training.bf16:
        what = "flash_attention_2 computes in half precision, and these weights are in float32"
        yield Fault(key, what, f"set agents.{name}.dtype: bfloat16, or choose sdpa")
    yield from _architecture(key, kind, AutoModelForCausalLM, section.model, section.tiny)


def _attention_of_verifier(config: Config) -> Iterator[Fault]:
    verifier = config.reward.verifier
    if verifier is None or verifier.attn_implementation is None:
        return
    key, kind = "reward.verifier.attn_implementation", verifier.attn_implementation
    if why := fault(kind):
        yield Fault(key, why)
    yield from _device(config, key, kind)
    yield from _architecture(key, kind, AutoModelForSequenceClassification, verifier.model, None)


def _device(config: Config, key: str, kind: str) -> Iterator[Fault]:
    if kind in ("flash_attention_2", "flex_attention") and memory.training_on_cpu(config):
        what = f"{kind} computes no gradients on a CPU, where this run trains"
        yield Fault(key, what, "choose sdpa, or leave it out")


def _architecture(key: str, kind: str, loader: Any, source: str | None, tiny: TinySection | None) -> Iterator[Fault]:
    """Yield why an architecture lacks this kind of attention, by building it without weights."""
    try:
        with torch.device("meta"):
            if tiny is not None:
                build_tiny_model(tiny, build_tiny_tokenizer(tiny)).set_attn_implementation(kind)
            else:
                shape = read_pretrained(AutoConfig, str(source))
                loader.from_config(shape, trust_remote_code=False, attn_implementation=kind)
    except (ValueError, ImportError) as error:
        said = str(error).strip().partition("\n")[0].partition(". ")[0].partition(" Please ")[0]
        yield Fault(key, said[:200], "choose another one, or leave it out")


def check_alphabets(run: ResolvedRun) -> Iterator[Fault]:
    """Yield the alphabets of tiny models that play and lack a character of a question."""
    if not run.tinies:
        return  # the questions need not be read
    used = {character for task in run.splits for example in task for character in task.question(example)}
    for name, tiny in run.tinies.items():
        if missing := used - set(tiny.alphabet):
            lacking = f"{''.join(sorted(missing))!r:.80}"
            what = f"questions have characters that {tiny.alphabet!r:.80} lacks: {lacking}"
            yield Fault(f"agents.{name}.tiny.alphabet", what, "add them")
