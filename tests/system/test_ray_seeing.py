"""Runs on Ray that are stopped, asked what they do, and whose processes fail: what a person at the terminal sees.

Starting Ray and a process that imports torch takes seconds each, so that few runs show many things.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from folders import ROOT
from ray_groups import assert_equal
from tiny_runs import config_of, end_of
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.parse import to_yaml
from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.ray_cluster import Host, _make_safe
from maporl.integrations.ray.section import FailuresSection
from maporl.runs import train as run
from maporl.runs.build import build_trainer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")]
UPDATES = 12


def sections(backend):
    return {"evaluation": {"questions": 8}, "cluster": {"backend": backend}}


class Terminal:
    """``maporl train`` in a process group of its own, as a shell starts it."""

    def __init__(self, folder, config, *options):
        file = folder / "config.yaml"
        file.write_text(to_yaml(config))
        self.said = folder / f"said-{len(list(folder.glob('said-*')))}"
        with self.said.open("w") as said:
            words = [sys.executable, "-m", "maporl", "train", file, *options]
            self.process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True, cwd=ROOT)

    def wait_for(self, metrics, records):
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= records):
            assert self.process.poll() is None, self.said.read_text()
            time.sleep(0.02)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def ended(self, status):
        """Check how it ends, and that nothing of it is left 15 s later. Return what it said."""
        assert self.process.wait(timeout=120) == status, self.said.read_text()
        _, alive = psutil.wait_procs(self.children, timeout=15)
        assert alive == []
        return self.said.read_text()


@pytest.mark.parametrize("part", ["engine", "learner"])
def test_sigterm_saves_a_run_whose_process_hangs(part, tmp_path):
    """A process is stopped, so that it answers nothing. Its deadline is 15 minutes away."""
    folder = tmp_path / "run"
    config, metrics = config_of(folder, UPDATES, sections("ray"), save_steps=0), folder / "metrics.jsonl"
    own = Terminal(tmp_path, config, "-q")
    own.wait_for(metrics, 3)
    log = (folder / f"logs/ann-{part}-0.log").resolve()
    hung = next(p for p in own.children if p.is_running() and log in {Path(file.path) for file in p.open_files()})
    hung.suspend()
    time.sleep(3)  # the run waits for it by now
    updates = len(metrics.read_text().splitlines())
    own.process.terminate()
    said = own.ended(143)
    saved = int(
        re.search(rf"SIGTERM: stopped after update (\d+) of {UPDATES}; saved in {folder}/checkpoint-\1; ", said)[1]
    )
    assert saved in (updates, updates + 1), "an update that was begun is finished"
    assert ("ann learner 0: does not answer within 5 s" in said) == (part == "learner")


def test_ctrl_c_and_sigterm_save_a_run_and_leave_nothing_and_it_ends_as_a_calm_one(tmp_path):
    """Ctrl-C reaches all processes of the terminal, and SIGTERM the driver alone. The third start ends the run."""
    folder = tmp_path / "run"
    config, metrics = config_of(folder, UPDATES, sections("ray")), folder / "metrics.jsonl"
    first = Terminal(tmp_path, config)
    first.wait_for(metrics, 2)
    assert len(first.children) > 8
    dumped = CliRunner().invoke(app, ["dump", str(folder)])
    assert dumped.exit_code == 0, dumped.output
    stacks = Path(dumped.output.strip()).read_text()
    names = [line for line in stacks.splitlines() if line.startswith("== ")]
    assert names[0].startswith(f"== driver, process {first.process.pid} on ")
    assert sorted(names[1:]) == ["== ann engine 0", "== ann learner 0", "== bob engine 0", "== bob learner 0"]
    assert stacks.count("MainThread") == 5 and "no stacks" not in stacks
    os.killpg(first.process.pid, signal.SIGINT)
    said = first.ended(130)
    assert "SIGINT: stopped after update " in said and "saved in" in said and "Traceback" not in said
    for line in ("starting Ray on this machine", "group ann: 1 process that trains: loading a tiny model"):
        assert line in said
    second = Terminal(tmp_path, config, "--resume", "-q")
    second.wait_for(metrics, 6)
    second.process.terminate()
    said = second.ended(143)
    assert " --resume" in said and "SIGTERM: stopped after update " in said
    assert "Traceback" not in said and "loading" not in said
    third = Terminal(tmp_path, config, "--resume", "-q")
    third.wait_for(metrics, UPDATES - 1)
    third.ended(0)
    calm = tmp_path / "calm"
    run.train(config_of(calm, UPDATES, sections("local")), resume=False, quiet=True)
    weights, *_ = end = end_of(folder, UPDATES)
    assert_equal(end, end_of(calm, UPDATES))
    groups = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in groups:
        for name in ("ann", "bob"):
            for part, kinds in (
                ("learner", ("learning", "sending", "saving", "dead")),
                ("engines", ("sampling", "sending", "dead")),
            ):
                seconds = sum(record[f"group/{name}/{part}/{kind}"] for kind in kinds)
                idle, whole = record[f"group/{name}/{part}/idle"], record[f"group/{name}/seconds"]
                assert 0 < idle < 1 and seconds + idle * whole == pytest.approx(whole, rel=0.02)
            assert record[f"group/{name}/tokens_per_second"] > 0
    # weights may arrive after the record of their update, and a run that is stopped has no more records
    for name in ("ann", "bob"):
        size = sum(value.nbytes for value in weights[f"final/{name}/model.safetensors"].values())
        sent = [record[f"group/{name}/sent_bytes"] for record in groups]
        assert all(number % size == 0 for number in sent) and (UPDATES - 3) * size <= sum(sent) <= (UPDATES + 3) * size


def test_what_a_process_raises_and_what_kills_it_is_told_with_the_end_of_its_log(tmp_path):
    config = config_of(
        tmp_path / "run", 3, {**sections("ray"), "cluster": {"backend": "ray", "failures": {"snapshots": False}}}
    )
    trainer = build_trainer(config, quiet=True)
    backend = trainer.home
    try:
        member = backend.learner_groups["ann"].members[0]
        with pytest.raises(KeyError) as raised:
            member.call("weights", "nobody").result(60)
        note = raised.value.__notes__[0]
        assert note.startswith("ann learner 0 raised this; the end of its log ") and "KeyError: 'nobody'" in note
        os.kill(member.pid(), signal.SIGSEGV)
        with pytest.raises(Exception) as died:
            member.call("has_central").result(60)
        assert str(died.value).startswith("ann learner 0: the process has ended or cannot be reached (")
        assert "Segmentation fault" in str(died.value), died.value
    finally:
        backend.end()


class StuckLearner(LearnerProcess):
    """In the first update the second process does not enter the collectives of the group."""

    def update(self, assigned, step):
        once = Path(self.spec.config.output_dir) / "stuck"
        if self.rank == 1 and not once.exists():
            once.touch()
            self.never_enters()
        return super().update(assigned, step)

    def never_enters(self):
        time.sleep(3600)


class StuckHost(Host):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if isinstance(self._part, LearnerProcess):
            self._part.__class__ = StuckLearner


def test_a_process_that_does_not_enter_a_collective_is_named_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    _make_safe()  # before Ray is imported
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.Host", StuckHost)
    groups = {"both": {"policies": ["ann", "bob"], "learner": {"devices": 2}}}
    folder = tmp_path / "run"
    trainer = build_trainer(config_of(folder, 2, {"cluster": {"backend": "ray", "groups": groups}}), quiet=True)
    group = trainer.home.learner_groups["both"]
    group.failures, rebuild = FailuresSection(deadline=20), group._rebuild

    def rebuild_in_peace(error):  # starting processes takes longer than an update
        group.failures = FailuresSection()
        rebuild(error)

    group._rebuild = rebuild_in_peace
    try:
        trainer.train()
    finally:
        trainer.home.end()
    assert "both learner 0, both learner 1: no answer to 'update' after 20 s (cluster.failures.deadline)" in caplog.text
    stacks = (folder / "stacks/both-update-0.txt").read_text()
    first, second = stacks.split("both learner 1\n")
    assert "never_enters" in second and "never_enters" not in first and "in update" in first
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and last["group/both/restarts"] == 1 and (folder / "final").is_dir()
    dead = [json.loads(line)["group/both/learner/dead"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert dead[0] > 0 and dead[1] == 0
