"""``maporl.check``: what ``maporl check`` prints, for a trainer that was made in Python.

The trainer is described as a configuration (:mod:`maporl.training.description`), and its own parts stand in that
description's place, so that the checks are those of the command and nothing is checked twice.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peft import LoraConfig, PeftModel

from maporl.config import parse_config
from maporl.run import ResolvedRun
from maporl.team.agents import Policy
from maporl.team.saving import SavedTeam
from maporl.text import printable
from maporl.training.description import describe
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.validation.preflight import check_resolved
from trl_ext.errors import short_trace
from trl_ext.models.forward import base_of


@short_trace
def check(trainer: MultiAgentPPOTrainer) -> None:
    """Print what ``maporl check`` prints, for a trainer that was made in Python, before it trains.

    It prints what the run will do: questions, updates, prompts, what each agent is credited with, and warnings. The
    first question is played in a dry run, and no model answers.

    Raises:
        ConfigError: the run cannot start. The message names the first fault, and its notes the others.
    """
    parts = trainer.parts
    with TemporaryDirectory(prefix="maporl-check-") as folder:
        saved = SavedTeam(parts.team.agents, parts.team.policies_of, folder, folder, False, parts.engine_options)
        values = describe(parts, saved)
        shown: dict[str, str] = {}
        for name, speaking in parts.team.policies_of.items():
            shown |= _write_shape(values["agents"][name], speaking[0], folder)
        names = ("protocol", "speakers", "sampling", "task", "tools")
        made = {name: getattr(parts, name) for name in names} | {"curriculum": list(parts.curriculum)}
        made["held_out"] = parts.eval_task if parts.args.eval_questions else None
        lines = check_resolved(ResolvedRun(parse_config(values, "trainer"), "trainer", made), has_trainer=True)
    for line in [*lines, *_untold(values["only_in_python"])]:
        for path, model in shown.items():
            line = line.replace(path, model)
        print(printable(line))
    print("ok")


def _write_shape(section: dict[str, Any], policy: Policy, folder: str) -> dict[str, str]:
    """Write the shape of a policy's model and its tokenizer where ``section`` says that they lie, without weights.

    Return the name under which people know the model, by its folder, if it has no name of its own.
    """
    policy.tokenizer.save_pretrained(section["tokenizer"])
    base = base_of(policy.model)
    if policy.adapter is not None:
        assert isinstance(policy.model, PeftModel)  # only such a model has adapters
        options = policy.model.peft_config[policy.adapter]
        if isinstance(options, LoraConfig) and options.target_modules:
            del section["adapter"]
            targets = options.target_modules
            targets = targets if isinstance(targets, str) else sorted(targets)
            section["lora"] = {"r": options.r, "alpha": options.lora_alpha, "target_modules": targets}
        else:
            policy.save(Path(section["adapter"]))
    if not section["model"].startswith(folder):
        return {}
    base.config.save_pretrained(section["model"])
    return {section["model"]: f"{type(base).__name__} of {sum(p.numel() for p in base.parameters()):,} parameters"}


def _untold(only_in_python: dict[str, str]) -> list[str]:
    """Return a line about the parts that no configuration can name, so that commands cannot build the run again."""
    if not only_in_python:
        return []
    parts = ", ".join(f"{key} ({what})" for key, what in only_in_python.items())
    return [f"only in Python: {parts}; commands such as maporl eval need these parts in a module"]
