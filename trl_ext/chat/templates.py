"""Render chat templates in a process that ends with them, because a template is a program that came with a model.

Jinja's sandbox keeps a template from files and from Python's objects. It bounds neither time nor memory:
``{{ 'a' * 10**10 }}`` and a few nested loops would take a machine with them, in a thread that nothing can stop. So every
template that is not from this package is rendered by :mod:`trl_ext.chat.template_worker`, which has limits of both.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from trl_ext.chat.template_worker import MEMORY, SECONDS
from trl_ext.chat.written_calls import read_written_calls
from trl_ext.errors import UserError
from trl_ext.process.inherited import inherited

LONGEST = 2**20
"""Most characters of a template. Those of models with tools have about ten thousand."""
WORKER = Path(__file__).with_name("template_worker.py")


class TemplateFailed(UserError, ValueError):
    """A chat template refuses the messages, is not valid, or needs more time or memory than any template should."""


class _Process:
    """The worker, which is started when it is first needed. Threads take turns."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: subprocess.Popen[str] | None = None
        self.inherited: subprocess.Popen[str] | None = None

    def answer(self, request: str) -> dict[str, Any] | None:
        """Return the worker's answer, or None if the request has ended the worker."""
        with self.lock:
            if self.running is None or self.running.poll() is not None:
                self._start()
            try:
                answer = self._ask(request)
            except BaseException:  # the answer that was not read would be that to the next request
                self.stop()
                raise
            if answer is None:
                self.stop()
            return answer

    def stop(self) -> None:
        """End the worker, if there is one."""
        if self.running is not None:
            self.running.kill()
            self.running.communicate()
        self.running = None

    def forget(self) -> None:
        """Leave the worker to the process that this one was forked from, whose threads may just have been using it."""
        self.lock = threading.Lock()
        self.running, self.inherited = None, self.running

    def _ask(self, request: str) -> dict[str, Any] | None:
        assert self.running is not None and self.running.stdin is not None and self.running.stdout is not None
        try:
            self.running.stdin.write(request + "\n")
            self.running.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.running.stdout.readline()
        return json.loads(line) if line else None

    def _start(self) -> None:
        self.running = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the run, which then ends this process
            env={**inherited(), "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self.running.stdout is not None
        if not self.running.stdout.readline():
            raise RuntimeError(f"{WORKER} did not start; what it wrote is above")


_process = _Process()
atexit.register(_process.stop)
os.register_at_fork(after_in_child=_process.forget)


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
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    request = {**variables, **shown, "messages": given, "chat_template": template, "add_generation_prompt": generate}
    return _answered(request, f"{len(messages)} messages")["text"]


def read_calls(
    text: str, prefix: str, template: dict[str, Any] | None, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the calls in a completion: ``{"name", "arguments"}``, or ``{"error"}`` for one that cannot be read.

    Without a response ``template`` they are read by :func:`trl_ext.chat.written_calls.read_written_calls`. With one, this is done
    only if :func:`trl_ext.chat.template_worker.read_calls` finds none. The regular expressions of a response template came
    with a model, and so may take any time: they are searched for in the worker's process.

    Raises:
        TemplateFailed: the response template is not valid, or takes too much time or memory.
    """
    if template is None:
        return read_written_calls(text, prefix, tools)
    request = {"read": {"text": text, "prefix": prefix, "template": template, "tools": tools}}
    found = _answered(request, f"a completion of {len(text)} characters")["calls"]
    return found or read_written_calls(text, prefix, tools)


def _answered(request: dict[str, Any], what: str) -> dict[str, Any]:
    answer = _process.answer(json.dumps(request))
    if answer is None:
        raise TemplateFailed(
            f"it takes more than {SECONDS:g} s of processor time or {MEMORY // 2**30} GiB of memory for {what}"
        )
    if "error" in answer:
        raise TemplateFailed(answer["error"])
    return answer
