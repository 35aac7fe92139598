"""Files and folders that a reader sees whole or not at all. Imports no torch.

What is written goes to a hidden name beside its place, is flushed to the disk, and gets its own name once it is complete. A
process that is killed in between leaves the hidden name behind and never half a file.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(file: Path, text: str) -> None:
    """Write ``text`` as UTF-8. A reader of ``file`` sees the old one whole or the new one whole.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
    """
    partial = file.with_name(f".partial-{os.getpid()}-{file.name}")  # two processes that write one file do not meet
    try:
        with partial.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    _flush(file.parent)


@contextmanager
def new_folder(target: Path, main: bool = True) -> Iterator[Path]:
    """A hidden folder to write into. It becomes ``target`` when the block ends; an error in the block removes it.

    Where several processes enter together, only the ``main`` one makes the folder, flushes what is in it and renames it.
    ``target`` may be there already as long as it is empty.

    Raises:
        OSError: the folder cannot be written, or ``target`` is there and is not empty.
    """
    partial = target.with_name(f".partial-{target.name}")
    if main:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed while writing
        partial.mkdir(parents=True)
    try:
        yield partial
        if main:
            for path in [*partial.rglob("*"), partial]:
                _flush(path)
            partial.rename(target)
            _flush(target.parent)
    except BaseException:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
