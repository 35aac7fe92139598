"""The sections of a configuration that single methods read: options of their reward sources. Imports no torch."""

from typing import Annotated

from pydantic import Field

from maporl.sections import Finite, Positive, section
from maporl.text import check_pattern, text_option
from trl_ext.ppo.options import option


@section()
class JudgementSection:
    """The options of the reward source ``judgement``: what an agent earns that judges the results which it called
    for."""

    right: Finite = option(0.3, "For a right judgement.")
    wrong_yes: Finite = option(-0.6, "For a useless result that is called useful.")
    wrong_no: Finite = option(-0.3, "For a useful result that is called useless.")
    similar: Annotated[float, Field(ge=0, lt=1)] = option(
        0.7,
        "A result is useful if it has more than this share of the right answer's words.",
    )


@section()
class ArenaSection:
    """The options of the reward source ``arena``: an agent of the team says which of two final answers is better.

    Raises:
        ValueError: ``prompt`` has another placeholder, or ``pattern`` is not a regular expression.
    """

    agent: str = option(help="The agent that compares.")
    prompt: str = text_option(
        "{question}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better? End with a line 'Better: "
        "A' or 'Better: B'.",
        "What it is asked, with {question}, {first} and {second}.",
    )
    pattern: str = option(r"[Bb]etter:\s*([AB])", "A regular expression whose last match holds A or B.")

    def __post_init__(self):
        check_pattern("pattern", self.pattern, one_group=True)


@section()
class AnnotatorSection:
    """The options of the reward source ``annotator``: an agent labels what others observe, and the labels are paid
    later.

    Raises:
        ValueError: ``prompt`` has another placeholder or lacks ``{observation}``, or a pattern is not a regular
            expression.
    """

    agent: str = option(help="The agent that labels.")
    prompt: str = text_option(
        "{question}\n\nSomeone at work on this now sees:\n{observation}\n\nDoes it show that this was a step forward? "
        "End with a line 'Label: 1' for yes, or 'Label: 0' for no.",
        "What it is asked, with {observation!}, and {question}, that of the utterance that is paid.",
    )
    pattern: str = option(r"[Ll]abel:\s*(\d+(?:\.\d+)?)", "A regular expression whose last match holds the label.")
    largest: Annotated[float, Field(gt=0)] = option(1.0, "The largest label, by which the label is divided.")
    read: str | None = option(
        None,
        "A regular expression whose last match, or its group, is taken as the observation, so that what differs "
        "without meaning does not count as new.",
    )
    every: Positive = option(1, "Labels are asked for after every so many updates.")
    per_update: Positive = option(64, "Most new observations that are labelled at a time, the latest first.")

    def __post_init__(self):
        check_pattern("pattern", self.pattern, one_group=True)
        if self.read is not None:
            check_pattern("read", self.read)
