"""How a chat template shows tools, and how its model writes calls.

A model's own way of calling tools is what its template taught it. It can be used if the template shows calls and
results, and if the call that it shows is read again as it was: by :mod:`trl_ext.chat.written_calls`, which knows how
the models of most families write calls, or else by the tokenizer's response template or the one that TRL has for a
known chat template.
"""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from trl_ext.chat.encoding import OWN_TEMPLATES, ChatError, Tokenizer, render, turn_end
from trl_ext.chat.templates import TemplateFailed, read_calls
from trl_ext.chat.written_calls import MARKS
from trl_ext.from_trl import add_response_schema

PREFIX = 64
"""How many tokens of the prompt's end the reader is given."""
_OPTIONS = re.compile(r"(\{% set \w+ = [^%]*%\})*")
_NAME, _KEY, _VALUE, _SHOWN = "tool_7f3a", "key_b9d4", "value_d6e7", "content_c4f9"


@dataclass(frozen=True)
class CallParts:
    """How a call is written, in literals of Lark's form, in which special tokens stand by their ids.

    Args:
        before: what stands before the name of the tool.
        between: what stands between the name and the arguments.
        after: what stands behind the arguments.
        key: what stands before the name of an argument, where each has marks of its own. Empty: the arguments are JSON.
        value: what stands between its name and its value, which is a text as it is, or else JSON.
        end: what stands behind its value.
    """

    before: list[str]
    between: list[str]
    after: list[str]
    key: list[str] = field(default_factory=list)
    value: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)


