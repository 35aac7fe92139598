"""Run ``maporl`` and end this process with SIGKILL just before it renames PATH.

    python tests/support/killed_at_rename.py PATH loop CONFIG ...

The Python interpreter reports a rename to an audit hook before it happens.
"""

import os
import runpy
import signal
import sys


def main():
    path = sys.argv[1]

    def audit(event, arguments):
        if event == "os.rename" and os.fsdecode(arguments[0]) == path:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    sys.argv = ["maporl", *sys.argv[2:]]
    runpy.run_module("maporl", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
