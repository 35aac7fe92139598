"""What is left of a driver that was killed is found by its token or by its open files, and killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maporl.integrations.ray.ray_folder import processes_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def test_what_a_driver_leaves_is_found_and_killed(tmp_path):
    """A process with the token, and one with Ray's title, which is written over its environment, and an open log.

    Others live.
    """
    folder = tmp_path / "cluster"
    folder.mkdir()
    sleeps = {"executable": "/bin/sleep", "env": {}}
    with (folder / "log").open("w") as log:
        token = subprocess.Popen(["sleep", "60"], env={"RAY_AUTH_TOKEN_PATH": f"{folder}/token"})
        titled = subprocess.Popen(["ray::DashboardAgent", "60"], stdout=log, **sleeps)
        reader = subprocess.Popen(["tail", "60"], stdout=log, **sleeps)
        elsewhere = subprocess.Popen(["ray::DashboardAgent", "60"], **sleeps)
    try:
        assert sorted(processes_of(str(folder))) == sorted([token.pid, titled.pid])
        command = [sys.executable, "-m", "maporl.integrations.ray.ray_folder", str(folder)]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, env=os.environ)
        assert token.wait() == titled.wait() == -9 and not folder.exists()
        assert reader.poll() is None and elsewhere.poll() is None
    finally:
        for process in (token, titled, reader, elsewhere):
            process.kill()
            process.wait()
