"""Runs untrusted Python: programs that are a data set's labels or, in a task of your own, a model's answers.

    with Sandbox() as sandbox:
        sandbox.run("def f(): return 6 * 7", "f")  # Outcome(value=42, reason='ok')

A snippet gets no network, no files, no environment, no other processes, and no more time, memory or output than
:class:`Limits` allows. It runs in a fork of a worker process (:mod:`maporl.sandbox.sandboxed.worker`) behind a
restricted Python, an audit hook, resource limits, and the kernel's Landlock and seccomp
(:mod:`maporl.sandbox.sandboxed.kernel`). Where bubblewrap works, the worker also runs in namespaces of its own, where it
sees no network, no home folder and no other process. ``kind`` then is ``bubblewrap``, and ``restricted`` elsewhere.

An outcome says which value the snippet gave, and no more. Compare it with what you expect in your own process: whatever
a snippet's process says about itself, the snippet could have written.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from maporl.errors import UserError
from maporl.sandbox.bubblewrap import INSIDE, WORKER, bubblewrap_prefix, find_bubblewrap, worker_command
from maporl.sandbox.frames import Lost, receive, send
from maporl.sandbox.outcomes import Outcome, decode_lines, plain_outcome
from maporl.storage.disk_cache import DiskCache, cache_folder

logger = logging.getLogger(__name__)

Kind = Literal["bubblewrap", "restricted"]
_LOADING_SECONDS = 60.0
_GRACE_SECONDS = 5.0
"""The worker has this many seconds more than a snippet, and is then replaced."""
_SAVE_EVERY = 500
_FATAL = ("timeout", "cpu", "memory", "output", "killed", "forbidden")
"""After these, nothing more runs in the process of a snippet."""
_MOST_FATAL = 3
"""After so many asserts that ended like this, no more asserts of the same code are run."""
UNCACHED = ("timeout", "killed")
"""These outcomes are not kept, because they depend on what else the machine was doing."""
VARIABLE = "MAPORL_SANDBOX"
"""The environment variable with which the owner of a machine without kernel walls accepts the restricted Python alone."""


class SandboxError(UserError, RuntimeError):
    """The sandbox itself cannot work here. No snippet can cause it."""


@dataclass(frozen=True)
class Limits:
    """What one snippet may use.

    ``cpu_seconds``: CPU time, in whole seconds. ``wall_seconds``: time on the clock. ``memory_mb``: address space in
    MiB, of which the interpreter takes about 40. ``output_bytes``: what it may print, and again what it may return as
    JSON. ``source_bytes``: the length of the code.

    Raises:
        ValueError: a limit is too small for any snippet.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 10.0
    memory_mb: int = 256
    output_bytes: int = 65536
    source_bytes: int = 100_000

    def __post_init__(self):
        for name, least in (("cpu_seconds", 1), ("wall_seconds", 0.01), ("memory_mb", 64), ("output_bytes", 256), ("source_bytes", 1)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"Limits.{name}: expected at least {least}, got {getattr(self, name)}")


