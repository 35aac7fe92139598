"""Words and numbers for sentences."""

from collections.abc import Sequence

from maporl.evaluation.metrics import Share


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "update"), counted(20, "reply"), counted(3, "game")
    ('1 update', '20 replies', '3 games')
    """
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def part(number: int, total: int, noun: str) -> str:
    """Some of all things, and their share.

    >>> part(2, 10, "question")
    '2 of 10 questions (20.0%)'
    """
    return f"{number} of {counted(total, noun)} ({number / total:.1%})"


def few_updates(number: int) -> str:
    """What follows "the first" or "the last".

    >>> few_updates(1), few_updates(3)
    ('update', '3 updates')
    """
    return "update" if number == 1 else counted(number, "update")


def listed(names: Sequence[str]) -> str:
    """Names with commas and an "and".

    >>> listed(["a", "b", "c"]), listed(["a"]), listed([])
    ('a, b and c', 'a', '')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def percent(share: Share) -> str:
    """A share with its 95% interval.

    >>> percent(Share(8, 10))
    '80.0% (49.0 to 94.3%)'
    """
    return f"{share.value:.1%} ({interval_of(share)})"


def interval_of(share: Share) -> str:
    """A share's 95% interval."""
    low, high = share.interval()
    return f"{100 * low:.1f} to {high:.1%}"
