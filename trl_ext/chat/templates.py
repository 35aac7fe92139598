"""Render chat templates in a process that ends with them, because a template is a program that came with a model.

Jinja's sandbox keeps a template from files and from Python's objects. It bounds neither time nor memory: ``{{ 'a' *
10**10 }}`` and a few nested loops would take a machine with them, in a thread that nothing can stop. So every template
that is not from this package is rendered by :mod:`trl_ext.chat.template_worker`, which has limits of both.
"""

import socket
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_ext.chat.template_worker import GRAMMAR_MEMORY, MEMORY, SECONDS
from trl_ext.chat.written_calls import read_written_calls
from trl_ext.errors import UserError, retold
from trl_ext.process.inherited import inherited
from trl_ext.process.servant import Lost, Servant, receive

LONGEST = 2**20
"""Most characters of a template. Those of models with tools have about ten thousand."""
WORKER = Path(__file__).with_name("template_worker.py")


class TemplateFailed(UserError, ValueError):
    """A chat template refuses the messages, is not valid, or needs more time or memory than any template should."""


class _Renderer(Servant):
    """The worker: a program that imports nothing of this package, and reads no secrets."""

    def command(self) -> list[str]:
        """Return the program, whose folder is not in its path."""
        return [sys.executable, "-P", str(WORKER)]

    def environment(self) -> dict[str, str]:
        """Return what it needs of the variables of this process."""
        few = {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return {**inherited(), **few}

    def begin(self, end: socket.socket) -> None:
        """Wait until it has imported what it needs.

        Raises:
            RuntimeError: it ended before.
        """
        with retold(Lost, lambda _: RuntimeError(f"{WORKER} did not start; what it wrote is above")):
            receive(end)


_renderer = _Renderer()


def render_template(
    template: str,
    messages: list[dict[str, Any]],
    generate: bool,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the text of ``messages`` by a chat template, as ``apply_chat_template`` of transformers does.

    ``generate`` adds the opening of the next assistant message. ``variables`` are what else the template may read, such
    as the names of special tokens. ``tools`` are the schemas of the tools that the model may call.

    Raises:
        TemplateFailed: the template is not valid, refuses the messages, or takes too much time or memory.
    """
    if len(template) > LONGEST:
        raise TemplateFailed(f"it has {len(template)} characters; at most {LONGEST} are read")
    shown = {} if tools is None else {"tools": tools}
    # templates would show a missing value, such as the content of a call, as the word None
    clean = [{key: value for key, value in message.items() if value is not None} for message in messages]
    request = {**variables, **shown, "messages": clean, "chat_template": template, "add_generation_prompt": generate}
    return _answered(request, f"{len(messages)} messages")["text"]


def read_calls(
    text: str, prefix: str, template: dict[str, Any] | None, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the calls in a completion: ``{"name", "arguments"}``, or ``{"error"}`` for one that cannot be read.

    Without a response ``template`` they are read by :func:`trl_ext.chat.written_calls.read_written_calls`. With one,
    this is done only if :func:`trl_ext.chat.template_worker.read_calls` finds none. The regular expressions of a
    response template came with a model, and so may take any time: they are searched for in the worker's process.

    Raises:
        TemplateFailed: the response template is not valid, or takes too much time or memory.
    """
    if template is None:
        return read_written_calls(text, prefix, tools)
    request = {"read": {"text": text, "prefix": prefix, "template": template, "tools": tools}}
    calls = _answered(request, f"a completion of {len(text)} characters")["calls"]
    return calls or read_written_calls(text, prefix, tools)


def fault_of_grammar(text: str) -> str | None:
    """Return what is wrong with the text of a grammar (:class:`trl_ext.ppo.options.Grammar`), or None.

    It is compiled in the worker's process too. The fault of a JSON schema begins with its place in the schema.
    """
    return try_grammar(text).get("fault")


@lru_cache(maxsize=1024)
def try_grammar(text: str) -> dict[str, str]:
    """Return the ``fault`` of a grammar, or a short ``example`` of what it allows."""
    if find_spec("llguidance") is None:
        return {"fault": "structured outputs need the package llguidance; install it with: pip install llguidance"}
    try:
        return _answered({"grammar": text}, f"a grammar of {len(text)} characters", GRAMMAR_MEMORY)
    except TemplateFailed as error:
        return {"fault": f"{error}; give a smaller one"}


def _answered(request: dict[str, Any], what: str, memory: int = MEMORY) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = _renderer.ask(request)
    except Lost:
        raise TemplateFailed(
            f"it takes more than {SECONDS:g} s of processor time or {memory // 2**20} MiB of memory for {what}"
        ) from None
    if "error" in answer:
        raise TemplateFailed(answer["error"])
    return answer
