"""Programs while they run: functions in threads of this process, commands in processes of their own. No torch.

A program ends by its answer, by its failure, or because its dialogue is over. A command is then killed with its process
group. A function cannot be killed: its requests are refused from then on, and its thread is left alone.
"""

import ast
import contextlib
import inspect
import json
import linecache
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from maporl.errors import ConfigError
from maporl.event_loop import wait
from maporl.hosts import past_proxies
from maporl.serving.group_watchdog import forget, watch
from maporl.text import printable
from trl_ext.errors import is_users
from trl_ext.process.inherited import inherited
from trl_ext.process.parsing import parsed
from trl_ext.process.waits import Threads, check, pause

LAST_LINES = 20
"""The lines of a traceback, or of what a command wrote on its standard error, that are told."""
KEPT_BYTES = 2**20
"""The last bytes of a command's output that are kept. An answer is in the last line."""
MOST_LEFT = 1000
"""The most calls of a function that may go on although their dialogues are over. Nobody can end a thread."""
LATE = "it did not end within"
"""How the failure of a program that took too long begins."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Question:
    """The input of a program: the question, the address of its agents, and the example as plain values."""

    question: str
    base_url: str
    example: dict[str, Any]
    api_key: str = "maporl"

    def arguments(self, function: Function) -> dict[str, Any]:
        """Return those of the values that ``function`` takes, by name."""
        values = dict(vars(self))
        parameters = inspect.signature(function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return values
        return {parameter.name: values[parameter.name] for parameter in parameters if parameter.name in values}

    def lacking(self, function: Function) -> list[str]:
        """Return what ``function`` needs and is not given, by name."""
        given = self.arguments(function)
        parameters = inspect.signature(function).parameters.values()
        any_number = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return [p.name for p in parameters if p.default is p.empty and p.kind not in any_number and p.name not in given]


def own_clients(function: Function) -> str:
    """Return which clients ask a provider instead of the agents, with a key that is in the environment, or nothing.

    The file of ``function`` and the imported ones beside it are read for clients that are told no address.
    """
    keys = {name.removesuffix("_API_KEY").replace("_", ""): name for name in os.environ if name.endswith("_API_KEY")}
    folder = Path(getattr(inspect.getmodule(function), "__file__", None) or "/").parent
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    found = []
    for file in sorted(file for file in files if keys and Path(file).parent == folder):
        for call in _calls("".join(linecache.getlines(file))):
            name = ast.unparse(call.func).rpartition(".")[2]
            told = name.islower() or any(one.arg is None or "base" in one.arg for one in call.keywords)
            for provider, key in keys.items():
                if not told and re.fullmatch(f"(Async|Chat)*{re.escape(provider)}(AI)?", name, re.I):
                    where = f"{Path(file).name}:{call.lineno}"
                    found.append(f"{where} makes {name}() without base_url, which asks its provider with {key}")
    return "; ".join(found)


def _calls(source: str) -> list[ast.Call]:
    """Return the calls in a file, or none if it tells its clients their addresses later, or is broken by now."""
    with contextlib.suppress(SyntaxError, ValueError):
        nodes = ast.walk(parsed("" if "with_options(" in source else source))
        return [node for node in nodes if isinstance(node, ast.Call)]
    return []


@dataclass(frozen=True)
class Ending:
    """How a program ended: with an ``answer``, or with a ``failure`` in words."""

    answer: str | None = None
    failure: str | None = None


class Run:
    """A program that runs, or waits until fewer others do.

    Args:
        work: runs the program, and returns its ending.
        seconds: the most seconds that it may take.
        tell: is called when it has ended.
    """

    def __init__(self, work: "Callable[[Run], Ending]", seconds: float, tell: Callable[[], None]):
        self.seconds, self.tell, self._work = seconds, tell, work
        self.ending: Ending | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._process_lock = threading.Lock()

    def begin(self) -> None:
        """Run it, in this thread."""
        self._timer = threading.Timer(self.seconds, self._late)
        self._timer.daemon = True
        self._timer.start()
        try:
            ending = self._work(self)
        except BaseException as error:  # the program's own code may raise anything, even SystemExit
            ending = Ending(failure=_told(error))
        self._end(ending)

    def _late(self) -> None:
        self._end(Ending(failure=f"{LATE} {self.seconds:g} seconds"))
        self.kill()

    def _end(self, ending: Ending) -> None:
        with self._lock:
            if self.ending is not None:
                return
            self.ending = ending
        if self._timer is not None:
            self._timer.cancel()
        self.tell()

    def kill(self) -> None:
        """End it, whatever it does."""
        self._end(Ending(failure="its dialogue is over"))
        if self.process is not None:
            self.end_group(self.process)

    def end_group(self, process: subprocess.Popen[bytes]) -> int:
        """Kill a process with its group, whether it has ended or not, and return its status."""
        with self._process_lock:
            if process.returncode is None:  # once it was waited for, its number may be that of another one
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                forget(process.pid)
            return process.returncode


class Runner:
    """Runs at most ``most`` programs at once, if that is not None. Others wait for their turn."""

    def __init__(self, most: int | None):
        self.most = most
        self._threads = Threads(2**16, "program")
        self._waiting: deque[Run] = deque()
        self._running: set[Run] = set()
        self._threads_of: set[Run] = set()
        self._lock = threading.Lock()

    def start(self, run: Run) -> None:
        """Start ``run``, or let it wait.

        Raises:
            ConfigError: too many functions of dialogues that are over have not returned.
        """
        with self._lock:
            left = len(self._threads_of - self._running)
            if left > MOST_LEFT:
                raise ConfigError(
                    f"protocol program: {left} calls of the function go on although their dialogues are over; let it "
                    "return when a request is refused, with time-outs of its own, or run it as protocol.command, which "
                    "can be killed"
                )
            self._waiting.append(run)
        self._go_on()

    def end(self, run: Run) -> None:
        """End ``run``, so that another one may start."""
        with self._lock:
            self._running.discard(run)
            with contextlib.suppress(ValueError):
                self._waiting.remove(run)
        run.kill()
        self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            begun = []
            while self._waiting and (self.most is None or len(self._running) < self.most):
                begun.append(self._waiting.popleft())
                self._running.add(begun[-1])
        for run in begun:
            self._threads.submit(self._run, run)

    def _run(self, run: Run) -> None:
        self._threads_of.add(run)
        try:
            run.begin()
        finally:
            self._threads_of.discard(run)


def of_function(function: Function, question: Question) -> Callable[[Run], Ending]:
    """Return what runs a function, or a coroutine function, on a question."""

    def work(run: Run) -> Ending:
        value = function(**question.arguments(function))
        return _ended(wait(value, run.seconds) if inspect.isawaitable(value) else value)

    return work


def of_command(command: Sequence[str], question: Question, variables: Sequence[str] = ()) -> Callable[[Run], Ending]:
    """Return what runs a command on a question: JSON on its standard input, an answer as its last line.

    Its environment is that of :func:`trl_ext.process.inherited.inherited`, with further ``variables`` of this one.
    """

    def work(run: Run) -> Ending:
        given = inherited(more=variables)
        told = {"BASE_URL": question.base_url, "API_KEY": question.api_key}
        address = {f"{form}_{name}": value for form in ("OPENAI", "ANTHROPIC") for name, value in told.items()}
        process = run.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**given, **address, **past_proxies()},
            start_new_session=True,
        )
        watch(process.pid)
        if run.ending is not None:  # meanwhile
            run.end_group(process)
        try:
            out, errors = _talk(process, json.dumps(vars(question)).encode(), run)
            while not _has_ended(process):
                pause(0.02)
        finally:
            status = run.end_group(process)
        if status:
            lines = "\n".join(errors.splitlines()[-LAST_LINES:])
            for name in sorted(os.environ.keys() - given.keys() - address.keys()):
                if re.search(rf"\b{re.escape(name)}\b", lines):
                    lines += f"\n{name} of your environment is not given to it; name it in protocol.variables"
            return Ending(failure=printable(f"it ended with status {status}; the last lines of its errors:\n{lines}"))
        printed = out.rstrip("\r\n").splitlines()
        return _ended(printed[-1]) if printed else Ending(failure="it ended without an answer, which is its last line")

    return work


def _talk(process: subprocess.Popen[bytes], told: bytes, run: Run) -> tuple[str, str]:
    """Write to a process and read what it writes, until it closes both. Return the ends of its output and errors."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    left = memoryview(told)
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            check()
            for key, _ in selector.select(0.2):
                if key.fileobj is process.stdin:
                    left = _written(process.stdin, left)
                    if not left:
                        selector.unregister(process.stdin)
                        with contextlib.suppress(OSError):
                            process.stdin.close()
                    continue
                piece = os.read(key.fd, 2**16)
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                tail = kept[key.fileobj]  # type: ignore[index]  # the streams that were registered
                tail += piece
                del tail[:-KEPT_BYTES]
            if _has_ended(process) and not selector.select(0):
                break  # a child that has outlived it may hold the other ends open
    for stream in kept:
        stream.close()
    return tuple(bytes(tail).decode("utf-8", "replace") for tail in kept.values())  # type: ignore[return-value]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended. It is not waited for, so that its number stays its own."""
    if not hasattr(os, "waitid"):  # on macOS, Python has it from 3.13 on
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # another thread has waited for it
        return True


def _written(stream: IO[bytes], left: memoryview) -> memoryview:
    """Write a part of ``left``, and return the rest. A process that does not read is told nothing."""
    try:
        return left[os.write(stream.fileno(), left[: 2**16]) :]
    except BlockingIOError:
        return left
    except OSError:
        return left[:0]


def _ended(value: Any) -> Ending:
    """Return the ending of a program that returned ``value``."""
    if isinstance(value, str):
        return Ending(answer=value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Ending(answer=str(value))
    got = "nothing" if value is None else f"{value!r:.80}"
    return Ending(failure=f"it returned {got}; expected its answer, a text")


def _told(error: BaseException) -> str:
    """Return the last lines of the traceback of what a program raised: its own frames and the one that raised.

    Clients and graphs have many frames between these, which would leave no room for the program's own.
    """
    here = str(Path(__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != here]
    if own := [f for f in frames[:-1] if not f.filename.startswith("<") and is_users(f.filename)]:
        frames = [*own, frames[-1]]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return printable("\n".join("".join(lines).rstrip().splitlines()[-LAST_LINES:]))
