"""``maporl dump``: what all threads and processes of a running run do."""

import json
import os
import threading
import time
from pathlib import Path

import processes
import pytest
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.runs.dump import dump
from trl_ext.files import stacks
from trl_ext.files.lock import OWNER, RunLock

SLEEPER = """
import sys, time
from pathlib import Path
from trl_ext.files.lock import RunLock

def asleep():
    Path(sys.argv[1], "ready").touch()
    time.sleep(600)

with RunLock(Path(sys.argv[1])):
    asleep()
"""


def asked(folder):
    done = CliRunner().invoke(app, ["dump", str(folder)])
    return done.exit_code, done.output.strip()


def test_the_threads_of_a_run_are_written_and_it_goes_on(tmp_path):
    script, folder = tmp_path / "sleeper.py", tmp_path / "run"
    script.write_text(SLEEPER)
    process = processes.start([script, folder])
    while not (folder / "ready").exists():
        assert process.poll() is None, process.output()[1]
        time.sleep(0.01)
    status, line = asked(folder)
    file = Path(line)
    assert status == 0 and file.parent == folder / "stacks"
    text = file.read_text()
    assert text.startswith(f"== driver, process {process.pid} on ") and "MainThread" in text and "in asleep" in text
    assert process.poll() is None
    pipe = json.loads((folder / OWNER).read_text())["stacks"]
    assert os.stat(pipe).st_mode & 0o777 == 0o600
    process.kill()
    status, line = asked(folder)
    assert status == 1 and line.startswith(f"error: {folder}: its run does not go on: process {process.pid} on ")
    again = f"maporl train {folder / 'config.yaml'} --resume"
    assert line.endswith(f"was killed; resume it with: {again}") and "\n" not in line


class Worker:
    def __init__(self, name):
        self.name = name

    def stacks(self):
        return f"what {self.name} does"


def test_the_processes_that_work_for_a_run_are_asked_too(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "WORKERS", [lambda: [Worker("ann learner 0"), Worker("bob engine 1")]])
    threads = threading.active_count()
    with RunLock(tmp_path):
        pipe = Path(json.loads((tmp_path / OWNER).read_text())["stacks"])
        text = dump(tmp_path).read_text()
        assert dump(tmp_path).exists(), "it can be asked again"
    assert text.endswith("== ann learner 0\n\nwhat ann learner 0 does\n\n== bob engine 1\n\nwhat bob engine 1 does\n")
    assert not pipe.parent.exists() and threading.active_count() == threads, "nothing is left of it"


def test_a_run_that_cannot_be_asked_is_told_in_one_line(tmp_path):
    assert asked(tmp_path / "none") == (1, f"error: {tmp_path / 'none'}: no such folder; give a run's output_dir")
    assert asked(tmp_path) == (
        1, f"error: {tmp_path}: nothing runs here; give the output_dir of a run that has not ended"
    )  # fmt: skip
    owner = {"pid": 7, "host": "elsewhere", "since": "2026-11-25 10:00:00", "stacks": "/nowhere"}
    (tmp_path / OWNER).write_text(json.dumps(owner))
    status, line = asked(tmp_path)
    assert (
        status == 1 and "its run is process 7 on elsewhere (since 2026-11-25 10:00:00); run maporl dump there" in line
    )


def owner_with(folder, **changed):
    known = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps({**known, **changed}))


def test_what_is_not_the_pipe_of_a_run_is_not_written_to(tmp_path):
    other = tmp_path / "file"
    other.write_text("mine")
    with RunLock(tmp_path):
        owner_with(tmp_path, stacks=str(other))
        status, line = asked(tmp_path)
    assert (
        status == 1 and line.endswith("is not a pipe; the file .lock-owner is damaged") and other.read_text() == "mine"
    )


def test_a_run_that_does_not_answer_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.Listener, "_write", lambda self, name: None)
    with RunLock(tmp_path), pytest.raises(Exception, match=r"has not answered within 0\.1 s; .*py-spy dump --native"):
        dump(tmp_path, patience=0.1)
