"""maporl: train teams of language models that talk to each other.

Names are loaded on first use, so that ``import maporl`` is quick.
"""

import sys as _sys
from importlib import import_module
from importlib.util import find_spec

import trl_ext as _trl_ext  # noqa: F401 - it silences a warning of bitsandbytes, before anything imports that
from maporl.moved import MovedModules as _MovedModules

_sys.meta_path.insert(0, _MovedModules())

__version__ = "0.1.0"

_METHODS = ("Attempts", "Code", "Design", "Forum", "Orchestrate", "Propose", "Route")
"""The public names of :mod:`maporl.methods`, each of a module of its name."""
_MODULES = {
    "maporl.advantages": (
        "AdvantageConfig AdvantageTerm Baseline BASELINES estimate Return RETURNS Scale SCALES Transform TRANSFORMS "
        "TurnBatch"
    ),
    "maporl.integrations.ray.ray_backend": "RayBackend",
    "maporl.config": "Config",
    "maporl.config.algorithm": "Algorithm",
    "maporl.config.call_options": "CallLimits CallTexts",
    "maporl.integrations.ray.section": "ClusterSection EnginePlaces FailuresSection GroupSection LearnerPlaces",
    "maporl.config.engines": "ENGINES",
    "maporl.config.schema": (
        "AblateSection AgentSection ApiSection BonusSection BranchingSection BrevitySection EnvironmentSection "
        "EvaluationSection JudgeSection LoraSection PenaltySection PupilSection RewardSection TinySection ToolSection "
        "WarmStartSection"
    ),
    "maporl.decoding": "Sampling StructuredOutput TeamSampling",
    "maporl.engines.base": "Engine Reply Request",
    "maporl.integrations.vllm.sampler": "VLLMSampler",
    "maporl.integrations.vllm.section": "ColocateSection VLLMSection",
    "maporl.methods.sections": "ArenaSection",
    "maporl.environments": "Environment ENVIRONMENTS Tool Toolbox TOOLS",
    "maporl.environments.games": "Game GAMES IllegalMove",
    "maporl.environments.trial": "check_environment",
    "maporl.errors": "ConfigError RunError UserError",
    "maporl.studies.crossplay.result": "CrossPlay CrossTeam",
    "maporl.evaluation.metrics": "Evaluation Share",
    **{f"maporl.methods.{name.lower()}": name for name in _METHODS},
    "maporl.playground.arithmetic": "Arithmetic",
    "maporl.datasets.hops": "TinyHops",
    "maporl.methods.parts": "Parts",
    "maporl.playground.skills": "Skills",
    "maporl.datasets.tiny_programs": "TinyPrograms",
    "maporl.playground.warm_start": "warm_start",
    "maporl.protocols": "CallReturn Chain Collaboration Debate PlayGame PlayWorld Protocol PROTOCOLS Refine",
    "maporl.serving.program": "Program",
    "maporl.report.page": "write_report",
    "maporl.report.read": "read_run Run",
    "maporl.rewards": "RewardFailure RewardSource SOURCES",
    "maporl.rewards.rules": "Rule RULES",
    "maporl.rewards.shaping": "collaboration_bonus share_scores",
    "maporl.verifier.section": "VerifierSection",
    "maporl.verifier.served": "ServedReward",
    "maporl.rollout.player": "Player",
    "maporl.runs.build": "build_player build_trainer recipe_parts",
    "maporl.runs.check": "check",
    "maporl.runs.train": "train",
    "maporl.schedules": "Freeze Growth OpponentPool RoundRobin Schedule Span Stage Swap",
    "maporl.storage.run_folder": "RunFolder",
    "maporl.tasks": (
        "ANLI Documents Episodes FANToM GSM8K HotpotQA HumanEval Mathematics MBPP Mixture PromptDataset Task TaskError "
        "TASKS TinyGSM Triplets"
    ),
    "maporl.tasks.lessons": "Lessons",
    "maporl.tasks.prompts": "Prompts",
    "maporl.integrations.verifiers": "Verifiers",
    "maporl.team.agents": "Agent",
    "maporl.team.team": "Team",
    "maporl.tiny": "build_tiny_model build_tiny_tokenizer",
    "maporl.training.args": "MultiAgentPPOConfig",
    "maporl.training.trainer": "MultiAgentPPOTrainer",
    "maporl.types": "Act Ask Call Dialogue Example from_json Grade Result Stop to_json Utterance Wait",
    "maporl.validation.load": "from_dict load",
    "trl_ext.ppo.options": "Decoding",
}
"""The public names of each module."""
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    """Load the module of a public name on first use.

    Raises:
        AttributeError: the package has no public name ``name``.
    """
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    from difflib import get_close_matches  # only a misspelt name needs it

    near = "".join(f"did you mean {other!r}? " for other in get_close_matches(name, __all__, 1))
    raise AttributeError(f"module 'maporl' has no attribute {name!r}; {near}dir(maporl) lists all names")


def __dir__() -> list[str]:
    """Return all public names, those included that no one has used yet, so that a notebook completes them."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
