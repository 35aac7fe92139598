"""Ends process groups of this process if it is killed. Imports no torch.

A killed process cannot end what it has started. Another one can: it runs this file, is told the groups over its
standard input, and kills those that are left when that ends, which it does with this process.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_LOCK = threading.Lock()
_WATCHING: dict[int, subprocess.Popen[bytes]] = {}
"""The watching process of each process: one that was forked from this one starts its own."""


def watch(group: int) -> None:
    """Have a process group killed when this process ends, however it ends."""
    _tell(f"+{group}")


def forget(group: int) -> None:
    """Let a process group alone, because it has ended. Its number may soon be that of another one."""
    _tell(f"-{group}")


def _tell(line: str) -> None:
    with _LOCK:
        watching = _WATCHING.get(os.getpid())
        if watching is None or watching.poll() is not None:
            _WATCHING[os.getpid()] = watching = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        assert watching.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it; the next group gets another one
            watching.stdin.write(f"{line}\n".encode())
            watching.stdin.flush()


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the process that it watches
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
