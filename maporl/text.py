"""Makes texts of models and people safe to show, and reads placeholders and regular expressions of a configuration
safely."""

import builtins
import codecs
import re
import string
import symtable
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import regex

from maporl.errors import ConfigError, UserError
from trl_ext.chat.thoughts import END_OF_MESSAGE, THINKING, THOUGHT_ENDS
from trl_ext.ppo.options import option

LONGEST = 20_000
"""The largest number of characters that is shown. A longer text is shown by its beginning and its end."""


_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
PATTERN_SECONDS = 5.0
"""A user's regular expression may search one text for so long.

One that reads each character once takes milliseconds.
"""
_NAMED = re.compile(r"(\{?)\{(\w+)(!?)\}\}?")
"""What :func:`text_option` reads in a help text: whether the braces are double, the name, and the mark."""
_PYTHON_FENCE = re.compile(r"(?<![`~])(?:`{3,}|~{3,})[ \t]*(?:\{[ \t]*\.?)?(?:python3?|py)\b[^\n`]*\n", re.IGNORECASE)
_QUOTED = re.compile(r"(?:^[ \t]*>[^\n]*(?:\n|\Z))+", re.MULTILINE)
_QUOTED_FENCE = re.compile(r"^[ \t]*>[ \t>]*(?:```|~~~)", re.MULTILINE)
_QUOTE_MARK = re.compile(r"^[ \t]*> ?", re.MULTILINE)
_INDENTATION = re.compile(r"^[ \t\xa0]+", re.MULTILINE)
_END_OF_BLOCK = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_TAG = r"(?:[\w|]{1,16}:)?(?:think|thinking|thoughts?|reason|reasoning|reflection|scratchpad|analysis|monologue)(?:\s[^<>\n]{0,64})?>"  # noqa: E501
_THOUGHT = re.compile(
    rf"(?P<opens><\s{{0,4}}{_TAG}|<\|channel\|?>\s*(?:analysis|commentary|thought)\b|<\|begin_of_thought\|>"
    r"|(?-i:\Aanalysis(?![\s:.,;a-z-])|assistant(?:analysis|commentary)(?![a-z]))"
    rf"|{'|'.join(map(re.escape, THINKING))})|(?P<inside>{re.escape(END_OF_MESSAGE)})"
    rf"|<\s{{0,4}}/\s{{0,4}}{_TAG}|<\|channel\|?>\s*final(?:<\|message\|>)?|<\|end_of_thought\|>|(?-i:assistantfinal|\Afinal(?=[A-Z\\$*]))"
    rf"|{'|'.join(map(re.escape, THOUGHT_ENDS))}",
    re.IGNORECASE,
)
"""The marks of thoughts: those in :mod:`trl_ext.chat.thoughts`, tags of other prompts, and the channels of gpt-oss,
also as they read after a decoder has left their special tokens out: ``analysisLet me see.assistantfinalIt is 5.``"""
_MAY_THINK = re.compile(
    r"<\s{0,4}/?\s{0,4}[\w|]|\[/?THINK|◁|\Aanalysis|\Afinal|assistant(?:analysis|commentary|final)", re.IGNORECASE
)
_ODD = re.compile(r"[^\n\t\x20-\x7e]")
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


BOM = "\ufeff"
"""The byte-order mark with which some editors and spreadsheets begin a file, read as a character."""
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # it begins as that of UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def encoding_of(content: bytes) -> str:
    """Return the encoding of a text that begins with ``content``: what its byte-order mark says, or else UTF-8.

    Decoding by it leaves the mark out.

    >>> [encoding_of(text.encode(name)) for text, name in (("a", "utf-8"), ("a", "utf-8-sig"), ("a", "utf-16"))]
    ['utf-8', 'utf-8-sig', 'utf-16']
    """
    return next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")


def read_users_text(path: Path, as_is: bool = False) -> str:
    """Return the text of a file of the user's, which may begin with a byte-order mark. The mark is left out.

    Its line ends become line feeds, unless it is read ``as_is``.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is neither UTF-8 nor what its mark says.
    """
    content = path.read_bytes()
    text = content.decode(encoding_of(content))
    return text if as_is else text.replace("\r\n", "\n").replace("\r", "\n")


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
        text = (
            f"{text[:half]}\n\n[... {left:,} characters are left out here; they are in the run's folder "
            f"...]\n\n{text[-half:]}"
        )
    return printable(text)


