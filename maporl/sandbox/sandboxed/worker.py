"""The far side of the sandbox: a process that forks once per snippet. Standard library only.

It reads requests from stdin and writes answers to stdout. Each is a frame: four bytes of length (big-endian), then
JSON. A snippet runs in a fork of its own, so that the next one finds nothing of it, and its verdict comes back over a
pipe of its own. Four walls stand between a snippet and the machine:

1. the syntax tree is checked before anything runs, and builtins and modules are the harmless part of Python's
   (``language``);
2. an audit hook ends the process at the first event that such a program cannot cause without breaking out;
3. resource limits refuse new file descriptors (and so files and sockets), new processes, growing files, and memory and
   CPU time beyond the limits;
4. Landlock and a filter of system calls (``kernel``) refuse the rest to whatever runs in the process, Python or not.

A fatal verdict is sent from the place where it arises and ends the process there, so that no ``except`` can hide it. At
the limit of recursion the sending itself may fail; the snippet then goes on without what it asked for.
A verdict says no more than which value a snippet gave, and a snippet may give any. Whoever judges a snippet compares the
value in a process of its own, where the snippet changes nothing.
"""

import ast
import builtins
import contextlib
import gc
import json
import os
import random
import select
import signal
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

# relative: the worker runs without the rest of the library, and with nothing of it in reach
from .kernel import VERDICT, SystemCallFilter, confine, forbid_paths
from .language import HIDDEN, Refused, check_tree, safe_builtins, safe_modules
from .values import NotPlain, plain_value

# dataclass and namedtuple write their classes as source text and look at their caller's name
HARMLESS_EVENTS = frozenset({
    "builtins.id", "compile", "exec", "object.__delattr__", "object.__getattr__", "object.__setattr__",
    "sys._getframe", "sys._getframemodulename", "sys.unraisablehook",
})  # fmt: skip


def arm(report: Callable[..., NoReturn]) -> None:
    """End the process from now on at any audited event that is not in ``HARMLESS_EVENTS``. This cannot be undone."""

    def watch(event, arguments):
        if event not in HARMLESS_EVENTS:
            report("forbidden")

    sys.addaudithook(watch)


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


@dataclass(frozen=True)
class Worker:
    """What each fork gets: the limits, the filter of its system calls, how it reports, and a snippet's builtins.

    All are made before the first fork. What a fork makes or changes costs it a copy of the memory that it lies in.
    """

    limits: dict[str, Any]
    filter: SystemCallFilter | None
    report: Callable[..., NoReturn]
    builtins: dict[str, Any]

    def run_snippet(self, request: bytes, descriptor: int) -> None:
        """Run one request in the fork and report its verdict to the pipe ``descriptor``. Never returns."""
        self._lock_in(descriptor)
        report = self.report
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
        namespace["__builtins__"] = self.builtins
        random.seed(0)  # statistics draws from Python's generator, to which each fork gives a new seed
        arm(report)
        try:
            exec(program, namespace)
            function = namespace.get(asked["call"])
            plain = None if function is None else plain_value(function())
            report("no_value" if plain is None else "ok", plain)  # a large value may need more memory than there is
        except MemoryError:
            function = plain = None
            namespace.clear()  # makes room for the report
            report("memory")
        except NotPlain:
            report("no_value")
        except BaseException as error:
            report(f"error:{_builtin_name(type(error))}")

    def _lock_in(self, descriptor: int) -> None:
        """Leave this fork the pipe of its verdict and nothing else that the worker has open, then call the kernel."""
        os.dup2(descriptor, VERDICT)
        for stream in (0, 1):  # the worker's requests and answers; 2 is /dev/null already
            os.dup2(2, stream)
        os.closerange(VERDICT + 1, 256)
        confine(self.limits["cpu_seconds"], self.limits["memory_mb"])
        if self.filter:
            self.filter.install()

    def answer(self, request: bytes) -> bytes:
        """Run one request in a fork and return the verdict as JSON, however the fork ended."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                self.run_snippet(request, writing)
            finally:
                os._exit(1)  # whatever went wrong, the fork must not go on as a second worker
        os.close(writing)
        deadline = time.monotonic() + self.limits["wall_seconds"]
        payload = _read_all(reading, deadline, self.limits["output_bytes"])
        os.close(reading)
        # a fork that ended in time has closed the pipe by ending, and killing it then changes nothing
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if payload is None:
            return b'{"reason": "timeout", "value": null}'
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return b'{"reason": "cpu", "value": null}'
        if status != 0 or not payload or len(payload) > self.limits["output_bytes"]:
            return b'{"reason": "killed", "value": null}'
        return payload


def _builtin_name(kind: type) -> str:
    """The nearest built-in exception, so that no name of the snippet's own gets into a reason."""
    return next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


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


# -- the worker -------------------------------------------------------------------------------------------------------


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


def main(limits: dict[str, Any], filtered: bool) -> None:
    """Load what snippets may use, give up what the worker does not need, then answer requests until the input ends.

    The first frame says which walls the kernel provides, as ``{"landlock": bool, "trial": how a harmless snippet ended}``.
    ``filtered``: install the filter of system calls in each fork. If that fails, the trial ends otherwise than "ok".
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the owner's mask is inherited, and could hold back SIGXCPU
    warnings.simplefilter("ignore")  # to show a warning, Python would open the snippet's source file
    report = reporter(VERDICT, limits["output_bytes"])
    builtins = safe_builtins(report, safe_modules(report), limits["output_bytes"])
    for name in HIDDEN:
        import_module(name)
    drop_privileges()
    os.environ.clear()
    os.environ["TZ"] = "UTC"  # dates are the same on every machine
    time.tzset()
    worker = Worker(limits, SystemCallFilter() if filtered else None, report, builtins)
    landlock = forbid_paths()
    gc.collect()
    gc.freeze()  # a fork that collects garbage then copies nothing that was there before it
    trial = json.loads(worker.answer(b'{"code": "def f(): return 1", "call": "f"}'))["reason"]
    write_frame(json.dumps({"landlock": landlock, "trial": trial}).encode())
    while (request := read_frame()) is not None:
        write_frame(worker.answer(request))
