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
from .values import SAID_BYTES, NotPlain, cut, plain_value, tagged

# dataclass and namedtuple write their classes as source text and look at their caller's name
HARMLESS_EVENTS = frozenset({
    "builtins.id", "compile", "exec", "object.__delattr__", "object.__getattr__", "object.__setattr__",
    "sys._getframe", "sys._getframemodulename", "sys.unraisablehook",
})  # fmt: skip

_SAID_JSON = 12 * SAID_BYTES + 200
"""Most bytes of a verdict without its value: two texts, in which JSON takes up to six bytes for a character."""


def arm(report: Callable[..., NoReturn]) -> None:
    """End the process from now on at any audited event that is not in ``HARMLESS_EVENTS``. This cannot be undone."""

    def watch(event, arguments):
        if event not in HARMLESS_EVENTS:
            report("forbidden")

    sys.addaudithook(watch)


def teller(descriptor: int, limit: int, said: list[str]) -> Callable[..., None]:
    """A function ``tell(reason, value, message)`` that sends a verdict, as a line of JSON.

    ``descriptor``: the pipe it writes to; ``limit``: most bytes of a value; ``said``: what was printed since the last
    verdict. All texts are quoted by JSON, so that nothing printed can stand where a verdict does.
    """
    write, encode = os.write, json.dumps

    def tell(reason: str, value: Any = None, message: str = "") -> None:
        if value is not None and len(encode(value)) > limit:
            reason, value = "output", None
        record = {"reason": reason, "value": value, "printed": cut("".join(said)), "message": cut(message)}
        payload = encode(record).encode() + b"\n"
        while payload:
            payload = payload[write(descriptor, payload) :]
        said.clear()

    return tell


def reporter(descriptor: int, limit: int, said: list[str] | None = None) -> Callable[..., NoReturn]:
    """A function ``report(reason, value, message)`` that sends the last verdict and ends the process; no ``finally`` clause
    runs. The arguments are those of :func:`teller`.
    """
    tell, leave = teller(descriptor, limit, [] if said is None else said), os._exit

    def report(reason: str, value: Any = None, message: str = "") -> NoReturn:
        tell(reason, value, message)
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
    tell: Callable[..., None]
    report: Callable[..., NoReturn]
    builtins: dict[str, Any]

    def run_snippet(self, request: bytes, descriptor: int) -> None:
        """Run one request in the fork and report its verdict to the pipe ``descriptor``. Never returns."""
        self._lock_in(descriptor)
        asked = json.loads(request)
        programs = self._programs(
            [asked["code"], asked.get("setup", "")], asked.get("asserts", []), asked.get("values", [])
        )
        module = types.ModuleType("snippet")  # dataclasses look up the module of their class
        sys.modules["snippet"] = module
        namespace = vars(module)
        namespace["__builtins__"] = self.builtins
        random.seed(0)  # statistics draws from Python's generator, to which each fork gives a new seed
        arm(self.report)
        if "asserts" in asked:
            self._run_asserts(programs, asked["values"], namespace)
        self._run_call(programs, asked["call"], namespace)

    def _programs(self, code: list[str], asserts: list[str], values: list[bool]) -> list[Any]:
        """Compile the code, or report why not. An assert that cannot be compiled has its reason and message instead.

        Where ``values`` is true, an expression stands in the place of an assert.

        The texts are checked together too, because one of them could give another's names a new meaning.
        """
        found: list[Any] = []
        for number, text in enumerate([*code, *asserts]):
            try:
                tree = ast.parse(text)
                check_tree(tree)
                if number >= len(code) and len(tree.body) != 1:
                    raise SyntaxError("an assert is one statement")
                if number >= len(code) and values[number - len(code)]:
                    found.append((tree, compile(text, "<snippet>", "eval", dont_inherit=True)))
                    continue
                found.append((tree, compile(tree, "<snippet>", "exec", dont_inherit=True)))
                continue
            except Refused as refused:
                failed = "forbidden", f"Refused: {refused}"
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
                failed = "syntax", _line(error)
            if number < len(code):
                self.report(failed[0], None, failed[1])
            found.append((None, failed))
        if asserts:
            try:
                check_tree(ast.Module([part for tree, _ in found if tree for part in tree.body], []))
            except Refused as refused:
                self.report("forbidden", None, f"Refused: {refused}")
        return [program for _, program in found]

    def _run_call(self, programs: list[Any], call: str, namespace: dict[str, Any]) -> NoReturn:
        """Run the code and call its function, or nothing if ``call`` is empty."""
        report = self.report
        try:
            for program in programs:
                exec(program, namespace)
            if not call:
                report("ok")
            function = namespace.get(call)
            plain = None if function is None else plain_value(function())
            report("no_value" if plain is None else "ok", plain)  # a large value may need more memory than there is
        except MemoryError:
            function = plain = None
            namespace.clear()  # makes room for the report
            report("memory")
        except NotPlain:
            report("no_value")
        except BaseException as error:
            report(f"error:{_builtin_name(type(error))}", None, _line(error))

    def _run_asserts(self, programs: list[Any], values: list[bool], namespace: dict[str, Any]) -> NoReturn:
        """Tell how the code ended, and then how each assert did, or the value of each expression."""
        code, asserts = programs[:2], programs[2:]
        try:
            for program in code:
                exec(program, namespace)
            self.tell("ok")
        except MemoryError:
            namespace.clear()
            self.report("memory")
        except BaseException as error:
            self.report(f"error:{_builtin_name(type(error))}", None, _line(error))
        for program, wants_value in zip(asserts, values, strict=True):
            try:
                if isinstance(program, tuple):
                    self.tell(program[0], None, program[1])
                elif wants_value:
                    self.tell("ok", plain_value(tagged(eval(program, namespace))))
                else:
                    exec(program, namespace)
                    self.tell("ok")
            except MemoryError:
                namespace.clear()
                self.report("memory")
            except NotPlain:
                self.tell("no_value")
            except BaseException as error:
                self.tell(f"error:{_builtin_name(type(error))}", None, _line(error))
        os._exit(0)

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
        """Run one request in a fork and return its verdicts, a line of JSON each, however the fork ended."""
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
        # a request has as many of these separators as verdicts; quotes inside its texts have a backslash before them
        of_each = _SAID_JSON + (self.limits["output_bytes"] if b'"values"' in request else 0)
        most = self.limits["output_bytes"] + request.count(b'", "') * of_each
        payload, in_time = _read_all(reading, deadline, most)
        os.close(reading)
        # a fork that ended in time has closed the pipe by ending, and killing it then changes nothing
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not in_time:
            return _told(payload, "timeout")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return _told(payload, "cpu")
        if status != 0 or not payload or len(payload) > most:
            return _told(payload, "killed")
        return payload.removesuffix(b"\n")