def printable(text: str) -> str:
    """Return ``text`` with visible signs in place of control characters and of characters that reorder text.

    A terminal would obey them: they colour, move and overwrite what stands there, set its title, and hide links.

    >>> printable("a\\x1b]8;;http://x\\x07b\\rc"), printable("\\x9b2J"), printable("x\\u2066y\\ud800")
    ('a\u241b]8;;http://x\u2407b\u240dc', '\u27e6U+009B\u27e72J', 'x\u27e6U+2066\u27e7y\u27e6U+D800\u27e7')
    """
    return _ODD.sub(lambda match: _seen(match[0]), text)


def all_printable(value: Any) -> Any:
    """Return ``value`` with :func:`printable` done to every text in its lists and dictionaries, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {all_printable(key): all_printable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(part) for part in value]
    return value


def well_formed(text: str) -> str:
    """Return ``text`` with U+FFFD in place of halves of surrogate pairs, which no file and no tokenizer can encode.

    JSON may hold them, and a terminal may send bytes that UTF-8 does not have. Bytes that Python kept in them because
    its locale knew no better are decoded.

    >>> well_formed("a\\ud800"), well_formed("\\udcc3\\udca9"), well_formed("\\udcff")
    ('a\ufffd', '\u00e9', '\ufffd')
    """
    text = _HALVES.sub("\ufffd", text)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def cleaned(text: str) -> str:
    """Return what a stranger's tool or environment says with U+FFFD in place of what no reader should obey: control
    characters but for line ends and tabs, characters that reorder the text around them, and halves of characters.

    >>> cleaned("a\\x1b[31mb\\r\\n"), cleaned("\\x9b2Jx\\u202ey")
    ('a\ufffd[31mb\\n', '\ufffd2Jx\ufffdy')
    """
    return _OBEYED.sub("\ufffd", well_formed(text).replace("\r\n", "\n"))


def well_formed_json(value: Any) -> Any:
    """Return a value of JSON with :func:`well_formed` done to every text in it, names included.

    >>> well_formed_json({"a\\ud800": ["b", 1, "\\ud800"]})
    {'a\ufffd': ['b', 1, '\ufffd']}
    """
    if isinstance(value, str):
        return value if value.isascii() else well_formed(value)
    if isinstance(value, list):
        return [well_formed_json(part) for part in value]
    if isinstance(value, dict):
        return {well_formed_json(name): well_formed_json(part) for name, part in value.items()}
    return value


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


def check_template(name: str, text: str, allowed: Collection[str], needed: Collection[str] | None = None) -> None:
    """Check that ``text`` uses only the placeholders in ``allowed``, and uses all those in ``needed``.

    Raises:
        ValueError: the text has another placeholder, cannot be formatted, or lacks a placeholder that it needs.
    """
    try:
        check_placeholders(text, allowed)
    except ValueError as error:
        raise ValueError(f"{name}: it may use {sorted(allowed)} in braces, but has {error}") from None
    for part in sorted(needed or ()):
        if text.format(**dict.fromkeys(allowed, "")) == text.format(**(dict.fromkeys(allowed, "") | {part: "?"})):
            raise ValueError(f"{name}: it must contain {{{part}}}, so that the agent is told it; got {text!r:.80}")


def text_option(default: str | None, help: str) -> Any:
    """Return a field of a dataclass of options (:func:`trl_ext.ppo.options.option`) that is a text with placeholders.

    Its help names them, as in ``"What is asked, with {question!} and {draft}, not {{others}}."``: the text must have
    those with a mark, and may have the other ones in single braces. Whoever reads the help sees all of them in single
    braces, without a mark. A text whose help names none may have none.
    """
    marked = {name: bool(mark) for doubled, name, mark in _NAMED.findall(help) if not doubled}
    needed = [name for name in marked if marked[name]]
    must = partial(check_template, allowed=list(marked), needed=needed)
    return option(default, _NAMED.sub(r"{\2}", help), must=must)


def asked_with(default: str, names: Collection[str] = ("question",)) -> Any:
    """Return the option ``instruction`` of a task. The names in single braces are replaced, and all other braces stay
    as they are, as in ``\\boxed{}``."""

    def must(option: str, text: str) -> None:
        for name in names:
            if f"{{{name}}}" not in text:
                raise ValueError(f"{option}: expected the text to contain {{{name}}}, got {text!r:.80}")

    return option(default, f"How agents are asked, with {' and '.join(f'{{{name}}}' for name in names)}.", must=must)


def pattern_option(default: str | None, help: str, one_group: bool = False) -> Any:
    """Return an option that is a regular expression, or may be None (:func:`check_pattern`)."""
    return option(default, help, must=partial(check_pattern, one_group=one_group))


def check_names(names: Any, where: str) -> None:
    """Check that ``names`` is a set of texts, because callers compare it with other sets.

    Raises:
        ConfigError: it is something else, such as a tuple, or one text. The message begins with ``where``.
    """
    if isinstance(names, set | frozenset) and all(isinstance(name, str) for name in names):
        return
    meant = [names] if isinstance(names, str) else list(names) if isinstance(names, list | tuple) else ["NAME"]
    raise ConfigError(f"{where}: expected a set of names, as frozenset({{{str(meant)[1:-1]}}}), got {names!r:.80}")


class PatternError(UserError, ValueError):
    """A regular expression of the configuration takes too long. The message quotes it."""


def check_pattern(option: str, pattern: str, one_group: bool = False) -> int:
    """Return the number of groups of a user's regular expression. ``option`` is its name in the configuration.

    Raises:
        ValueError: it is not a regular expression, or has several groups where ``one_group`` is what is read.
    """
    try:
        groups = regex.compile(pattern).groups
    except regex.error as error:
        raise ValueError(f"{option}: {pattern!r} is not a regular expression: {error}") from None
    if one_group and groups > 1:
        raise ValueError(f"{option}: expected at most one group, around what is read; got {pattern!r:.80}")
    return groups


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
            f"the regular expression {pattern!r} took more than {PATTERN_SECONDS:g} s on a text of {len(text)} "
            "characters; write one in which each character can be read in one way only"
        ) from None


def spoken(text: str) -> str:
    r"""``text`` without thoughts: what is marked as such, and what stands before the end of a thought that the prompt
    began.

    >>> spoken("<think>5? No.</think>7"), spoken("5? No.</think>7"), spoken("<think>5? Let me"), spoken("7<think>so</think>")
    ('7', '7', '', '7')
    >>> spoken("<|channel|>analysis<|message|>5?<|end|><|start|>assistant<|channel|>final<|message|>7"), spoken("a < b")
    ('7', 'a < b')
    >>> spoken("analysisIs it 5? No.assistantfinalIt is 7"), spoken("analysisIs it 5?"), spoken("<seed:think>5</seed:think>7")
    ('It is 7', '', '7')
    """  # noqa: E501
    if not _MAY_THINK.search(text):
        return text
    parts, place, inside = [], 0, False
    for tag in _THOUGHT.finditer(text):
        if tag["inside"] and not inside:
            continue
        if tag["opens"] and not inside:
            parts.append(text[place : tag.start()])
            inside = True
        elif not tag["opens"]:
            if not inside:
                parts = []  # the prompt had begun the thought
            inside, place = False, tag.end()
    return "".join([*parts, "" if inside else text[place:]])


def code_of(text: str, name: str = "") -> str:
    """Return the last fenced block of ``text``, or an empty text if it has none that is closed. Thoughts do not count.

    With a ``name``, it is the last block that defines this function, if any does: examples of its use often follow it.
    If blocks are marked as Python, these count alone, unless only another one defines the function: a model that begins
    inside a block, because its prompt ends with an opening fence, closes one that it has not opened, and all others
    would be read the wrong way round. A block in a list is indented as a whole, and this indentation is taken away; so
    are the marks of a quotation (``>``), and a byte order mark. A fence in a docstring closes no block that is marked.
    Blocks before it are part of the program where they define a name that it uses and does not define. Without any such
    block, the last one is taken although it is not closed, if Python can read it.

    >>> code_of("First ```x = 1```. Then\\n```python\\nx = 2\\n```")
    'x = 2\\n'
    >>> code_of("x = 1\\n```\\nHere it is again:\\n```python\\nx = 2\\n```\\nIt prints\\n```\\n2\\n```")
    'x = 2\\n'
    >>> code_of("1.  ```python\\n    def f(x):\\n        return x\\n    ```\\n2.  ```python\\n    f(2)\\n    ```", "f")
    'def f(x):\\n    return x\\n'
    >>> code_of("```python\\nimport math\\n```\\nNow:\\n```python\\ndef f(x):\\n    return math.sqrt(x)\\n```", "f")
    'import math\\n\\ndef f(x):\\n    return math.sqrt(x)\\n'
    """
    text = _unquoted(spoken(text))
    marked = _marked_blocks(text)
    fences = text.split("```")
    inner = [_without_mark(block) for block in fences[1:-1]]
    if name:
        # what stands between blocks and before them is looked at too: nobody knows where the first one began
        defines = re.compile(
            rf"^(?:async[ \t]+def|def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*(?::[^=\n]*)?=(?!=)",
            re.MULTILINE,
        )
        for blocks in (marked, inner, fences[:-1][:1]):
            levels = [_level(block) for block in blocks]
            for place in reversed(range(len(levels))):
                if defines.search(levels[place]):
                    return _with_what_it_needs(levels[:place], levels[place])
        opening = list(_PYTHON_FENCE.finditer(text))[-1:]
        cut_off = _level(text[opening[0].end() :]) if opening else ""
        if defines.search(cut_off) and _names(cut_off):
            return _with_what_it_needs([_level(block) for block in marked], cut_off)
    if marked:
        return _level(marked[-1])
    if len(fences) < 3:
        return ""
    return _level(inner[-1] if len(fences) % 2 else inner[-2])


def _unquoted(text: str) -> str:
    """``text`` without the marks before the lines of a quotation that has a fenced block, or of one in another."""

    def bare(quotation: re.Match[str]) -> str:
        quoted = quotation[0]
        return _QUOTE_MARK.sub("", quoted) if _QUOTED_FENCE.search(quoted) else quoted

    for _ in range(2):
        if _QUOTED_FENCE.search(text):
            text = _QUOTED.sub(bare, text)
    return text


def _with_what_it_needs(earlier: list[str], code: str) -> str:
    """``code`` after those of the ``earlier`` blocks that define a name which it, or another of them, uses."""
    missing = list((_names(code) or (set(), set()))[1]) if earlier else []
    read = [_names(block) or (set(), set()) for block in earlier] if missing else []
    last = {name: place for place, (defined, _) in enumerate(read) for name in defined}
    needed: set[int] = set()
    while missing:
        place = last.get(missing.pop())
        if place is not None and place not in needed:
            needed.add(place)
            missing += read[place][1]
    return "".join([*(f"{earlier[place].rstrip()}\n\n" for place in sorted(needed)), code])


def _names(code: str) -> tuple[set[str], set[str]] | None:
    """The names that a program defines, and those that it uses and nobody defines; None if it is not Python."""
    try:
        tables = [symtable.symtable(code, "<program>", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    defined, used = set(), set()
    for table in tables:  # which grows
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table is tables[0] or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    return defined, used - defined - set(vars(builtins))


def _marked_blocks(text: str) -> list[str]:
    """The closed blocks marked as Python, up to the first fence that begins a line, or else anywhere."""
    openings = list(_PYTHON_FENCE.finditer(text))
    ends = [*(opening.start() for opening in openings[1:]), len(text)]
    blocks, closed = [], 0
    for opening, end in zip(openings, ends, strict=False):
        start = opening.end()
        if start <= closed:
            continue  # an example in the docstring of the block before
        rest = text[start : end + 3]  # the fence of the next block may close this one
        closing = _END_OF_BLOCK.search(rest)
        place = start + closing.start() if closing else text.find("```", start, end + 3)
        if closing and _names(_level(text[start:place])) is None:  # a fence in a docstring does not close the block
            later = (fence.start() for fence in islice(_END_OF_BLOCK.finditer(text, place + 1), 8))
            place = next((fence for fence in later if _names(_level(text[start:fence]))), place)
        if place >= 0:
            blocks.append(text[start:place])
            closed = place
    return blocks


def _without_mark(block: str) -> str:
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().lower() in ("", "python", "python3", "py") else block


def _level(block: str) -> str:
    """``block`` without the blanks before all its lines. Only a block whose first line is indented has any."""
    # a byte order mark goes too; no-break spaces that indent lines become spaces where it is not Python else
    block = block.removeprefix("\ufeff")
    if "\xa0" in block and _names(block) is None:
        block = _INDENTATION.sub(lambda blanks: blanks[0].replace("\xa0", " "), block)
    first = next((line for line in block.splitlines() if line.strip()), "")
    if not first[:1].isspace():
        return block
    return textwrap.dedent(block).lstrip("\n").rstrip(" \t")


def asserts_in(text: str, name: str) -> list[str]:
    """Return the lines of ``text``, but for thoughts, that begin with ``assert`` and use the word ``name``.

    >>> asserts_in("Tests:\\nassert f(1) == 2\\nassert g(1) == 2\\nassert off(2)", "f")
    ['assert f(1) == 2']
    """
    lines = [line.strip() for line in spoken(text).splitlines()]
    return [line for line in lines if line.startswith("assert ") and re.search(rf"\b{re.escape(name)}\b", line)]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> markdown_table(["a", "b"], [[1, 2]])
    ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    lines = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]
