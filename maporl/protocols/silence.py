"""Agents that stay silent in some turns (``speaks``), and answers by which agents decline (``pass``).

Imports no torch.
"""

from collections.abc import Mapping, Sequence

from maporl.types import Utterance

PASSED = "passed"
"""The tag of an answer by which an agent declined."""


def check_speaks(speaks: Mapping[str, Sequence[int]], turns: int) -> None:
    """Check that ``speaks`` names turns from 1 to ``turns`` for each agent in it, in rising order.

    Raises:
        ValueError: an agent has no turn, or a turn that is not played, or its turns do not rise.
    """
    for agent, numbers in speaks.items():
        if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1 or numbers[-1] > turns:
            raise ValueError(
                f"speaks.{agent}: expected rising numbers of turns from 1 to {turns}, such as [1], got {list(numbers)}"
            )


def check_somebody_speaks(speaks: Mapping[str, Sequence[int]], agents: Sequence[str], turns: int) -> None:
    """Check that at least one of the ``agents`` speaks in each turn.

    Raises:
        ValueError: a turn has no speaker.
    """
    for turn in range(turns):
        if agents and not speakers_of(speaks, agents, turn):
            raise ValueError(
                f"speaks: nobody speaks in turn {turn + 1}; let one of {list(agents)} speak then, or lower turns"
            )


def speakers_of(speaks: Mapping[str, Sequence[int]], agents: Sequence[str], turn: int) -> list[str]:
    """Return the ``agents`` that speak at ``turn``, counted from 0. An agent that ``speaks`` does not name always does.

    >>> [speakers_of({"bob": (1, 3)}, ("ann", "bob"), turn) for turn in range(3)]
    [['ann', 'bob'], ['ann'], ['ann', 'bob']]
    """
    return [agent for agent in agents if agent not in speaks or turn + 1 in speaks[agent]]


def answered(said: Sequence[Utterance]) -> list[Utterance]:
    """Return the utterances without those by which agents declined."""
    return [u for u in said if not u.tags.get(PASSED)]


def check_word(word: str | None) -> None:
    """Check the word by which agents decline.

    Raises:
        ValueError: it is empty, or has spaces around it, so that no answer could be equal to it.
    """
    if word is not None and (not word or word != word.strip()):
        raise ValueError(f"pass: expected a word without spaces around it, such as PASS, got {word!r:.40}")


def mark_passes(said: Sequence[Utterance], word: str | None, exempt: str | None = None) -> None:
    """Mark the utterances that are ``word`` and nothing else: they get the tag ``passed`` and do not count as answers.

    Args:
        said: the utterances, before they are graded.
        word: the answer by which an agent declines. None: nobody may decline.
        exempt: an agent whose words are always taken as they are.
    """
    for u in said:
        if word is not None and u.agent != exempt and u.text.strip() == word:
            u.tags[PASSED] = True
            u.answers = False