def _told(payload: bytes, reason: str) -> bytes:
    """The verdicts that a fork told whole before it ended for ``reason``, and that reason."""
    last = json.dumps({"reason": reason, "value": None, "printed": "", "message": ""}).encode()
    return payload[: payload.rfind(b"\n") + 1] + last


def _line(error: BaseException) -> str:
    """The last line of an error as Python prints it. Its text may be the snippet's own code, and fail."""
    try:
        text = "".join(("", str(error)))
    except BaseException:
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _builtin_name(kind: type) -> str:
    """The nearest built-in exception, so that no name of the snippet's own gets into a reason."""
    return next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def _read_all(descriptor: int, deadline: float, limit: int) -> tuple[bytes, bool]:
    """Everything up to the end of the pipe or to the limit, and whether that came in time."""
    payload = b""
    while len(payload) <= limit:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return payload, False
        piece = os.read(descriptor, 65536)
        if not piece:
            break
        payload += piece
    return payload, True


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
    said: list[str] = []
    tell = teller(VERDICT, limits["output_bytes"], said)
    report = reporter(VERDICT, limits["output_bytes"], said)
    builtins = safe_builtins(report, safe_modules(report), limits["output_bytes"], said)
    for name in HIDDEN:
        import_module(name)
    drop_privileges()
    os.environ.clear()
    os.environ["TZ"] = "UTC"  # dates are the same on every machine
    time.tzset()
    worker = Worker(limits, SystemCallFilter() if filtered else None, tell, report, builtins)
    landlock = forbid_paths()
    gc.collect()
    gc.freeze()  # a fork that collects garbage then copies nothing that was there before it
    trial = json.loads(worker.answer(b'{"code": "def f(): return 1", "call": "f"}'))["reason"]
    write_frame(json.dumps({"landlock": landlock, "trial": trial}).encode())
    while (request := read_frame()) is not None:
        write_frame(worker.answer(request))
