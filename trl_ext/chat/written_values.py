"""Values as models write them: JSON, and where it is not quite JSON, what Python and some chat formats have instead.

A value is read from its first character to its own last one, so that no mark around a call is looked for inside its
texts. What is read is bounded: nothing is deeper than :data:`DEEPEST`, and every number is finite.
"""

import json
import math
import re
from typing import Any

DEEPEST = 64
"""Most lists and objects inside each other. What is deeper cannot be copied, recorded or checked without end."""
_SPACE = re.compile(r"\s*")
_COMMENTS = re.compile(r"\s*(?:(?://(?!\s*[\d(.-])[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)\s*)*")
"""Space with the comments that models write into JSON. ``7 // 2`` is a division of Python, and no comment."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_][\w-]*")
_TEXTS = [
    re.compile(r'"""((?:[^"\\]|\\.|"(?!""))*)"""', re.DOTALL),
    re.compile(r"'''((?:[^'\\]|\\.|'(?!''))*)'''", re.DOTALL),
    re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL),
    re.compile(r"'([^'\\]*(?:\\.[^'\\]*)*)'", re.DOTALL),
]
_DELIMITERS = ('<|"|>', "<escape>")
"""What the formats of Gemma write around a text."""
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Unreadable(ValueError):
    """A value cannot be read. The message says why, for the model that wrote it."""


def _no_number(word: str) -> Any:
    raise Unreadable(f"JSON has no number {word}")


_JSON = json.JSONDecoder(strict=False, parse_constant=_no_number)


def read_value(text: str, place: int = 0) -> tuple[Any, int]:
    r"""Return the value that begins at ``place``, and the place after it. Space before it is passed over.

    JSON may have line ends in its texts. What is not JSON is read as Python or Gemma would write it.

    >>> read_value('{"a": [1, 2]} and more')
    ({'a': [1, 2]}, 13)
    >>> read_value("{'a': True, b: <escape>x<escape>,}")
    ({'a': True, 'b': 'x'}, 34)

    Raises:
        Unreadable: no value begins there, it does not end, it is too deep, or a number in it is not finite.
    """
    place = past_space(text, place)
    try:
        value, end = _JSON.raw_decode(text, place)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except ValueError as error:
        value, end = _Loose(text, _reason(error, place)).value(place, 0)
    check_value(value)
    return value, end


_TOO_DEEP = f"it has more than {DEEPEST} lists and objects inside each other"


def check_value(value: Any) -> None:
    """Check a value of JSON.

    Raises:
        Unreadable: it is too deep, or a number in it is not finite.
    """
    check_depth(value, finite=True)


def check_depth(value: Any, finite: bool = False) -> None:
    """Check that a value of JSON can be copied and recorded, and if ``finite``, that its numbers are.

    Raises:
        Unreadable: it is too deep, or a number in it is not finite.
    """
    level = [value]
    for depth in range(DEEPEST + 1):
        if finite and any(isinstance(one, float) and not math.isfinite(one) for one in level):
            raise Unreadable("a number in it is not finite")
        inner = [one for one in level if isinstance(one, dict | list | tuple)]
        if not inner:
            return
        if depth == DEEPEST:
            raise Unreadable(_TOO_DEEP)
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]


def whole_value(text: str) -> Any:
    """Return the value that ``text`` is.

    Raises:
        Unreadable: as for :func:`read_value`, or more stands after it.
    """
    value, end = read_value(text)
    if past_space(text, end) < len(text):
        raise Unreadable("more stands after it")
    return value


def past_space(text: str, place: int) -> int:
    """Return the place of the next character that is not a space."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _past_comments(text: str, place: int) -> int:
    match = _COMMENTS.match(text, place)
    return match.end() if match else place


def _reason(error: ValueError, place: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - place}"
    return str(error)[:120]


class _Loose:
    """Reads what is nearly JSON. ``reason`` is why it is not JSON, which errors tell."""

    def __init__(self, text: str, reason: str):
        self.text, self.reason = text, reason

    def value(self, place: int, depth: int) -> tuple[Any, int]:
        """Return the value at ``place`` and the place after it."""
        if depth > DEEPEST:
            raise Unreadable(_TOO_DEEP)
        place = _past_comments(self.text, place)
        first = self.text[place : place + 1]
        if first and first in "{[(":
            return self._several(place, depth)
        if first in ("'", '"', "<"):
            return self.string(place)
        if (number := _NUMBER.match(self.text, place)) is not None:
            words = number[0]
            try:
                return (float(words) if any(c in words for c in ".eE") else int(words)), number.end()
            except ValueError:  # thousands of digits
                raise Unreadable(self.reason) from None
        if (word := _WORD.match(self.text, place)) is not None and word[0] in _WORDS:
            return _WORDS[word[0]], word.end()
        raise Unreadable(self.reason)

    def string(self, place: int) -> tuple[str, int]:
        """Return the text in quotes at ``place`` and the place after it."""
        for pattern in _TEXTS:
            if (match := pattern.match(self.text, place)) is not None:
                return _unescaped(match[1]), match.end()
        for mark in _DELIMITERS:
            if self.text.startswith(mark, place):
                end = self.text.find(mark, place + len(mark))
                if end >= 0:
                    return self.text[place + len(mark) : end], end + len(mark)
        raise Unreadable(self.reason)

    def _several(self, place: int, depth: int) -> tuple[Any, int]:
        """Return the object, list or tuple at ``place``. A comma may stand after its last part."""
        opening = self.text[place]
        closing = _CLOSING[opening]
        named: dict[str, Any] = {}
        plain: list[Any] = []
        place = _past_comments(self.text, place + 1)
        while not self.text.startswith(closing, place):
            if opening == "{":
                key, place = self._key(place)
                named[key], place = self.value(place, depth + 1)
            else:
                part, place = self.value(place, depth + 1)
                plain.append(part)
            place = _past_comments(self.text, place)
            if self.text.startswith(",", place):
                place = _past_comments(self.text, place + 1)
            elif not self.text.startswith(closing, place):
                raise Unreadable(self.reason)
        return (named if opening == "{" else plain), place + 1

    def _key(self, place: int) -> tuple[str, int]:
        word = _WORD.match(self.text, place)
        key, place = (word[0], word.end()) if word else self.string(place)
        place = _past_comments(self.text, place)
        if not self.text.startswith(":", place):
            raise Unreadable(self.reason)
        return key, place + 1


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text

    def meant(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, code if code in "\\'\"/`" else match[0])

    plain = _ESCAPE.sub(meant, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
