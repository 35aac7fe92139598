"""Makes texts of models and people safe to show, and searches them with a user's regular expressions in bounded time."""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import regex

from maporl.errors import UserError

LONGEST = 20_000
"""The largest number of characters that is shown. A longer text is shown by its beginning and its end."""


PATTERN_SECONDS = 5.0
"""A user's regular expression may search one text for so long. One that reads each character once takes milliseconds."""
_ODD = re.compile(r"[^\n\t\x20-\x7e]")


def visible(text: Any) -> str:
    """Return ``text`` in a form that can be shown.

    Control characters that a page would not show, and characters that would reorder the text around them, become
    visible signs. The middle of a very long text is left out. Other values than strings are converted to text, and None
    becomes an empty text.

    >>> visible("a\\x1b[31mb"), visible("x\\u202ey"), visible(None), visible(3)
    ('a\\u241b[31mb', 'x\\u27e6U+202E\\u27e7y', '', '3')
    """
    text = "" if text is None else str(text)
    if len(text) > LONGEST:
        half = LONGEST // 2
        left = len(text) - 2 * half
        text = f"{text[:half]}\n\n[... {left:,} characters are left out here; they are in the run's folder ...]\n\n{text[-half:]}"
    return _ODD.sub(lambda found: _seen(found[0]), text)


def _seen(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    kind = unicodedata.category(character)
    joins = character in "\u200c\u200d"  # emoji and some scripts need these characters
    return character if joins or kind.startswith("Z") else f"\u27e6U+{code:04X}\u27e7"


class PatternError(UserError, ValueError):
    """A regular expression of the configuration takes too long. The message quotes it."""


def check_pattern(option: str, pattern: str) -> int:
    """Return the number of groups of a user's regular expression. ``option`` is its name in the configuration.

    Raises:
        ValueError: it is not a regular expression.
    """
    try:
        return regex.compile(pattern).groups
    except regex.error as error:
        raise ValueError(f"{option}: {pattern!r} is not a regular expression: {error}") from None


def matches(pattern: str, text: str, ignore_case: bool = False) -> Iterator[regex.Match[str]]:
    r"""The matches of a user's regular expression in ``text``, from left to right.

    The user's patterns may be of any form and the texts are a model's or a stranger's, so that a search may take for
    ever, such as that of ``(a|a)*b``. The package ``regex`` reads the patterns of :mod:`re` and can stop.

    >>> [match[1] for match in matches(r"score: (\d)", "Score: 3, score: 4", ignore_case=True)]
    ['3', '4']

    Raises:
        PatternError: the search took :data:`PATTERN_SECONDS`.
    """
    try:
        yield from regex.finditer(pattern, text, regex.IGNORECASE if ignore_case else 0, timeout=PATTERN_SECONDS)
    except TimeoutError:
        raise PatternError(
            f"the regular expression {pattern!r} took more than {PATTERN_SECONDS:g} s on a text of {len(text)} characters; "
            "write one in which each character can be read in one way only"
        ) from None
