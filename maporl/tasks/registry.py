"""The tasks by name, and how one is built from a configuration. Imports no torch and no task.

A task that is made of others imports this module.
"""

import dataclasses
from typing import Any

from maporl.config.imports import Parts, look_up
from maporl.config.parse import validated
from maporl.errors import ConfigError
from maporl.tasks.base import Task

TASKS = Parts(
    {
        "toy_sum": "maporl.playground.arithmetic:Arithmetic",
        "toy_times": "maporl.playground.arithmetic:Arithmetic",
        "toy_skills": "maporl.playground.skills:Skills",
        "toy_parts": "maporl.methods.parts:Parts",
        "gsm8k": "maporl.datasets.gsm8k:GSM8K",
        "anli": "maporl.datasets.anli:ANLI",
        "tinygsm": "maporl.datasets.tinygsm:TinyGSM",
        "fantom": "maporl.methods.fantom:FANToM",
        "episodes": "maporl.tasks.episodes:Episodes",
        "math": "maporl.datasets.mathematics:Mathematics",
        "hotpotqa": "maporl.datasets.hotpotqa:HotpotQA",
        "tiny_hops": "maporl.datasets.hops:TinyHops",
        "mbpp": "maporl.datasets.programs:MBPP",
        "humaneval": "maporl.datasets.programs:HumanEval",
        "tiny_programs": "maporl.datasets.tiny_programs:TinyPrograms",
        "verifiers": "maporl.integrations.verifiers:Verifiers",
        "prompts": "maporl.tasks.prompts:PromptDataset",
        "mixture": "maporl.tasks.mixture:Mixture",
        "documents": "maporl.methods.documents:Documents",
        "triplets": "maporl.methods.triplets:Triplets",
    }
)
PRESETS: dict[str, dict[str, Any]] = {"toy_times": {"operation": "times", "largest": 9}}
"""Options that a name sets, unless the configuration does."""


def build_task(section: dict[str, Any], split: str, seed: int, where: str = "configuration") -> Task:
    """The task that a configuration's ``task:`` section describes.

    ``split`` is "train" or "eval". ``seed`` draws the split, unless the section has a ``seed`` of its own. Runs whose
    seeds differ then hold out the same questions. ``where`` names the configuration in errors.

    Raises:
        ConfigError: the section names no task, or an option that the task lacks, or a value that it refuses.
    """
    options = dict(section)
    name = options.pop("name", None)
    kind = look_up(name, TASKS, f"{where}: task.name", Task)
    if "split" in options:
        raise ConfigError(f"{where}: task.split: is set by the run itself; remove it")
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {"split"}
    if "split" not in fields:
        raise ConfigError(
            f'{where}: task.name: {name} has no field split; add split: str = "train", and hold other questions out for "eval"'  # noqa: E501
        )
    options = {**PRESETS.get(name, {}), **({"seed": seed} if "seed" in fields else {}), **options, "split": split}
    return validated(kind, options, f"{where}: task")
