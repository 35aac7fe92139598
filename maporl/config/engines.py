"""Every engine by name. To add one, write its module with a function ``build(setup) -> Engine``, and add its line here.

This module imports nothing heavy, because configurations are checked against it before anything is loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineEntry:
    """An engine as configurations know it.

    Args:
        module: where its ``build(setup)`` is (:class:`maporl.engines.build.EngineSetup`); imported when an agent uses it.
        weights: whether its agents have weights in this process: then they need a model, and may learn.
        section: the key of an agent's section that holds its options and goes with this engine alone; None: it has no options,
            or takes them from the agent's ``engine_options``.
        remote: whether it answers with weights of its own while those of this process are being updated, as its class says.
        serves_folders: whether it reads models from folders or the hub, so that a model built on the spot cannot speak through it.
    """

    module: str
    weights: bool = False
    section: str | None = None
    remote: bool = True
    serves_folders: bool = False


ENGINES: dict[str, EngineEntry] = {
    "transformers": EngineEntry("maporl.engines.transformers", weights=True, remote=False),
    "vllm": EngineEntry("maporl.engines.vllm.engine", weights=True, section="vllm", serves_folders=True),
    "human": EngineEntry("maporl.engines.human"),
    "openai": EngineEntry("maporl.engines.openai", section="api"),
}


def has_weights(engine: str) -> bool:
    """Whether agents of ``engine`` have weights in this process."""
    return engine in ENGINES and ENGINES[engine].weights
