"""The sections ``cluster.tinker`` and ``agents.NAME.tinker``."""

from maporl.sections import NotNegative, Positive, section
from trl_ext.ppo.options import option


@section()
class PriceSection:
    """The prices of a base model, in dollars for a million tokens."""

    read: NotNegative = option(0.0, "Tokens of prompts, and tokens whose log-probabilities are computed.")
    sampled: NotNegative = option(0.0, "Sampled tokens.")
    trained: NotNegative = option(0.0, "Tokens of forward and backward passes.")


@section()
class TinkerSection:
    """A service that speaks the Tinker API."""

    base_url: str | None = option(
        None,
        "Address of a server that speaks the Tinker API, such as http://127.0.0.1:8000. None: the Tinker service.",
    )
    key_variable: str = option("TINKER_API_KEY", "Name of the environment variable with the key of the service.")
    sessions: Positive = option(
        1,
        "Number of sessions, over which the policies are spread. The client limits how much a session asks at a time.",
    )
    prices: dict[str, PriceSection] = option(
        {},
        "Prices of base models, by their names: {Qwen/Qwen3-8B: {read: 0.13, sampled: 0.4, trained: 0.4}}. `maporl "
        "check` and `maporl plan` then say what an update costs.",
    )


@section()
class AgentTinkerSection:
    """Where the policy of an agent is, if this differs from `cluster.tinker`, and its critic."""

    base_url: str | None = option(None, "The same as cluster.tinker.base_url, for this agent.")
    critic: str | None = option(
        None,
        "For critic: model: a small model with the same tokenizer, which is trained in this process. A folder or a hub "
        "name.",
    )
