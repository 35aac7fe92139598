"""Tasks: questions with labels and a way to grade answers. ``TASKS`` names them all."""

from maporl.tasks.anli import ANLI as ANLI
from maporl.tasks.base import Task as Task
from maporl.tasks.base import TaskError as TaskError
from maporl.tasks.documents import Documents as Documents
from maporl.tasks.episodes import Episodes as Episodes
from maporl.tasks.fantom import FANToM as FANToM
from maporl.tasks.gsm8k import GSM8K as GSM8K
from maporl.tasks.hotpotqa import HotpotQA as HotpotQA
from maporl.tasks.mathematics import Mathematics as Mathematics
from maporl.tasks.mixture import Mixture as Mixture
from maporl.tasks.programs import MBPP as MBPP
from maporl.tasks.programs import HumanEval as HumanEval
from maporl.tasks.prompts import PromptDataset as PromptDataset
from maporl.tasks.prompts import Prompts as Prompts
from maporl.tasks.registry import TASKS as TASKS
from maporl.tasks.registry import build_task as build_task
from maporl.tasks.tinygsm import TinyGSM as TinyGSM
from maporl.tasks.triplets import Triplets as Triplets

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
    "verifiers": "maporl.integrations.verifiers:Verifiers",
    "prompts": PromptDataset,
    "mixture": Mixture,
    "documents": Documents,
    "triplets": Triplets,
}
