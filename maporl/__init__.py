"""maporl: train teams of language models that talk to each other.

Names are loaded on first use, so that ``import maporl`` is quick.
"""

from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"

_EXPORTS = {
    "AdvantageConfig": "maporl.advantages",
    "AdvantageTerm": "maporl.advantages",
    "Baseline": "maporl.advantages",
    "BASELINES": "maporl.advantages",
    "estimate": "maporl.advantages",
    "Return": "maporl.advantages",
    "RETURNS": "maporl.advantages",
    "Scale": "maporl.advantages",
    "SCALES": "maporl.advantages",
    "Transform": "maporl.advantages",
    "TRANSFORMS": "maporl.advantages",
    "TurnBatch": "maporl.advantages",
    "ANLI": "maporl.tasks",
    "Arithmetic": "maporl.tasks",
    "Episodes": "maporl.tasks",
    "FANToM": "maporl.tasks",
    "GSM8K": "maporl.tasks",
    "HotpotQA": "maporl.tasks",
    "HumanEval": "maporl.tasks",
    "Verifiers": "maporl.tasks",
    "MBPP": "maporl.tasks",
    "Mathematics": "maporl.tasks",
    "Mixture": "maporl.tasks",
    "Parts": "maporl.tasks",
    "PromptDataset": "maporl.tasks",
    "Prompts": "maporl.tasks",
    "Skills": "maporl.tasks",
    "Task": "maporl.tasks",
    "TaskError": "maporl.tasks",
    "TASKS": "maporl.tasks",
    "TinyGSM": "maporl.tasks",
    "TinyHops": "maporl.tasks",
    "TinyPrograms": "maporl.tasks",
    "CallReturn": "maporl.protocols",
    "Chain": "maporl.protocols",
    "Code": "maporl.protocols",
    "Collaboration": "maporl.protocols",
    "Debate": "maporl.protocols",
    "Forum": "maporl.protocols",
    "PlayGame": "maporl.protocols",
    "Propose": "maporl.protocols",
    "Protocol": "maporl.protocols",
    "PROTOCOLS": "maporl.protocols",
    "Refine": "maporl.protocols",
    "Route": "maporl.protocols",
    "PlayWorld": "maporl.protocols",
    "Environment": "maporl.environments",
    "ENVIRONMENTS": "maporl.environments",
    "check_environment": "maporl.environments.trial",
    "Tool": "maporl.environments",
    "Toolbox": "maporl.environments",
    "TOOLS": "maporl.environments",
    "CallLimits": "maporl.config.call_options",
    "CallTexts": "maporl.config.call_options",
    "EnvironmentSection": "maporl.config.schema",
    "ToolSection": "maporl.config.schema",
    "Game": "maporl.environments.games",
    "GAMES": "maporl.environments.games",
    "IllegalMove": "maporl.environments.games",
    "RewardFailure": "maporl.rewards",
    "RewardSource": "maporl.rewards",
    "ServedReward": "maporl.rewards.verifier.served",
    "SOURCES": "maporl.rewards",
    "Rule": "maporl.rewards.rule",
    "RULES": "maporl.rewards.rules",
    "collaboration_bonus": "maporl.rewards.shaping",
    "share_scores": "maporl.rewards.shaping",
    "Config": "maporl.config",
    "ENGINES": "maporl.config.engines",
    "AgentSection": "maporl.config.schema",
    "ApiSection": "maporl.config.schema",
    "ArenaSection": "maporl.config.schema",
    "BonusSection": "maporl.config.schema",
    "AblateSection": "maporl.config.schema",
    "BranchingSection": "maporl.config.schema",
    "BrevitySection": "maporl.config.schema",
    "ColocateSection": "maporl.config.schema",
    "EvaluationSection": "maporl.config.schema",
    "JudgeSection": "maporl.config.schema",
    "LoraSection": "maporl.config.schema",
    "PenaltySection": "maporl.config.schema",
    "PupilSection": "maporl.config.schema",
    "RewardSection": "maporl.config.schema",
    "TinySection": "maporl.config.schema",
    "VerifierSection": "maporl.config.schema",
    "VLLMSection": "maporl.config.schema",
    "WarmStartSection": "maporl.config.schema",
    "ConfigError": "maporl.errors",
    "RunError": "maporl.errors",
    "UserError": "maporl.errors",
    "Engine": "maporl.engines.base",
    "Reply": "maporl.engines.base",
    "Request": "maporl.engines.base",
    "Evaluation": "maporl.evaluation.metrics",
    "Share": "maporl.evaluation.metrics",
    "CrossPlay": "maporl.evaluation.crossplay",
    "CrossTeam": "maporl.evaluation.crossplay",
    "Player": "maporl.rollout.player",
    "write_report": "maporl.report.page",
    "read_run": "maporl.report.read",
    "Run": "maporl.report.read",
    "build_player": "maporl.runs.build",
    "build_trainer": "maporl.runs.build",
    "train": "maporl.runs.train",
    "Freeze": "maporl.schedules",
    "Growth": "maporl.schedules",
    "OpponentPool": "maporl.schedules",
    "RoundRobin": "maporl.schedules",
    "Schedule": "maporl.schedules",
    "Span": "maporl.schedules",
    "Stage": "maporl.schedules",
    "Swap": "maporl.schedules",
    "RunFolder": "maporl.storage.run_folder",
    "Agent": "maporl.team.agents",
    "Team": "maporl.team.team",
    "build_tiny_model": "maporl.tiny",
    "build_tiny_tokenizer": "maporl.tiny",
    "MultiAgentPPOConfig": "maporl.training.args",
    "MultiAgentPPOTrainer": "maporl.training.trainer",
    "VLLMSampler": "maporl.engines.vllm.sampler",
    "warm_start": "maporl.training.warm_start",
    "Act": "maporl.types",
    "Ask": "maporl.types",
    "Sampling": "maporl.decoding",
    "TeamSampling": "maporl.decoding",
    "Call": "maporl.types",
    "Dialogue": "maporl.types",
    "Example": "maporl.types",
    "from_json": "maporl.types",
    "Grade": "maporl.types",
    "Result": "maporl.types",
    "Stop": "maporl.types",
    "to_json": "maporl.types",
    "Utterance": "maporl.types",
    "from_dict": "maporl.validation.load",
    "load": "maporl.validation.load",
    "recipe_parts": "maporl.runs.parts",
    "Decoding": "trl_ext.ppo_options",
}
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
