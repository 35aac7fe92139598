"""maporl: train teams of language models that talk to each other.

Names are loaded on first use, so that ``import maporl`` is quick.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "Agent": "maporl.agents",
    "Team": "maporl.agents",
    "ANLI": "maporl.tasks",
    "Arithmetic": "maporl.tasks",
    "GSM8K": "maporl.tasks",
    "TASKS": "maporl.tasks",
    "Task": "maporl.tasks",
    "PROTOCOLS": "maporl.protocols",
    "Debate": "maporl.protocols",
    "Config": "maporl.config",
    "ConfigError": "maporl.config",
    "RewardSection": "maporl.sections",
    "TinySection": "maporl.sections",
    "WarmStartSection": "maporl.sections",
    "load": "maporl.config",
    "MultiAgentPPOConfig": "maporl.ppo_config",
    "MultiAgentPPOTrainer": "maporl.trainer",
    "Ask": "maporl.types",
    "Dialogue": "maporl.types",
    "Example": "maporl.types",
    "Grade": "maporl.types",
    "Utterance": "maporl.types",
    "build_tiny_model": "maporl.tiny",
    "build_tiny_tokenizer": "maporl.tiny",
    "warm_start": "maporl.warmstart",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'maporl' has no attribute {name!r}; it has {', '.join(__all__)}")
