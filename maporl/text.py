"""Makes texts of models and people safe to show on a page and in a terminal, and checks texts with placeholders."""

import re
import string
import unicodedata
from collections.abc import Collection
from typing import Any

LONGEST = 20_000
"""The largest number of characters that is shown. A longer text is shown by its beginning and its end."""


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


def check_placeholders(text: str, allowed: Collection[str]) -> None:
    """Check that ``text`` has no placeholders for ``str.format`` but the names in ``allowed``, in braces.

    ``str.format`` also reads attributes, and widths of which a few characters cost gigabytes.

    Raises:
        ValueError: it has another one, or one with an attribute, an index, a conversion or a format.
    """
    for _, name, form, conversion in string.Formatter().parse(text):
        if name is not None and (name not in allowed or form or conversion):
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
            raise ValueError(f"{{{shown:.60}}}; two braces, as in {{{{a}}}}, stand for one")