class Sandbox:
    """Runs snippets one after another in one worker process, which starts with the first of them.

    ``kind``: "auto" takes bubblewrap where it works, and else the restricted process if its kernel filters system calls.
    Where it does neither, code runs only if the owner of the machine says so, by ``kind="restricted"`` or by the
    environment variable ``MAPORL_SANDBOX``, which replaces "auto". ``cache``: where outcomes are kept; True means the user's cache
    folder (``$MAPORL_CACHE``, else ``~/.cache/maporl``), a path means that folder, and False keeps nothing. Use the
    sandbox as a context manager, or call :meth:`close`. Threads may share it; their snippets run in turn. ``command``
    starts the worker, and ``worker`` is its process while there is one.

    Raises:
        SandboxError: the system has no resource limits, it has neither bubblewrap nor filters of system calls, or
            bubblewrap was asked for and does not work here.
        CacheUnusable: the cache cannot be written.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        kind: Literal["auto", "bubblewrap", "restricted"] = "auto",
        cache: bool | Path = True,
    ):
        if find_spec("resource") is None:
            raise SandboxError(
                f"running untrusted code needs POSIX resource limits, which {sys.platform} lacks; use Linux"
            )
        from maporl.sandbox.sandboxed.kernel import filter_missing  # it needs the module that was looked for above

        self.limits = limits or Limits()
        asked = _asked_kind(kind)
        bubblewrap, why = find_bubblewrap() if asked != "restricted" else (None, "as asked")
        if asked == "bubblewrap" and bubblewrap is None:
            raise SandboxError(f"kind='bubblewrap' was asked for, but {why}; use kind='auto' or 'restricted'")
        no_filter = filter_missing()
        if asked == "auto" and bubblewrap is None and no_filter:
            raise SandboxError(
                f"nothing but Python's own rules would hold untrusted code here: {why}; {no_filter}. Install bubblewrap, "
                f"or set {VARIABLE}=restricted if you trust the code"
            )
        self.kind: Kind = "restricted" if bubblewrap is None else "bubblewrap"
        self._filtered, self._landlock = no_filter is None, False
        _log_once(self.kind, why, no_filter or "system calls are filtered")
        self.command = (
            [*bubblewrap_prefix(bubblewrap), *worker_command(INSIDE)] if bubblewrap else worker_command(WORKER.parent)
        )
        self._cache = None
        if cache is not False:
            self._cache = DiskCache(
                cache_folder() if cache is True else cache, valid=lambda record: bool(plain_outcome(record))
            )
        self._lock = threading.Lock()
        _all.add(self)
        self.worker: subprocess.Popen | None = None
        self._owner = os.getpid()
        self._stop: Callable[[], Any] = lambda: None

    def run(self, code: Any, call: str) -> Outcome:
        """Run ``code``, then its function ``call`` without arguments; the outcome's value is what that returns.

        Raises:
            ValueError: ``call`` cannot be the name of a function.
            SandboxError: the worker process does not start.
        """
        return self.run_many([code], call)[0]

    def run_many(self, codes: Sequence[Any], call: str) -> list[Outcome]:
        """:meth:`run` for each of ``codes``, in order. Equal codes run once, and codes with a kept outcome not at all.

        Raises:
            ValueError: ``call`` cannot be the name of a function.
            SandboxError: the worker process does not start.
        """
        if not call.isidentifier():
            raise ValueError(f"call: expected the name of a function that the snippet defines, got {call!r}")
        keys = [self._key(code, call) if self._is_source(code) else None for code in codes]
        known: dict[str | None, Outcome] = {None: Outcome(None, "source")}
        if self._cache:
            found = self._cache.get(list({key for key in keys if key is not None}))
            known |= {key: Outcome(**record) for key, record in found.items()}
        fresh: list[tuple[str, dict[str, Any]]] = []
        try:
            for key, code in zip(keys, codes, strict=True):
                if key is None or key in known:
                    continue
                known[key] = self.execute(code, call)
                if known[key].reason not in UNCACHED:
                    fresh.append((key, vars(known[key])))
                if len(fresh) >= _SAVE_EVERY:
                    self._save(fresh)
        finally:
            self._save(fresh)
        return [known[key] for key in keys]

    def walls(self) -> list[str]:
        """What holds a snippet here besides Python's own rules, from the outermost wall to the innermost.

        Raises:
            SandboxError: the worker process does not start.
        """
        with self._lock:
            self._running()
        there = {"bubblewrap": self.kind == "bubblewrap", "Landlock": self._landlock, "seccomp": self._filtered}
        return [*(name for name, holds in there.items() if holds), "resource limits"]

    def close(self) -> None:
        """End the worker and everything it started; the next snippet starts a new one."""
        self._stop()
        self.worker = None

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

    def run_asserts(
        self, code: Any, asserts: Sequence[str], setup: str = "", values: Sequence[bool] | None = None
    ) -> list[Outcome]:
        """Run ``code``, then ``setup``, then each of ``asserts`` after them. The outcomes are those of the asserts, in order.

        Each assert is one statement. Where ``values`` is true, an expression stands in its place. The outcome then has the
        value, as :func:`maporl.sandbox.sandboxed.values.tagged` writes it.

        All run in one process, in which what one of them changes stays changed. One that does not end or uses too much
        begins a new process, and the others go on in another. After three of them, the rest have the outcome of the third.
        If ``code`` or ``setup`` fails, each assert has that outcome. Nothing is cached. The process of the code judges
        itself: code whose objects are equal to everything passes asserts. A value is compared by the caller.

        Raises:
            SandboxError: the worker process does not start.
        """
        done: list[Outcome] = []
        flags = [False] * len(asserts) if values is None else list(values)
        if not self._is_source(code):
            return [Outcome(None, "source")] * len(asserts)
        while len(done) < len(asserts):
            left = list(asserts[len(done) :])
            request = {"code": code, "setup": setup, "asserts": left, "values": flags[len(done) :]}
            of_code, *own = self._execute(request, len(left) + 1)
            if not of_code.ok or not own:
                return done + [of_code if not of_code.ok else Outcome(None, "killed")] * len(left)
            # the last one may have died of what the others had used up, so it begins the next process
            done += own[:-1] if own[-1].reason in _FATAL and len(own) > 1 else own
            if sum(outcome.reason in _FATAL for outcome in done) >= _MOST_FATAL:
                return done + [done[-1]] * (len(asserts) - len(done))
        return done

    def execute(self, code: str, call: str) -> Outcome:
        """Run one snippet in the worker, whatever outcome is kept. With an empty ``call``, nothing is called after it.

        Raises:
            SandboxError: the worker process does not start.
        """
        return self._execute({"code": code, "call": call}, 1)[0]

    def _execute(self, request: dict[str, Any], most: int) -> list[Outcome]:
        payload = json.dumps(request).encode()
        with self._lock:
            outcomes = self._exchange(payload, most)
            if outcomes[-1].reason == "killed" and len(outcomes) <= 2:
                # the worker may have died of something else; a snippet that kills it does so again
                outcomes = self._exchange(payload, most)
        return outcomes

    def _exchange(self, request: bytes, most: int) -> list[Outcome]:
        """Ask the worker. It is replaced unless it answered, with whatever the snippet may have left in it."""
        worker = self._running()
        deadline = time.monotonic() + self.limits.wall_seconds + _GRACE_SECONDS
        try:
            send(worker.stdin, request, deadline)
            outcomes = decode_lines(receive(worker.stdout, deadline), most)
        except Lost as lost:
            outcomes = [Outcome(None, str(lost))]
        except BaseException:  # an interrupted exchange would leave its answer to the next snippet
            self.close()
            raise
        if outcomes[-1].reason in UNCACHED:
            self.close()
        return outcomes

    def _running(self) -> subprocess.Popen:
        """The worker, which is started if it is not running. A fork of this process starts its own."""
        if self.worker is None or self._owner != os.getpid():
            # some interpreters do not start without LD_LIBRARY_PATH; the hash seed makes the order of sets repeatable
            kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
            self.worker = subprocess.Popen(
                [*self.command, json.dumps([asdict(self.limits), self._filtered])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", **kept}, cwd="/", start_new_session=True, bufsize=0,
            )  # fmt: skip
            self._owner = os.getpid()
            self._stop = weakref.finalize(self, _end, self.worker, self._owner)
            try:
                started = json.loads(receive(self.worker.stdout, time.monotonic() + _LOADING_SECONDS))
            except Lost as lost:
                started = {"trial": str(lost)}
            if started["trial"] != "ok":
                self.close()
                raise SandboxError(
                    f"the worker of the {self.kind} sandbox did not start ({started['trial']}); run it by hand to see "
                    f"why: {' '.join(self.command[:-2])} ..."
                )
            self._landlock = started["landlock"]
        return self.worker


def _end(worker: subprocess.Popen, owner: int) -> None:
    """Kill the worker's process group and wait for its end. A fork of the owner leaves the worker alone."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(worker.pid, signal.SIGKILL)
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            stream.close()
    worker.wait()


_all: "weakref.WeakSet[Sandbox]" = weakref.WeakSet()


def _unlock_in_a_fork() -> None:
    """A fork has none of the threads that may have held a lock when it was made, and that would have freed it."""
    for sandbox in list(_all):
        sandbox._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_a_fork)


@functools.cache
def _log_once(kind: str, why: str, filtered: str) -> None:
    logger.info("sandbox for untrusted code: %s (%s; %s)", kind, why, filtered)


def _asked_kind(kind: str) -> str:
    """``kind``, or what the environment variable says in the place of "auto"."""
    asked = os.environ.get(VARIABLE, "auto") if kind == "auto" else kind
    if asked not in ("auto", *get_args(Kind)):
        raise SandboxError(f"{VARIABLE}: expected auto, {' or '.join(get_args(Kind))}, got {asked!r}")
    return asked


@functools.cache
def _version() -> str:
    """A text that changes with the worker's sources and with Python, because outcomes depend on both."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(WORKER.glob("*.py")))
    return f"{sys.version_info.major}.{sys.version_info.minor} {hashlib.sha256(sources.encode()).hexdigest()}"