class NativeCalls:
    """Reads the calls of models whose chat template knows tools.

    Args:
        tokenizer: the tokenizer with the chat template.
        template: a response template, which says how the model writes calls. None: in one of the ways that
            :mod:`trl_ext.chat.written_calls` knows.
        several: whether the chat template shows several calls in one message.
        ends: the mark that ends each of these, if one does, and not the end of a list of them.
    """

    def __init__(self, tokenizer: Tokenizer, template: dict[str, Any] | None, several: bool, ends: tuple[str, ...]):
        self.tokenizer, self.template, self.several, self.ends = tokenizer, template, several, ends

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "NativeCalls | None":
        """Return the reader for a tokenizer, or None if its chat template does not know tools or cannot be read.

        A way of writing calls that only a response template knows needs transformers 5.13 or later.
        """
        one = _conversation(tokenizer, 1)
        if one is None:
            return None
        template = None
        if not _is_read(one, None):
            template = _response_template(tokenizer)
            if template is None or not _is_read(one, template):
                return None
        two, marks = _conversation(tokenizer, 2), "|".join(re.escape(close) for close in MARKS.values() if close)
        between = (two or "").partition(f"{_VALUE}0")[2].partition(f"{_NAME}1")[0]
        return cls(tokenizer, template, two is not None, tuple(re.findall(marks, between)[-1:]))

    @cached_property
    def parts(self) -> CallParts | None:
        """How the chat template writes a call, up to the end of the turn, or None if its arguments are neither JSON
        nor texts with marks of their own."""
        json_form = rf'(.*?){_NAME}0(.*?)\{{\s*"{_KEY}0":\s*"{_VALUE}0"\s*\}}(.*)'
        if (found := self._found(json_form)) is not None:
            return CallParts(*map(self._literals, found))
        form = rf"(.*?){_NAME}0(.*?){_KEY}0(?P<value>.*?>\s*){_VALUE}0(\s*<.*?){_KEY}1(?P=value)SECOND(.*)"
        found, other = (self._found(form.replace("SECOND", str(second)), second) for second in (f"{_VALUE}1", 7340))
        same = re.match(r"(?s)(.*>\s*).*\0\1", f"{found[3]}\0{found[4]}") if found else None
        if found is None or found != other or same is None:  # another value is written in another way
            return None
        before, begins, value, next_begins, after = found
        key = next_begins.removeprefix(same[1])
        if not key or not begins.endswith(key):
            return None
        parts = before, begins.removesuffix(key), after.removeprefix(same[1]), key, value, same[1]
        return CallParts(*map(self._literals, parts))

    def _found(self, form: str, second: Any = None) -> list[str] | None:
        """Return the groups of a form of calls in what the chat template shows, the last of them up to the end of the
        turn, or None."""
        shown = _conversation(self.tokenizer, 1, second) or ""
        begun = render(self.tokenizer, [{"role": "user", "content": "."}], generate=True)
        begun = begun if shown.startswith(begun) else begun.rstrip()  # as Nemotron 3's <think>\n before <think></think>
        found = re.fullmatch(form, shown.removeprefix(begun), re.DOTALL) if shown.startswith(begun) else None
        if found is None:
            return None
        *groups, rest = found.groups()
        ends = [self.tokenizer.decode([token]) for token in turn_end(self.tokenizer).ids[-1:]]
        place = next((place for end in ends if (place := rest.find(end)) >= 0), None)
        if place is None:  # as of GLM, whose turns end with the mark of whoever speaks next
            pieces = self._pieces(rest)
            place = len(pieces[0]) if len(pieces) > 1 else None
        return None if place is None else [*groups, rest[:place]]

    @cached_property
    def _special(self) -> dict[str, int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {str(token): number for number, token in added.items() if token.special}

    def _pieces(self, text: str) -> list[str]:
        """Return a text in pieces: every second one is a special token."""
        words = sorted(map(re.escape, self._special), key=len, reverse=True)
        return re.split(f"({'|'.join(words)})", text) if words else [text]

    def _literals(self, text: str) -> list[str]:
        special = self._special
        return [f"<[{special[p]}]>" if p in special else json.dumps(p) for p in self._pieces(text) if p]

    def read(self, prompt_ids: list[int], response_ids: list[int], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the calls of a completion: ``{"name", "arguments"}``, or ``{"error"}`` for one that cannot be read.

        They are read from token ids, because an utterance's text lacks the special tokens around calls.

        Raises:
            TemplateFailed: the response template is not valid, or takes too much time or memory.
        """
        text = self.tokenizer.decode(response_ids)
        return read_calls(text, self.tokenizer.decode(prompt_ids[-PREFIX:]), self.template, tools)


def _conversation(tokenizer: Tokenizer, calls: int, second: Any = None) -> str | None:
    """Return a conversation with calls and results as the template shows it, or None if it leaves a part of it out.

    ``second`` is the value of a second argument of each call.
    """
    if tokenizer.chat_template in OWN_TEMPLATES:
        return None
    numbers = range(calls)
    words = [word + str(n) for n in numbers for word in (_NAME, _KEY, _VALUE, _SHOWN)]
    results = [{"role": "tool", "name": f"{_NAME}{n}", "content": f"{_SHOWN}{n}"} for n in numbers]
    for as_text in (False, True):
        more = {} if second is None else {f"{_KEY}{calls}": second}
        arguments: list[Any] = [{f"{_KEY}{n}": f"{_VALUE}{n}"} | more for n in numbers]
        if as_text:
            arguments = [json.dumps(one) for one in arguments]
        called = [{"type": "function", "function": {"name": f"{_NAME}{n}", "arguments": arguments[n]}} for n in numbers]
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": called}
        try:
            shown = render(tokenizer, [{"role": "user", "content": "."}, answer, *results])
        except ChatError:
            continue
        if all(word in shown for word in words):
            return shown
    return None


def _is_read(shown: str, template: dict[str, Any] | None) -> bool:
    """Return whether the call that a chat template shows is found in its text, and nothing else."""
    parameters = {"type": "object", "properties": {f"{_KEY}0": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": f"{_NAME}0", "description": "", "parameters": parameters}}
    try:
        calls = read_calls(shown, "", template, [tool])
    except TemplateFailed:
        return False
    return calls == [{"name": f"{_NAME}0", "arguments": {f"{_KEY}0": f"{_VALUE}0"}}]


def _response_template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the tokenizer's own response template, or TRL's for a known chat template, or None."""
    if find_spec("transformers.utils.chat_parsing") is None:
        return None
    declared = getattr(tokenizer, "response_template", None)
    if isinstance(declared, dict) and "tool_calls" in declared.get("fields", {}):
        return declared
    stand_in = SimpleNamespace(chat_template=_OPTIONS.sub("", tokenizer.chat_template, count=1), response_template=None)
    try:
        add_response_schema(stand_in)  # it reads and sets these attributes only
    except ValueError:  # it knows templates by their exact text
        stand_in.response_template = None
    template = stand_in.response_template
    return template if isinstance(template, dict) and "tool_calls" in template["fields"] else None
