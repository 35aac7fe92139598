"""Tell what every thread of a running process does, when another process asks for it. Imports no torch.

Whoever writes a run listens at a pipe of the operating system. The thread that listens waits for nothing else, so it
answers although the run hangs.
"""

import gc
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from trl_ext.files.atomic import replace_file
from trl_ext.files.paths import below
from trl_ext.process.waits import SLICE, Threads, result

FOLDER = "stacks"
"""The folder in a run's folder with the answers."""
logger = logging.getLogger(__name__)


class Worker(Protocol):
    """A process that works for this one."""

    name: str

    def stacks(self) -> str:
        """Return what every thread of it does."""
        ...


WORKERS: list[Callable[[], Iterable[Worker]]] = []
"""Functions that return the processes which work for this one at present. They are asked too."""


def stacks() -> str:
    """Return the stack of every thread of this process, each under its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    collects = gc.isenabled()
    gc.disable()  # while frames are listed, no thread can end, and a finalizer that ends one would wait for ever
    try:
        frames = list(sys._current_frames().items())
    finally:
        if collects:
            gc.enable()
    return "\n".join(f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(f))}" for ident, f in frames)


def all_stacks() -> str:
    """Return the stacks of this process and of those that work for it."""
    workers = [worker for find in WORKERS for worker in find()]
    with Threads(len(workers), "asks for stacks") as threads:  # one that hangs keeps the others waiting
        answers = [result(one) for one in [threads.submit(worker.stacks) for worker in workers]]
    now, this = time.strftime("%Y-%m-%d %H:%M:%S"), f"process {os.getpid()} on {socket.gethostname()}"
    parts = [(f"driver, {this}, {now}", stacks()), *zip([worker.name for worker in workers], answers, strict=True)]
    return "\n\n".join(f"== {name}\n\n{text.strip()}" for name, text in parts) + "\n"


class Listener:
    """Writes :func:`all_stacks` into ``folder/stacks/NAME.txt`` whenever a line with a name comes through :attr:`pipe`.

    ``pipe`` is None on a system without named pipes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.pipe: Path | None = None
        if not hasattr(os, "mkfifo"):  # Windows
            return
        try:
            self.pipe = Path(tempfile.mkdtemp(prefix="stacks-")) / "pipe"
            os.mkfifo(self.pipe, 0o600)
            # also open for writing, so that it does not end with the first process that asks
            self._end = os.open(self.pipe, os.O_RDWR)
        except OSError as error:
            logger.warning("%s: nobody can ask this run for its stacks: %s", folder, error)
            self.pipe = None
            return
        self._thread = threading.Thread(target=self._listen, name="listens for who asks for stacks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer."""
        if self.pipe is not None:
            os.write(self._end, b"\n")
            self._thread.join(SLICE)  # it may be asking a process that hangs
            if not self._thread.is_alive():
                os.close(self._end)
            shutil.rmtree(self.pipe.parent)
            self.pipe = None

    def _listen(self) -> None:
        left = b""
        while True:
            *names, left = (left + os.read(self._end, 4096)).split(b"\n")
            for name in names:
                if not name:
                    return
                self._write(Path(name.decode()).name)

    def _write(self, name: str) -> None:
        file = below(self.folder / FOLDER, f"{name}.txt")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, all_stacks())
        except OSError as error:
            logger.warning("%s: the stacks cannot be written: %s", file, error)
