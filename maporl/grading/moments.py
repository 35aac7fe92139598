r"""Dates and times of day as people write them, in any order that leaves no doubt. Every rule is a doctest."""

import re
from datetime import datetime
from functools import lru_cache
from typing import Any

from maporl.grading.numbers import plain

Moment = tuple[Any, ...]
"""Year, month, day and hour, None where it tells none; minute, second, and whether it tells the half of the day.

A date in doubt, such as 05/01/2021, is its text alone.
"""
_NAMES = str.split("january february march april may june july august sept(?:ember)? october november december")
_MONTH = "(?:" + "|".join(f"{name[:3]}(?:{name[3:]})?" for name in _NAMES) + r")\b"
_RUN = re.compile(
    rf"(?<![\w.:/-])(?:(?:{_MONTH}|(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|[ap]m\b|\d{{1,4}}(?:st|nd|rd|th)?(?![^\W_]))"
    r"(?:[\s,.:/-]+(?:(?:of|the)\s+)*|$|(?!\w)))+"
)
_MEANT = re.compile(rf"{_MONTH}.*\d|\d.*{_MONTH}|\d[-/.]\d+[-/.]\d|\d:\d\d|\d [ap]m")
_MAYBE = re.compile(rf"(?i)\b{_MONTH}|\d\W*[-/.:]\W*\d\d|\d\W*(?:text\W*)?[ap]\.?\s?m\b|\d in the|noon|midnight")
_DEFAULTS = (datetime(2000, 1, 1, 1), datetime(2004, 2, 2, 2))


def moments(text: str) -> tuple[list[Moment], str, str]:
    """The dates and the times of day in ``text``, what stands before the first one, and what else stands there.

    The order of a date such as 05/01/2021 is not known, and it is only what it is as it is written.

    >>> [moments(text)[0][0][:3] for text in ("the 5th of May", "Friday, May 5th, 2021", "2021-05-25", "25/05/2021", "05/01/2021")]
    [(None, 5, 5), (2021, 5, 5), (2021, 5, 25), (2021, 5, 25), ('05/01/2021',)]
    >>> [moments(text)[0][0][3:] for text in ("3:45 in the afternoon", "15:45", "3:45", "12 a.m.", "noon")]
    [(15, 45, 0, True), (15, 45, 0, True), (3, 45, 0, False), (0, 0, 0, True), (12, 0, 0, True)]
    >>> moments("It ends at 5 p.m., on 3 of 5 days")[1:], moments("in May, or in 2021")[0]
    (('it ends at ', 'on 3 of 5 days'), [])
    """  # noqa: E501
    found: list[Moment] = []

    def without(run: re.Match[str]) -> str:
        words = re.sub(r"\b(?:of|the)\b", " ", run[0]).strip(" ,.:/-")
        moment = _moment(words) if _MEANT.search(words) else None
        found.extend(filter(None, [moment]))
        return "\0" if moment else run[0]

    text = plain(text).lower()
    for named, hour in (("noon", "12 pm"), ("midnight", "12 am")):
        text = re.sub(rf"(?:\b12(?::00)?\s*)?(?:[ap]\.?m\.?\s+)?\b{named}\b", hour, text)
    text = re.sub(r"\s*\bin the (?:(morning)|afternoon|evening)\b", lambda half: " am" if half[1] else " pm", text)
    before, _, after = _RUN.sub(without, re.sub(r"(?:(?<=\d)|\s*\b)([ap])\.?\s?m\b\.?", r" \1m", text)).partition("\0")
    return found, before, after.replace("\0", " ")


def _moment(run: str) -> Moment | None:
    from dateutil.parser import parse  # type: ignore[import-untyped]  # slow to import

    try:
        read = [parse(run, default=d, dayfirst=f) for f in (False, not run[:4].isdigit()) for d in _DEFAULTS]
    except (ValueError, OverflowError):
        return None
    if read[0] != read[2]:
        return (run,)
    told = [a if a == b else None for a, b in zip(*(d.timetuple()[:6] for d in read[:2]), strict=True)]
    return (*told, run.endswith("m") or not 0 < (told[3] or 0) < 13)


@lru_cache(1024)  # a label is read again for each answer
def moment_of(text: str) -> Moment | None:
    """The date or the time that ``text`` is, or None if it is anything else.

    >>> moment_of("on the 3rd of March")[:3], moment_of("after March 3"), moment_of("3"), moment_of("March 3 or 4")
    ((None, 3, 3), None, None, None)
    """
    found, before, after = moments(text) if len(text) <= 100 and _MAYBE.search(text) else ([], "", "")
    alone = before.strip() in ("", "on", "the", "on the", "at") and not after.strip()
    return found[0] if alone and len(found) == 1 else None


def same_moment(one: Moment, other: Moment) -> bool:
    """Whether two dates or times are the same. A time whose half of the day is not told may be in either.

    >>> same_moment(moment_of("15:45"), moment_of("3:45 PM")), same_moment(moment_of("3:45"), moment_of("3:45 PM"))
    (True, True)
    >>> same_moment(moment_of("3:45 a.m."), moment_of("15:45")), same_moment(moment_of("May 5"), moment_of("May 5, 2020"))
    (False, False)
    """  # noqa: E501
    open_half = len(one) == len(other) > 1 and None not in (one[3], other[3]) and not (one[-1] and other[-1])
    same_hour = one[3:4] == other[3:4] or (open_half and (one[3] - other[3]) % 12 == 0)
    return one[:3] == other[:3] and same_hour and one[4:6] == other[4:6]
