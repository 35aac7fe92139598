"""The far side of symbolic comparison: a process that compares mathematics with math-verify and can be killed.

It is started by :mod:`maporl.tasks.grading.symbolic`, which runs this file by its path: it imports only the standard
library and math-verify. The process loads sympy once and then forks a servant. The servant answers over the same
connection. If the kernel ends the servant because a comparison used up its time, the process says so and forks the next
one, which takes milliseconds.
"""

import gc
import json
import logging
import os
import resource
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import NoReturn

MEMORY_BYTES = 512 << 20
"""What a servant may take besides what the process has taken before it: sympy has then been loaded."""
PAIRS, KEPT_BYTES = 1000, 200 << 20
"""A fresh servant takes over after so many requests, or when one has used so much memory, because sympy keeps much of
what it computed."""
_UNIT = 1 if sys.platform == "darwin" else 1024  # of the memory that getrusage counts
_LEFT = 1
_SPENT = (signal.SIGPROF, signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""A servant dies of these signals by what it computes: its time is up, or it ran out of stack or memory."""


def compare(connection: Connection, gold: str, answer: str | None) -> str:
    """The word that ends the reply: ``unreadable`` (the label), ``equal`` or ``different``.

    Says ``readable`` first once the label is read, so that the owner knows how far a servant came that dies.
    """
    from math_verify import parse, verify

    label = parse(gold, parsing_timeout=None)
    if not label:
        return "unreadable"
    connection.send_bytes(b'["readable", 0]')
    same = answer is not None and verify(label, parse(answer, parsing_timeout=None), timeout_seconds=None)
    return "equal" if same else "different"


def confine() -> None:
    """Have the kernel refuse core files, and on Linux more memory than :data:`MEMORY_BYTES`."""
    limits = {resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()  # some allocators reserve very much
        limits[resource.RLIMIT_AS] = taken + MEMORY_BYTES
    for name, limit in limits.items():
        _, most = resource.getrlimit(name)
        resource.setrlimit(name, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def serve(connection: Connection) -> NoReturn:
    """Answer :data:`PAIRS` requests, each within its seconds of CPU time, and end."""
    confine()
    for _ in range(PAIRS):
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(_LEFT)
        # the kernel ends the process when the timer runs out, whatever it is doing, because nothing handles the signal
        signal.setitimer(signal.ITIMER_PROF, max(asked["seconds"], 0.001))  # 0 would stop the timer
        started = time.process_time()
        try:
            word = compare(connection, asked["gold"], asked["answer"])
        except Exception:  # what math-verify does not catch is a fault at these texts, and would be one again
            word = "ended"
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps([word, time.process_time() - started]).encode())
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT > KEPT_BYTES:
            break
    os._exit(0)


def main(descriptor: int) -> None:
    """Load math-verify, then keep a servant at work until the owner closes the connection."""
    connection = Connection(descriptor)
    logging.disable()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        from math_verify import parse, verify

        # the parser builds its tables at the first use, and all forks share them
        verify(parse("$x+1$", parsing_timeout=None), parse("$1+x$", parsing_timeout=None), timeout_seconds=None)
    except Exception as error:
        connection.send_bytes(json.dumps(["failed", f"{type(error).__name__}: {error}"]).encode())
        return
    gc.collect()
    gc.freeze()  # a fork that collects garbage then copies nothing that was there before it
    connection.send_bytes(b'["ready", 0]')
    while True:
        servant = os.fork()
        if servant == 0:
            try:
                serve(connection)
            finally:
                os._exit(_LEFT)  # whatever went wrong, the fork must not go on as a second parent
        _, status = os.waitpid(servant, 0)
        code = os.waitstatus_to_exitcode(status)
        if -code in _SPENT:
            connection.send_bytes(b'["ended", 0]')
        elif code != 0:  # the owner is gone, or somebody else killed the servant: the owner sees the connection close
            return
