"""Process groups that end with a killed process, and those that were forgotten."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLED = """
import os, signal, subprocess
from maporl.serving.group_watchdog import forget, watch
children = [subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True, stdout=-3, stderr=-3) for _ in range(3)]
for child in children:
    watch(child.pid)
forget(children[2].pid)
print(*[child.pid for child in children], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def running(group):
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        found += [stat.parent.name] if int(number) == group and state != "Z" else []
    return found


def test_groups_end_with_a_process_that_is_killed_and_one_that_was_forgotten_goes_on():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    *ended, forgotten = map(int, done.stdout.split())
    deadline = time.monotonic() + 10
    while any(map(running, ended)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [running(group) for group in ended] == [[], []] and len(running(forgotten)) == 2
    os.killpg(forgotten, signal.SIGKILL)
