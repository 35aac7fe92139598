"""On Ray: processes that share a device in turns, and twenty kills in one run."""

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from ray_groups import assert_equal
from tiny_runs import config_of, end_of
from transformers import TrainerCallback

from maporl.integrations.ray import ray_cluster
from maporl.runs import train as run
from maporl.runs.build import build_trainer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")]
EVALUATION = {"evaluation": {"questions": 8}}


class ClockedHost(ray_cluster.Host):
    """A process of a group that writes a line for each call into the folder ``calls`` of the run: the process, the
    method, the beginning and the end."""

    def __init__(self, part, spec, *rest):
        super().__init__(part, spec, *rest)
        self._calls = Path(spec.config.output_dir) / "calls"
        self._calls.mkdir(exist_ok=True)

    def call(self, method, *arguments):
        begin = time.monotonic()  # one clock for all processes of a machine
        found = super().call(method, *arguments)
        with (self._calls / str(os.getpid())).open("a") as file:
            file.write(f"{os.getpid()} {method} {begin} {time.monotonic()}\n")
        return found


def by_value(host):
    """The class, which Ray sends to processes that cannot import it."""
    ray_cluster._make_safe()
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[host.__module__])
    return host


def test_groups_in_turns_end_as_others_and_no_two_processes_of_a_device_work_at_once(tmp_path, monkeypatch):
    """Four processes of two groups on one device.

    Two of them on a device each do work at once, so the watching works.
    """
    monkeypatch.setattr(ray_cluster, "Host", by_value(ClockedHost))
    ends, clashes = [], []
    for sharing, places in (("apart", 4), ("turns", 1)):
        folder = tmp_path / sharing
        groups = {name: {"policies": [name], "sharing": sharing} for name in ("ann", "bob")}
        section = {"backend": "ray", "devices": {"cpu": places}, "groups": groups}
        run.train(config_of(folder, 3, EVALUATION | {"cluster": section}), resume=False, quiet=True)
        ends.append(end_of(folder, 3))
        lines = [line.split() for file in (folder / "calls").iterdir() for line in file.read_text().splitlines()]
        calls = sorted((float(begin), float(end), pid, method) for pid, method, begin, end in lines)
        assert {pid for _, _, pid, _ in calls} == {file.name for file in (folder / "calls").iterdir()}
        assert len(calls) > 60 and len({pid for _, _, pid, _ in calls}) == 4
        clashes.append([(one, other) for one, other in itertools.pairwise(calls) if other[0] < one[1]])
    assert clashes[0] and clashes[1] == []
    assert_equal(*ends)


def without_engines(records):
    """The metrics without those of the log-probabilities that engines record: a new engine reads a conversation whole,
    which rounds otherwise."""
    return [{key: value for key, value in record.items() if "/policy/engine_" not in key} for record in records]


def rounded(dialogues):
    """The dialogues, with log-probabilities to five digits."""
    lines = [json.loads(line) for line in dialogues.splitlines()]
    for line in lines:
        for own in line["utterances"]:
            own["logprobs"] = [round(value, 5) for value in own["logprobs"]]
    return lines


KILLS, UPDATES = 20, 14


def test_twenty_kills_at_random_moments_leave_the_weights_of_a_calm_run(tmp_path):
    """SIGKILL of engines and of processes that train, perhaps while others are replaced.

    The last two updates wait for the last kill.
    """
    calm, folder = tmp_path / "calm", tmp_path / "run"
    run.train(config_of(calm, UPDATES, EVALUATION), resume=False, quiet=True)
    failures = {"engine_replacements": 60, "group_restarts": 60}
    section = {"backend": "ray", "failures": failures}  # with two engines, rounding depends on which of them are alive
    trainer = build_trainer(config_of(folder, UPDATES, EVALUATION | {"cluster": section}), quiet=True)
    backend, rng, killed, ended = trainer.home, random.Random(7), [], threading.Event()
    children = psutil.Process().children(recursive=True)

    def kill():
        for number in range(KILLS):
            while trainer.state.global_step < number // 2 and not ended.is_set():
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 1.5))
            pid = None
            while pid is None and not ended.is_set():
                found = [own for pool in backend.pools.values() for own in list(pool._members)]
                found += [own for group in backend.learner_groups.values() for own in list(group.members)] * 2
                member = rng.choice(found)
                try:
                    pid = member.pid()
                except backend.cluster.ray.exceptions.RayError:
                    continue  # it has just died
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(member.name)

    killer = threading.Thread(target=kill)

    class Waits(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == UPDATES - 2:
                killer.join()

    trainer.add_callback(Waits())
    killer.start()
    try:
        trainer.train()
        replaced, restarts = (
            [own.replaced for own in backend.pools.values()],
            [own.restarts for own in backend.learner_groups.values()],
        )
        children += psutil.Process().children(recursive=True)
    finally:
        ended.set()
        killer.join()
        backend.end()
    print("killed:", ", ".join(killed), "| replaced:", replaced, "| restarts:", restarts)
    assert len(killed) == KILLS and len({name.split()[1] for name in killed}) == 2
    assert sum(restarts) >= sum("learner" in name for name in killed) - 2
    (weights, records, spoken), (expected, others, calmly) = end_of(folder, UPDATES), end_of(calm, UPDATES)
    assert_equal((weights, without_engines(records), ""), (expected, without_engines(others), ""))
    assert rounded(spoken) == rounded(calmly)
    gaps = [
        [own[f"{name}/policy/engine_gap"] for own in (one, other)]
        for one, other in zip(records, others, strict=True)
        for name in ("ann", "bob")
    ]
    assert gaps and all(one == pytest.approx(other, abs=1e-6) for one, other in gaps)
    _, left = psutil.wait_procs(children, timeout=15)
    running = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert all("maporl.integrations.ray.ray_folder" in process.cmdline() for process in running)
