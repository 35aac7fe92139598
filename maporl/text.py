"""Words of models and of people, as they may be shown: on a page and in a terminal."""

import re
import unicodedata
from typing import Any

LONGEST = 20_000
"""Characters of a text that are shown; of longer ones the beginning and the end."""


_ODD = re.compile(r"[^\n\t\x20-\x7e]")


def visible(text: Any) -> str:
    """``text`` with control characters that a page would not show, or that would reorder what is around them, made visible, and
    without the middle of what is very long. What is no text is written as one; None is empty.

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
    joins = character in "\u200c\u200d"  # in emoji and in scripts that need them
    return character if joins or kind.startswith("Z") else f"\u27e6U+{code:04X}\u27e7"
