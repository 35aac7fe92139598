"""Ask a running run what all of its threads and processes do. ``maporl dump`` calls this."""

import os
import shlex
import socket
import stat
import time
from pathlib import Path

from maporl.errors import RunError
from trl_ext.files.lock import read_owner
from trl_ext.files.stacks import FOLDER

PATIENCE = 60.0
"""The seconds after which a run that has not answered will not do so. Processes of groups are given 20."""


def dump(folder: Path, patience: float = PATIENCE) -> Path:
    """Let the run in ``folder`` write the stacks of its processes, and return the file with them.

    Args:
        folder: the run's folder.
        patience: the seconds to wait for them.

    Raises:
        RunError: the run is missing, does not run, runs on another machine or as another user, or does not answer.
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; give a run's output_dir")
    owner = read_owner(folder)
    if not owner:
        raise RunError(f"{folder}: nothing runs here; give the output_dir of a run that has not ended")
    who = f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    if owner["host"] != socket.gethostname():
        raise RunError(f"{folder}: its run is {who}; run maporl dump there, this is {socket.gethostname()}")
    if "stacks" not in owner:
        raise RunError(f"{folder}: {who} cannot be asked, because it has no pipe; py-spy dump --pid {owner['pid']}")
    name = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    _ask(folder, who, str(owner["stacks"]), name)
    file = folder / FOLDER / f"{name}.txt"
    until = time.monotonic() + patience
    while not file.exists():
        if time.monotonic() > until:
            raise RunError(
                f"{folder}: {who} has not answered within {patience:g} s; a call into a library keeps it from it, and "
                f"this says which: py-spy dump --native --pid {owner['pid']}"
            )
        time.sleep(0.05)
    return file


def _ask(folder: Path, who: str, pipe: str, name: str) -> None:
    """Write ``name`` into the ``pipe`` at which the run listens."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except PermissionError:
        raise RunError(f"{folder}: its run is {who}, of another user; run maporl dump as that user") from None
    except OSError:  # the pipe is gone, or nobody reads it
        again = f"maporl train {shlex.quote(str(folder / 'config.yaml'))} --resume"
        raise RunError(f"{folder}: its run does not go on: {who} was killed; resume it with: {again}") from None
    try:
        if not stat.S_ISFIFO(os.fstat(end).st_mode):
            raise RunError(f"{folder}: {pipe} is not a pipe; the file .lock-owner is damaged")
        os.write(end, f"{name}\n".encode())
    finally:
        os.close(end)
