"""The far side of the sandbox: a process that forks once per program. Standard library only.

It never reads a program, a test or a verdict, so that a fork finds nothing of another program in its memory. Its owner
says over a socket what is to run, and the worker makes the pipes and the forks, and sends the owner the other ends:

- ``s`` (snippet): a pipe to a new fork, and pipes from it of what the snippet prints and of its verdict;
- ``t`` (tests): a pipe to a fork of the program and one to a fork of its tests, and one from there of the tests'
  verdicts. Calls and values go between the two forks, over pipes that nobody else has.

Each fork reads its request, a frame of JSON, gives up everything else (``kernel``), and runs it (``snippet``,
``tests``). When the owner has read the verdict, or waits no longer, the worker kills the forks and says how they ended.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

# relative: the worker runs without the rest of the library, and with nothing of it in reach
from .kernel import SystemCallFilter, confine, forbid_paths
from .modules import load
from .snippet import VERDICT, read_json, run_snippet
from .tests import CALLS, REPLIES, run_tests, serve_program

NOTHING, FIRST_FREE = 15, 16
"""The descriptor of /dev/null, and the first one that the worker does not keep from the pipes that it makes."""
Body = Callable[[dict[str, Any], dict[str, Any]], NoReturn]


def lock_in(places: dict[int, int], limits: dict[str, Any], calls: SystemCallFilter) -> None:
    """Leave a fork these descriptors and nothing else that the worker has open, then call the kernel.

    ``places``: for each descriptor that the fork shall have, the one that it is now.
    """
    for place in range(FIRST_FREE):
        os.dup2(places.get(place, NOTHING), place)
    os.closerange(FIRST_FREE, 512)
    confine(limits["cpu_seconds"], limits["memory_mb"])
    calls.install()


class Worker:
    """What each fork gets: the limits, and the filter of its system calls. Both are made before the first fork.

    What a fork makes or changes costs it a copy of the memory that it lies in.
    """

    def __init__(self, limits: dict[str, Any], calls: SystemCallFilter):
        self._limits, self._calls = limits, calls

    def fork(self, body: Body, request: int, places: dict[int, int]) -> int:
        """Start a process that reads a request from a descriptor and runs it. Return its number."""
        child = os.fork()
        if child == 0:
            try:
                asked = read_json(request)
                lock_in(places, self._limits, self._calls)
                body(asked, self._limits)
            finally:
                os._exit(1)  # whatever went wrong, the fork must not go on as a second worker
        return child

    def start(self, order: bytes) -> tuple[list[int], list[int]]:
        """Make the forks of an order and their pipes. Return the forks, and the pipes' ends for the owner."""
        pipes: list[tuple[int, int]] = []

        def pipe() -> tuple[int, int]:
            pipes.append(os.pipe())
            return pipes[-1]

        request, verdict = pipe(), pipe()
        if order == b"s":
            printed = pipe()
            places = {1: printed[1], 2: printed[1], VERDICT: verdict[1]}
            children = [self.fork(run_snippet, request[0], places)]
            ends = [request[1], verdict[0], printed[0]]
        else:
            tests, calls, replies = pipe(), pipe(), pipe()
            children = [
                self.fork(serve_program, request[0], {CALLS: calls[0], REPLIES: replies[1]}),
                self.fork(run_tests, tests[0], {VERDICT: verdict[1], CALLS: calls[1], REPLIES: replies[0]}),
            ]
            ends = [request[1], verdict[0], tests[1]]
        for descriptor in {end for both in pipes for end in both} - set(ends):
            os.close(descriptor)
        return children, ends

    def serve(self, owner: socket.socket) -> None:
        """Carry out orders until the owner is gone."""
        while order := owner.recv(1):
            children, ends = self.start(order)
            socket.send_fds(owner, [b"."], ends)
            for descriptor in ends:
                os.close(descriptor)
            owner.recv(1)  # the owner has what it wants, or is gone
            for child in children:
                # a fork that ended by itself has closed its pipe by ending, and killing it then changes nothing
                os.kill(child, signal.SIGKILL)
            statuses = [os.waitpid(child, 0)[1] for child in children]
            owner.send(struct.pack("<II", *statuses, *[0] * (2 - len(statuses))))


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
    """Load what snippets may import, give up what the worker does not need, then serve the owner, which is at stdin.

    The first message says whether the kernel has Landlock, as a frame of ``{"landlock": bool}``.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the owner's mask is inherited, and could hold back SIGXCPU
    owner = socket.socket(fileno=os.dup(0))
    for place in {*range(FIRST_FREE)} - {2, owner.fileno()}:  # 2 is /dev/null already
        os.dup2(2, place)
    warnings.simplefilter("ignore")  # to show a warning, Python would look for the snippet's source file
    load()
    # a snippet's last line is there although it did not end; made here, because a fork cannot look at its descriptors
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    drop_privileges()
    os.environ.clear()
    os.environ["TZ"] = "UTC"  # dates are the same on every machine
    time.tzset()
    sys.argv[:] = [""]
    worker = Worker(limits, SystemCallFilter())
    landlock = forbid_paths()
    gc.collect()
    gc.freeze()  # a fork that collects garbage then copies nothing that was there before it
    ready = json.dumps({"landlock": landlock}).encode()
    owner.send(struct.pack(">I", len(ready)) + ready)
    worker.serve(owner)
