"""Write files and folders atomically: a reader sees them whole or not at all. Imports no torch.

The content is first written under a hidden name beside its place and flushed to the disk. It gets its own name once it
is complete. A process that is killed in between leaves the hidden name behind, and never half a file.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl_ext.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The system's errors of a full disk, of a quota, and of a limit on the size of files."""


class NoSpace(UserError, OSError):
    """The disk is full, or a quota or a limit on the size of files is reached."""


def replace_file(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` as UTF-8. A reader sees either the whole old content or the whole new content.

    Raises:
        OSError: the file cannot be written. The old content is unchanged.
    """
    # the process id keeps two processes that write the same file apart
    partial = file.with_name(f".partial-{os.getpid()}-{file.name}")
    try:
        with partial.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    flush(file.parent)


@contextmanager
def new_folder(target: Path, main: bool = True) -> Iterator[Path]:
    """Yield a hidden folder to write into, and rename it to ``target`` when the block ends.

    An error in the block removes the folder. If several processes enter together, only the ``main`` process makes the
    folder, flushes its files and renames it. ``target`` may exist already if it is empty.

    Raises:
        NoSpace: the disk is full.
        OSError: the folder cannot be written, or ``target`` exists and is not empty.
    """
    partial = target.with_name(f".partial-{target.name}")
    if main:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed while writing
        partial.mkdir(parents=True)
    try:
        yield partial
        if main:
            for path in [*partial.rglob("*"), partial]:
                flush(path)
            partial.rename(target)
            flush(target.parent)
    except BaseException as error:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception) and _out_of_space(error):
            raise NoSpace(f"{target}: no space to write it ({error}); it was removed. Free some space") from error
        raise


def _out_of_space(error: Exception) -> bool:
    # safetensors raises an error of its own, which contains the system's message
    return getattr(error, "errno", None) in NO_ROOM or any(os.strerror(n) in str(error) for n in NO_ROOM)


def flush(path: Path) -> None:
    """Wait until the file or the folder ``path`` is on the disk: the content of a file, the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
