"""All engines by name. To add one, write its module with a function ``build(setup) -> Engine``, and add a line here.

This module imports nothing heavy, because configurations are checked against it before anything is loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineEntry:
    """The properties of an engine that a configuration needs.

    Args:
        module: the module with ``build(setup)``, which takes a :class:`maporl.engines.build.EngineSetup`. It is
            imported when an agent uses the engine.
        weights: whether its agents have weights in this process. Such agents need a model, and may be trained.
        section: the key of an agent's section that holds the options of this engine only. None means that the engine
            has no options, or reads the agent's ``engine_options``.
        example: what that section may hold, for messages.
        remote: whether it samples from its own copy of the weights; the same as the engine's class attribute.
        serves_folders: whether it reads models from folders or the hub. A model that is built on the spot cannot use
            it.
        top_k: whether it can sample from the likeliest tokens only. OpenAI's interface has top_p and no top_k.
        samples: whether it draws tokens. A person does not.
        tells_cut: whether its log-probabilities are those of what top_p and top_k leave; the same as the engine's class
            attribute.
    """

    module: str
    weights: bool = False
    section: str | None = None
    example: str = ""
    remote: bool = True
    serves_folders: bool = False
    top_k: bool = True
    samples: bool = True
    tells_cut: bool = False


ENGINES: dict[str, EngineEntry] = {
    "transformers": EngineEntry("maporl.engines.transformers", weights=True, remote=False),
    "vllm": EngineEntry(
        "maporl.integrations.vllm.engine",
        weights=True,
        section="vllm",
        example="{urls: [http://127.0.0.1:8000]}",
        serves_folders=True,
        tells_cut=True,
    ),
    "human": EngineEntry("maporl.engines.human", samples=False),
    "random": EngineEntry("maporl.engines.random_moves", samples=False),
    "openai": EngineEntry("maporl.engines.openai", section="api", example="{model: NAME}", top_k=False),
    "python": EngineEntry("maporl.engines.scripted"),
}

IN_PYTHON = "python"
"""The engine of an agent whose engine a Python program passes to its trainer, and which has no name here."""


def has_weights(engine: str) -> bool:
    """Return whether agents of ``engine`` have weights in this process."""
    return engine in ENGINES and ENGINES[engine].weights
