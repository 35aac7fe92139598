"""How a chat template shows tools, and how its model writes calls.

A model's own way of calling tools is what its template taught it. It can be used if the template shows calls and
results, and if its calls can be read again: by the tokenizer's response template, by the one that TRL has for a known
chat template, or, where a call is ``<tool_call>`` with JSON, by :data:`HERMES`.
"""

import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from trl import add_response_schema

from trl_ext.chat import OWN_TEMPLATES, ChatError, Tokenizer, render
from trl_ext.templates import read_calls

HERMES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""The response template of models that write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
PREFIX = 64
"""How many tokens of the prompt's end the reader is given."""
_OPTIONS = re.compile(r"(\{% set \w+ = [^%]*%\})*")
_NAME, _KEY, _VALUE, _SHOWN = "tool_7f3a", "key_b9d4", "value_d6e7", "content_c4f9"


class NativeCalls:
    """Reads the calls of models whose chat template knows tools.

    Args:
        tokenizer: the tokenizer with the chat template.
        template: the response template, which says how the model writes calls.
        several: whether the chat template shows several calls in one message.
    """

    def __init__(self, tokenizer: Tokenizer, template: dict[str, Any], several: bool):
        self.tokenizer, self.template, self.several = tokenizer, template, several

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "NativeCalls | None":
        """Return the reader for a tokenizer, or None if its chat template does not know tools or cannot be read.

        It is None too with a transformers before 5.13, which reads no calls.
        """
        if find_spec("transformers.utils.chat_parsing") is None:
            return None
        one = _conversation(tokenizer, 1)
        if one is None:
            return None
        template = _response_template(tokenizer, one)
        if template is None:
            return None
        return cls(tokenizer, template, _conversation(tokenizer, 2) is not None)

    def read(self, prompt_ids: list[int], response_ids: list[int], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the calls of a completion: ``{"name", "arguments"}``, or ``{"error"}`` for one that cannot be read.

        They are read from token ids, because an utterance's text lacks the special tokens around calls.

        Raises:
            TemplateFailed: the response template is not valid, or takes too much time or memory.
        """
        text = self.tokenizer.decode(response_ids)
        return read_calls(text, self.tokenizer.decode(prompt_ids[-PREFIX:]), self.template, tools)


def _conversation(tokenizer: Tokenizer, calls: int) -> str | None:
    """Return a conversation with calls and results as the template shows it, or None if it leaves a part of it out."""
    if tokenizer.chat_template in OWN_TEMPLATES:
        return None
    numbers = range(calls)
    words = [word + str(n) for n in numbers for word in (_NAME, _KEY, _VALUE, _SHOWN)]
    results = [{"role": "tool", "name": f"{_NAME}{n}", "content": f"{_SHOWN}{n}"} for n in numbers]
    for as_text in (False, True):
        arguments: list[Any] = [{f"{_KEY}{n}": f"{_VALUE}{n}"} for n in numbers]
        if as_text:
            arguments = [f'{{"{_KEY}{n}": "{_VALUE}{n}"}}' for n in numbers]
        called = [{"type": "function", "function": {"name": f"{_NAME}{n}", "arguments": arguments[n]}} for n in numbers]
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": called}
        try:
            shown = render(tokenizer, [{"role": "user", "content": "."}, answer, *results])
        except ChatError:
            continue
        if all(word in shown for word in words):
            return shown
    return None


def _response_template(tokenizer: Tokenizer, shown: str) -> dict[str, Any] | None:
    """Return how calls are read: the tokenizer's own way, TRL's for a known template, or as JSON in ``<tool_call>``."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, dict) and "tool_calls" in own.get("fields", {}):
        return own
    known = SimpleNamespace(chat_template=_OPTIONS.sub("", tokenizer.chat_template, count=1), response_template=None)
    try:
        add_response_schema(known)  # type: ignore[type-var]  # it reads and sets these attributes only
    except ValueError:  # it knows templates by their exact text
        known.response_template = None
    found = known.response_template
    if isinstance(found, dict) and "tool_calls" in found["fields"]:
        return found
    return HERMES if re.search(rf'<tool_call>\s*\{{\s*"name":\s*"{_NAME}0"', shown) else None
