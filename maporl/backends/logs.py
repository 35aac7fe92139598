"""What the processes of groups print: a file for each in the run's folder, whose end stands in errors. Imports no torch."""

import faulthandler
import os
import time
from pathlib import Path

LINES = 20
"""How many lines of a log an error repeats."""
_MOST = 2**16
"""The most bytes at the end of a log that are read for them."""


def log_of(folder: Path, name: str) -> Path:
    """Return the file that the process ``name`` of the run in ``folder`` prints to."""
    return folder / "logs" / f"{name.replace(' ', '-')}.log"


def print_to(log: Path, name: str) -> None:
    """From now on, add what this process prints to ``log``, and where it is if it crashes. The first line names it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {name} is process {os.getpid()}", flush=True)


def end_of(log: Path) -> str:
    """Return the last :data:`LINES` lines of a process's log for an error, or why there are none."""
    try:
        with open(log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MOST))
            lines = file.read().decode("utf-8", "replace").splitlines()[-LINES:]
    except OSError as error:
        return f"its log {log} cannot be read ({error.strerror})"
    return "\n".join([f"the end of its log {log}:", *(f"  | {line}" for line in lines)])
