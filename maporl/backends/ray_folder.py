"""The folder of the clusters that a process starts, with their token. Imports no Ray.

Ray makes its own folder open to all users of a machine, so that it lies in one that only its user can enter. A lock
says that the folder is in use: the system takes it back when the process ends, however it ends. Normally a watchdog
then ends what Ray has left (:mod:`maporl.backends.watchdog`). If that was killed too, the next process that starts a
cluster does it.
"""

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from maporl.backends.watchdog import end_all
from trl_ext.process.inherited import inherited

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
    command = [sys.executable, "-m", "maporl.backends.watchdog", str(outer)]
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
