"""Let one process at a time write a run into a folder. Two of them would mix their records. Imports no torch.

The lock is that of the operating system on the file ``.lock``. The system takes it back when the process ends, however
it ends, so a run that was killed leaves nothing to clean up. A second file names the process for people, and the pipe
at which it can be asked for its stacks.
"""

import errno
import json
import logging
import os
import socket
import time
from functools import cache
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from trl_ext.errors import UserError
from trl_ext.files.atomic import replace_file
from trl_ext.files.stacks import Listener

LOCK, OWNER = ".lock", ".lock-owner"
_KNOWN = ("pid", "host", "since")
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR)
logger = logging.getLogger(__name__)


class FolderInUse(UserError, RuntimeError):
    """Another process writes a run into the folder."""


class UnwritableFolder(UserError, OSError):
    """The folder of a run cannot be written."""


class RunLock:
    """The right to write a run into ``folder``, as a context manager or by :meth:`acquire` and :meth:`release`.

    A thread that has the lock may acquire it again. A process's children do not need it.

    A network file system may keep locks within each host, or have none at all. The first acquisition then warns if a
    process on another host has not ended in order, or if locks are missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._listener: Listener | None = None
        """Of the first lock in a process."""

    def acquire(self) -> None:
        """Take the lock without waiting. The folder is created if it is missing.

        Raises:
            FolderInUse: another process has the lock.
            UnwritableFolder: the folder cannot be written.
        """
        try:
            self._acquire()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            raise UnwritableFolder(
                f"{self.folder}: cannot be written ({error.strerror}); change its permissions, or choose another folder"
            ) from error

    def _acquire(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / LOCK).is_symlink():  # old versions of filelock would empty the file that it leads to
            raise UnwritableFolder(f"{self.folder / LOCK}: is a link, and a lock is a file; remove it")
        lock = _lock_in(self.folder.resolve())
        first = not lock.is_locked
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderInUse(
                f"{self.folder}: {_owner(self.folder) or 'another process'} writes here, and two in one folder would "
                "mix their records; wait for it or stop it, or choose another folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _WITHOUT_LOCKS:
                raise
            logger.warning(
                "%s: its file system has no locks (%s); see to it that no other process writes here", self.folder, error
            )
        if first:
            self._warn_of_other_hosts()
            self._listener = Listener(self.folder.resolve())
            try:
                replace_file(self.folder / OWNER, json.dumps(_this_process(self._listener.pipe)))
            except BaseException:
                self._listener.close()
                lock.release()
                raise

    def release(self) -> None:
        """Give the lock back. Nothing happens if it was not taken."""
        if self._listener is not None:
            (self.folder / OWNER).unlink(missing_ok=True)
            self._listener.close()
            self._listener = None
        _lock_in(self.folder.resolve()).release()

    def _warn_of_other_hosts(self) -> None:
        last = read_owner(self.folder)
        if last and last["host"] != socket.gethostname():
            logger.warning(
                "%s: %s wrote here last and did not end in order; if it still runs, stop it, because not every network "
                "file system shows the locks of other hosts",
                self.folder,
                _owner(self.folder),
            )

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_leftover(path: Path) -> bool:
    """Return whether ``path`` is a lock's file, or a hidden file or folder that a killed process was writing."""
    return path.name in (LOCK, OWNER) or path.name.startswith(".partial-")


def holds_something(folder: Path) -> bool:
    """Return whether ``folder`` exists and holds more than leftovers of processes that were killed at their start."""
    return folder.exists() and not all(is_leftover(path) for path in folder.iterdir())


@cache
def _lock_in(folder: Path) -> FileLock:
    return FileLock(folder / LOCK, mode=0o666)  # whoever may write the folder may resume its run


def _this_process(pipe: Path | None) -> dict[str, str | int]:
    told: dict[str, str | int] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return told if pipe is None else {**told, "stacks": str(pipe)}


def _owner(folder: Path) -> str:
    """Return the words that name the process that has or had the lock, or an empty text if its record is unreadable."""
    owner = read_owner(folder)
    return f"process {owner['pid']} on {owner['host']} (since {owner['since']})" if owner else ""


def read_owner(folder: Path) -> dict[str, str | int]:
    """Return what the file says of the process that has or had the lock. It is empty if the file is missing or damaged.

    ``pid``, ``host`` and ``since`` are always there, and ``stacks``, the pipe, on systems that have pipes.
    """
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    complete = isinstance(owner, dict) and owner.keys() >= set(_KNOWN)
    return owner if complete and all(str(value).isprintable() for value in owner.values()) else {}
