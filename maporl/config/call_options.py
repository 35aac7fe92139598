"""Options of agents that call tools: their limits, and the texts of the plain call formats. Imports no torch."""

from typing import Literal

from maporl.sections import AboveZero, Positive, section
from maporl.text import text_option
from trl_ext.ppo.options import option


@section()
class CallLimits:
    """The limits of an agent's calls."""

    calls: Positive = option(8, "Most calls of a turn, failed ones included.")
    failures: Positive = option(3, "Number of failed calls in a row at which a turn has no calls left.")
    seconds: AboveZero = option(30.0, "Most seconds of a call.")
    result_tokens: Positive = option(512, "Most tokens of a result that the agent is shown.")
    at_limit: Literal["answer", "end"] = option(
        "answer",
        "What happens when no calls are left. The agent gets a message and answers once more (answer), or its turn "
        "ends (end).",
    )
    parallel: bool = option(
        False,
        "Let a completion have several calls in the formats json and tags; it then ends with EOS. If not, it ends "
        "right after its first call.",
    )


@section()
class CallTexts:
    """The texts of the formats ``json`` and ``tags``. Tiny models know few characters, so that all can be changed.

    Raises:
        ValueError: a text has an unknown placeholder.
    """

    intro: str = text_option(
        "You can use these tools:",
        "Stands before the lines of the tools, at the end of the system message.",
    )
    line: str = text_option(
        "{signature}",
        "A tool, by its {signature}: a line with its name, arguments and description, and a line for each "
        "argument that has a description.",
    )
    json: str = text_option(
        'To use one, write <call>{{"name": NAME, "arguments": {{...}}}}</call> and stop. You will be told what it returns. '  # noqa: E501
        "When you know enough, answer without a call.",
        "How a call is written, for the format json.",
    )
    tags: str = text_option(
        "To use one, write its name in tags, as <{name}>what you want</{name}>, and stop. You will be told what it "
        "returns. When you know enough, answer without a call.",
        "How a call is written, for the format tags, with the {name} of the tool.",
    )
    returned: str = text_option("{name} returned: {text}", "A result, by {name} and {text}.")
    failed: str = text_option("{name} failed: {text}", "An error, by {name} and {text}.")
    limit: str = text_option(
        "You cannot call any more. Give your answer.",
        "Stands after the last result if no further call may be made.",
    )
