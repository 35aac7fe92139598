"""Tasks: questions with labels and a way to grade answers. ``TASKS`` names them all."""

import dataclasses
from typing import Any

from maporl.config.imports import look_up
from maporl.config.parse import validated
from maporl.errors import ConfigError
from maporl.tasks.anli import ANLI
from maporl.tasks.arithmetic import Arithmetic
from maporl.tasks.base import Task, TaskError, read_examples
from maporl.tasks.documents import Documents
from maporl.tasks.episodes import Episodes
from maporl.tasks.fantom import FANToM
from maporl.tasks.gsm8k import GSM8K
from maporl.tasks.hops import TinyHops
from maporl.tasks.hotpotqa import HotpotQA
from maporl.tasks.mathematics import Mathematics
from maporl.tasks.mixture import Mixture
from maporl.tasks.parts import Parts
from maporl.tasks.programs import MBPP, HumanEval
from maporl.tasks.prompts import PromptDataset, Prompts
from maporl.tasks.skills import Skills
from maporl.tasks.tiny_programs import TinyPrograms
from maporl.tasks.tinygsm import TinyGSM
from maporl.tasks.triplets import Triplets
from maporl.tasks.verifiers import Verifiers

TASKS: dict[str, Any] = {
    "toy_sum": Arithmetic,
    "toy_times": Arithmetic,
    "toy_skills": Skills,
    "toy_parts": Parts,
    "gsm8k": GSM8K,
    "anli": ANLI,
    "tinygsm": TinyGSM,
    "fantom": FANToM,
    "episodes": Episodes,
    "math": Mathematics,
    "hotpotqa": HotpotQA,
    "tiny_hops": TinyHops,
    "mbpp": MBPP,
    "humaneval": HumanEval,
    "tiny_programs": TinyPrograms,
    "verifiers": Verifiers,
    "prompts": PromptDataset,
    "mixture": Mixture,
    "documents": Documents,
    "triplets": Triplets,
}
_PRESETS: dict[str, dict[str, Any]] = {"toy_times": {"operation": "times", "largest": 9}}


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
            f'{where}: task.name: {name} has no field split; add split: str = "train", and hold other questions out for "eval"'
        )
    options = {**_PRESETS.get(name, {}), **({"seed": seed} if "seed" in fields else {}), **options, "split": split}
    return validated(kind, options, f"{where}: task")


__all__ = [
    "ANLI",
    "GSM8K",
    "MBPP",
    "TASKS",
    "Arithmetic",
    "Documents",
    "Episodes",
    "FANToM",
    "HotpotQA",
    "HumanEval",
    "Mathematics",
    "Mixture",
    "Parts",
    "PromptDataset",
    "Prompts",
    "Skills",
    "Task",
    "TaskError",
    "TinyGSM",
    "TinyHops",
    "TinyPrograms",
    "Triplets",
    "build_task",
    "read_examples",
]
