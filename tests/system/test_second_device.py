"""Training on a second device that computes on the CPU, in a process of its own.

Autograd counts devices at a process' first backward pass, so the device must be there before any other test.
"""

import subprocess
import sys

import pytest
from folders import SUPPORT


def run(marked: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, "on_second_device.py"]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0


@pytest.mark.slow
def test_training_on_a_second_device():
    run("not slow")


@pytest.mark.slow
def test_all_recipes_on_a_second_device():
    run("slow")
