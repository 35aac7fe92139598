"""What the processes of groups leave in the run's folder for people: what they print, and their stacks.

Imports no torch.
"""

import faulthandler
import os
import re
import time
from pathlib import Path

from trl_ext.files.paths import below
from trl_ext.files.stacks import FOLDER

LINES, LONGEST = 20, 300
"""How many lines of a log an error repeats, and how many characters of a line."""
CRASH = "Fatal Python error"
"""How Python begins what it says of a crash.

Where the crash was follows, and then more than :data:`LINES` lines may.
"""
_BEGINS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: .+ is process \d+")
"""The first line of a process. One that takes its place may print to the same file."""
_MOST = 2**16
"""The most bytes at the end of a log that are read for them."""


def log_of(folder: Path, name: str) -> Path:
    """Return the file that the process ``name`` of the run in ``folder`` prints to."""
    return below(folder / "logs", f"{name.replace(' ', '-')}.log")


def write_stacks(folder: Path, name: str, text: str) -> Path:
    """Write what a process that does not answer is doing into the folder of the run, under ``name``.

    Return the file.
    """
    file = below(folder / FOLDER, f"{name.replace(' ', '-')}.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def print_to(log: Path, name: str) -> None:
    """From now on, add what this process prints to ``log``, and where it is if it crashes. The first line names it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2, all_threads=False)
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {name} is process {os.getpid()}", flush=True)


def end_of(log: Path) -> str:
    """Return the last :data:`LINES` lines of a process's log for an error, or the first ones of a crash, or why it
    cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MOST))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return f"its log {log} cannot be read ({error.strerror})"
    lines = lines[max((n for n, line in enumerate(lines) if _BEGINS.fullmatch(line)), default=0) :]
    crashes = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
    chosen = lines[crashes[-1] :][:LINES] if crashes else lines[-LINES:]
    return "\n".join([f"the end of its log {log}:", *(f"  | {line[:LONGEST]}" for line in chosen)])
