"""The folder of the clusters that a process starts, and the watchdog that ends what is left of them if it is killed.

It has the token of the clusters. Ray makes its own folder open to all users of a machine, so that it lies in one that
only its user can enter. A lock says that the folder is in use: the system takes it back when the process ends, however
it ends. Normally the watchdog, ``python -m maporl.integrations.ray.ray_folder FOLDER``, then ends what Ray has left. If
that was killed too, the next process that starts a cluster does it.

Ray's own processes end when the driver is gone, but two of its agents may stay. The watchdog reads its standard input,
which ends with the driver. It then kills whatever has the cluster's token, which is in ``FOLDER``, and removes the
folder. It finds processes in ``/proc``, and does nothing on systems without it. Nothing here imports Ray.
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trl_ext.process.inherited import inherited

# -- the folder --------------------------------------------------------------------------------------------------------

PREFIX, LOCK, TOKEN = "maporl-ray-", "lock", "token"
LONGEST = 36
"""The most characters of the folder's name. Ray appends 70 for its sockets, and the system takes 107."""
logger = logging.getLogger(__name__)
_WATCHING: list[subprocess.Popen] = []
"""The process that ends what this one leaves. It is kept, because its standard input would close with it."""
_LOCKS: list[int] = []
"""The open file whose lock this process has."""


def make_folder() -> Path:
    """Make the folder that Ray gets, with a new token. Only this user can reach it. Return the folder, which ends with
    the process.

    What killed runs have left is ended before.
    """
    end_abandoned()
    outer = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_place()))
    locked = os.open(outer / f".{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
    _take(locked)
    (outer / f".{LOCK}").rename(outer / LOCK)  # whoever sees it sees it locked
    _LOCKS.append(locked)
    # its standard input ends with this process, however that ends
    command = [sys.executable, "-m", "maporl.integrations.ray.ray_folder", str(outer)]
    environment = {name: value for name, value in inherited().items() if name != "RAY_AUTH_TOKEN_PATH"}
    _WATCHING.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True))
    folder = outer / "ray"
    folder.mkdir(mode=0o700)
    token = folder / TOKEN
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return folder


def end_abandoned() -> None:
    """End what the clusters of killed processes have left, if their watchdogs were killed too, and remove their
    folders."""
    for outer in sorted(_place().glob(f"{PREFIX}*")):
        try:
            if outer.is_symlink() or outer.stat().st_uid != os.getuid():
                continue
            lock = os.open(outer / LOCK, os.O_RDWR)
        except OSError:  # it is being made or removed, or an older version has made it
            continue
        try:
            _take(lock)
        except OSError:  # its process runs
            continue
        else:
            ended = end_all(str(outer))
            logger.warning(
                "%s: ended what a killed run has left: %d processes of Ray, and this folder with their token",
                outer,
                len(ended),
            )
        finally:
            os.close(lock)


def _take(file: int) -> None:
    """Lock an open file, and raise an OSError if another process has locked it."""
    import fcntl  # Windows has none, and no Ray that is started here

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _place() -> Path:
    """Return the folder for temporary files, or ``/tmp`` if its name is too long for the sockets of Ray."""
    place = Path(tempfile.gettempdir())
    return place if len(str(place / PREFIX)) + 8 <= LONGEST else Path("/tmp")


# -- the watchdog ------------------------------------------------------------------------------------------------------

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


def _watch(folder: str) -> None:
    """Wait for the end of the driver, and end what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # those are for the driver
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(folder)


if __name__ == "__main__":
    _watch(sys.argv[1])
