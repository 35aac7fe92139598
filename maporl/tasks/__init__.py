"""Tasks: questions with labels and a way to grade answers. ``TASKS`` names them all."""

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
from maporl.tasks.registry import TASKS, build_task
from maporl.tasks.skills import Skills
from maporl.tasks.tiny_programs import TinyPrograms
from maporl.tasks.tinygsm import TinyGSM
from maporl.tasks.triplets import Triplets
from maporl.tasks.verifiers import Verifiers

TASKS |= {
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
