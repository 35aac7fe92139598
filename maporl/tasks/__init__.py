"""Tasks: questions with labels and a way to grade answers. ``TASKS`` names them all."""

from maporl.tasks.anli import ANLI
from maporl.tasks.base import Task, TaskError, read_examples
from maporl.tasks.documents import Documents
from maporl.tasks.episodes import Episodes
from maporl.tasks.fantom import FANToM
from maporl.tasks.gsm8k import GSM8K
from maporl.tasks.hotpotqa import HotpotQA
from maporl.tasks.mathematics import Mathematics
from maporl.tasks.mixture import Mixture
from maporl.tasks.programs import MBPP, HumanEval
from maporl.tasks.prompts import PromptDataset, Prompts
from maporl.tasks.registry import TASKS, build_task
from maporl.tasks.tinygsm import TinyGSM
from maporl.tasks.triplets import Triplets
from maporl.tasks.verifiers import Verifiers

TASKS |= {
    "toy_sum": "maporl.playground.arithmetic:Arithmetic",
    "toy_times": "maporl.playground.arithmetic:Arithmetic",
    "toy_skills": "maporl.playground.skills:Skills",
    "toy_parts": "maporl.playground.parts:Parts",
    "gsm8k": GSM8K,
    "anli": ANLI,
    "tinygsm": TinyGSM,
    "fantom": FANToM,
    "episodes": Episodes,
    "math": Mathematics,
    "hotpotqa": HotpotQA,
    "tiny_hops": "maporl.playground.hops:TinyHops",
    "mbpp": MBPP,
    "humaneval": HumanEval,
    "tiny_programs": "maporl.playground.tiny_programs:TinyPrograms",
    "verifiers": Verifiers,
    "prompts": PromptDataset,
    "mixture": Mixture,
    "documents": Documents,
    "triplets": Triplets,
}

__all__ = [
    "ANLI",
    "GSM8K",
    "MBPP",
    "TASKS",
    "Documents",
    "Episodes",
    "FANToM",
    "HotpotQA",
    "HumanEval",
    "Mathematics",
    "Mixture",
    "PromptDataset",
    "Prompts",
    "Task",
    "TaskError",
    "TinyGSM",
    "Triplets",
    "build_task",
    "read_examples",
]
