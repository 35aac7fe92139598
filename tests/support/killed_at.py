"""Processes that end with SIGKILL: those of a run on Ray while it trains, and ``maporl`` itself.

As a program this runs ``maporl``, and ends it just before its N-th change to a folder, or before a file is renamed::

    python tests/support/killed_at.py N FOLDER train CONFIG ...
    python tests/support/killed_at.py rename PATH loop CONFIG ...

A change is the opening of a file for writing, or a new name, or the removal of one. The Python interpreter reports each
of them to an audit hook before it happens.
"""

import os
import runpy
import signal
import sys
import threading
import time
from contextlib import contextmanager

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


def main():
    number, folder = sys.argv[1], os.path.abspath(sys.argv[2])
    path_given = sys.argv[2]
    seen = 0

    def audit(event, arguments):
        nonlocal seen
        if number == "rename":
            if event == "os.rename" and os.fsdecode(arguments[0]) == path_given:
                os.kill(os.getpid(), signal.SIGKILL)
            return
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str | bytes) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        if not os.path.abspath(os.fsdecode(path)).startswith(folder):
            return
        seen += 1
        if seen == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    sys.argv = ["maporl", *sys.argv[3:]]
    runpy.run_module("maporl", run_name="__main__", alter_sys=True)


@contextmanager
def killed_after(trainer, updates, *pids):
    """Kill processes in the background, as soon as the trainer has made so many updates in the block."""

    def kill():
        while trainer.state.global_step < updates:
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    killer.join()


if __name__ == "__main__":
    main()
