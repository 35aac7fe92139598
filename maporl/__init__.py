"""maporl: train teams of language models that talk to each other.

Names are loaded on first use, so that ``import maporl`` is quick.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "Agent": "maporl.team.agents",
    "Team": "maporl.team.team",
    "ANLI": "maporl.tasks",
    "Arithmetic": "maporl.tasks",
    "GSM8K": "maporl.tasks",
    "TASKS": "maporl.tasks",
    "Skills": "maporl.tasks",
    "Task": "maporl.tasks",
    "PROTOCOLS": "maporl.protocols",
    "Debate": "maporl.protocols",
    "Config": "maporl.config",
    "ConfigError": "maporl.errors",
    "PupilSection": "maporl.config.schema",
    "RewardSection": "maporl.config.schema",
    "TinySection": "maporl.config.schema",
    "WarmStartSection": "maporl.config.schema",
    "load": "maporl.validation.load",
    "MultiAgentPPOConfig": "maporl.training.args",
    "MultiAgentPPOTrainer": "maporl.training.trainer",
    "Ask": "maporl.types",
    "Dialogue": "maporl.types",
    "Example": "maporl.types",
    "Decoding": "trl_ext.ppo_options",
    "Engine": "maporl.engines.base",
    "Grade": "maporl.types",
    "Protocol": "maporl.protocols.base",
    "RewardSource": "maporl.rewards.base",
    "ServedReward": "maporl.rewards.verifier.served",
    "UserError": "maporl.errors",
    "from_dict": "maporl.validation.load",
    "Utterance": "maporl.types",
    "VLLMSampler": "maporl.engines.vllm.sampler",
    "build_tiny_model": "maporl.team.tiny",
    "build_tiny_tokenizer": "maporl.team.tiny",
    "warm_start": "maporl.training.warm_start",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    """Load the module of a public name on first use.

    Raises:
        AttributeError: the package has no public name ``name``.
    """
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'maporl' has no attribute {name!r}; it has {', '.join(__all__)}")
