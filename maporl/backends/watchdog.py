"""Ends what a Ray cluster leaves if the driver that started it is killed: ``python -m maporl.backends.watchdog
FOLDER``.

Ray's own processes end when the driver is gone, but two of its agents may stay. This process reads its standard input,
which ends with the driver. It then kills whatever has the cluster's token, which is in ``FOLDER``, and removes the
folder. It finds processes in ``/proc``, and does nothing on systems without it.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

TRIES = 10
"""How often processes are looked for, once a second. One that is being killed may still be starting another."""


def processes_of(folder: str) -> list[int]:
    """Return the processes whose environment names a token below ``folder``, and those of Ray that have a file open
    there.

    Some processes of Ray write their titles, such as ``ray::DashboardAgent``, over the beginning of their environments.
    """
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            variables = (process / "environ").read_bytes().split(b"\0")
            named = any(variable.startswith(f"RAY_AUTH_TOKEN_PATH={folder}/".encode()) for variable in variables)
            titled = (process / "cmdline").read_bytes().startswith(b"ray::")
            files = [os.readlink(file) for file in (process / "fd").iterdir()] if titled else []
            if named or any(file.startswith(f"{folder}/") for file in files):
                pids.append(int(process.name))
    return [pid for pid in pids if pid != os.getpid()]


def end_all(folder: str) -> set[int]:
    """Kill what belongs to a cluster whose driver has ended, and remove its ``folder``.

    Return the numbers of the processes.
    """
    ended: set[int] = set()
    for _ in range(TRIES):
        left = processes_of(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        if not left:
            break
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    return ended


def main(folder: str) -> None:
    """Wait for the end of the driver, and end what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the driver
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(folder)


if __name__ == "__main__":
    main(sys.argv[1])
