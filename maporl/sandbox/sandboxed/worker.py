"""The far side of the sandbox: a process that forks once per snippet. Standard library only.

It reads requests from stdin and writes answers to stdout. Each is a frame: four bytes of length (big-endian), then
JSON. A snippet runs in a fork of its own, so that the next one finds nothing of it, and its verdict comes back over a
pipe of its own. Three walls stand between a snippet and the machine:

1. the syntax tree is checked before anything runs, and builtins and modules are the harmless part of Python's
   (``language``);
2. an audit hook ends the process at the first event that such a program cannot cause without breaking out;
3. the kernel refuses new file descriptors (and so files and sockets), new processes, growing files, and memory and CPU
   time beyond the limits.

A fatal verdict is sent from the place where it arises and ends the process there, so that no ``except`` can hide it.
"""

import ast
import builtins
import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any, NoReturn

# relative: the worker runs without the rest of the library, and with nothing of it in reach
from .language import HIDDEN, Refused, check_tree, safe_builtins, safe_modules

MAX_INTEGER_BITS = 10_000
"""Python prints integers of at most 4300 digits; larger ones are refused."""


# dataclass and namedtuple write their classes as source text and look at their caller's name
HARMLESS_EVENTS = {
    "builtins.id", "compile", "exec", "object.__delattr__", "object.__getattr__", "object.__setattr__",
    "sys._getframe", "sys._getframemodulename", "sys.unraisablehook",
}  # fmt: skip


def arm(report: Callable[..., NoReturn]) -> None:
    """End the process from now on at any audited event that is not in ``HARMLESS_EVENTS``. This cannot be undone."""

    def watch(event, arguments):
        if event not in HARMLESS_EVENTS:
            report("forbidden")

    sys.addaudithook(watch)


def confine(cpu_seconds: int, memory_mb: int) -> None:
    """Have the kernel refuse new descriptors, processes, growing files, core files, and more memory or CPU time."""
    os.dup2(2, 0)  # the worker's requests and answers are out of reach from here: both become /dev/null
    os.dup2(2, 1)
    for name, soft, hard in (
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),  # soft: SIGXCPU, which tells it from other deaths
        (resource.RLIMIT_AS, memory_mb << 20, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),  # what is open stays usable
    ):
        resource.setrlimit(name, (soft, hard))


class NotPlain(Exception):
    """A returned value that JSON cannot hold."""


def reporter(descriptor: int, limit: int) -> Callable[..., NoReturn]:
    """A function ``report(reason, value)`` that sends the verdict and ends the process; no ``finally`` clause runs.

    ``descriptor``: the pipe it writes to; ``limit``: most bytes of a verdict.
    """
    write, leave, encode = os.write, os._exit, json.dumps

    def report(reason: str, value: Any = None) -> NoReturn:
        payload = encode({"reason": reason, "value": value}).encode()
        if len(payload) > limit:
            payload = encode({"reason": "output", "value": None}).encode()
        while payload:
            payload = payload[write(descriptor, payload) :]
        leave(0)

    return report


# -- one snippet ------------------------------------------------------------------------------------------------------


def run_snippet(request: bytes, limits: dict[str, Any], offered: dict[str, types.ModuleType], descriptor: int) -> None:
    """Run one request in the fork and report its verdict. Never returns."""
    report = reporter(descriptor, limits["output_bytes"])
    confine(limits["cpu_seconds"], limits["memory_mb"])
    asked = json.loads(request)
    try:
        tree = ast.parse(asked["code"])
        check_tree(tree)
        program = compile(tree, "<snippet>", "exec", dont_inherit=True)
    except Refused:
        report("forbidden")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply for the parser
        report("syntax")
    module = types.ModuleType("snippet")  # dataclasses look up the module of their class
    sys.modules["snippet"] = module
    namespace = vars(module)
    namespace["__builtins__"] = safe_builtins(report, offered, limits["output_bytes"])
    offered["random"].seed(0)  # type: ignore[attr-defined]  # the outcome is a function of the code
    arm(report)
    try:
        exec(program, namespace)
        if asked["call"] is None:
            report("ok")
        function = namespace.get(asked["call"])
        plain = None if function is None else plain_value(function())
    except MemoryError:
        namespace.clear()  # makes room for the report
        report("memory")
    except NotPlain:
        report("no_value")
    except BaseException as error:
        report(f"error:{_builtin_name(type(error))}")
    report("no_value" if plain is None else "ok", plain)


def _builtin_name(kind: type) -> str:
    """The nearest built-in exception, so that no name of the snippet's own gets into a reason."""
    return next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def plain_value(value: Any) -> Any:
    """``value`` as JSON can hold it. Types are compared exactly, so that no method of the snippet's is called.

    Raises:
        NotPlain: JSON cannot hold it.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int and value.bit_length() <= MAX_INTEGER_BITS:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is Fraction:
        return plain_value(value.numerator if value.denominator == 1 else float(value))
    if kind is Decimal and value.is_finite() and abs(value.adjusted()) < 1000:
        return plain_value(int(value) if value == int(value) else float(value))
    if kind in (list, tuple):
        return [plain_value(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain_value(item) for key, item in value.items()}
    raise NotPlain(kind.__name__)


# -- the worker -------------------------------------------------------------------------------------------------------


def answer(request: bytes, limits: dict[str, Any], offered: dict[str, types.ModuleType]) -> bytes:
    """Run one request in a fork and return the verdict as JSON, however the fork ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            run_snippet(request, limits, offered, writing)
        finally:
            os._exit(1)  # whatever went wrong, the fork must not go on as a second worker
    os.close(writing)
    payload = _read_all(reading, time.monotonic() + limits["wall_seconds"], limits["output_bytes"])
    os.close(reading)
    # a fork that ended in time has closed the pipe by ending, and killing it then changes nothing
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if payload is None:
        return b'{"reason": "timeout", "value": null}'
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return b'{"reason": "cpu", "value": null}'
    if status != 0 or not payload:
        return b'{"reason": "killed", "value": null}'
    return payload


def _read_all(descriptor: int, deadline: float, limit: int) -> bytes | None:
    """Everything up to the end of the pipe or to the limit; None if the time is up first."""
    payload = b""
    while len(payload) <= limit:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(descriptor, 65536)
        if not piece:
            break
        payload += piece
    return payload


def read_frame() -> bytes | None:
    """The next request; None at the end of the input, which tells a worker that its owner is gone."""
    header = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(struct.unpack(">I", header)[0]) if len(header) == 4 else None


def write_frame(payload: bytes) -> None:
    """Send one answer."""
    sys.stdout.buffer.write(struct.pack(">I", len(payload)) + payload)
    sys.stdout.buffer.flush()


def drop_privileges() -> None:
    """Become nobody if this is root, because root may raise its limits and start any number of processes."""
    if os.geteuid() != 0:
        return
    # a container may have no other user, or forbid the change; its root is then bound by the limits like any user
    with contextlib.suppress(OSError):
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def main(limits: dict[str, Any]) -> None:
    """Load what snippets may use, give up what the worker does not need, then answer requests until the input ends."""
    warnings.simplefilter("ignore")  # to show a warning, Python would open the snippet's source file
    offered = safe_modules()
    for name in HIDDEN:
        import_module(name)
    drop_privileges()
    os.environ.clear()
    gc.collect()
    gc.freeze()  # a fork that collects garbage then copies nothing that was there before it
    write_frame(b"ready")
    while (request := read_frame()) is not None:
        write_frame(answer(request, limits, offered))
