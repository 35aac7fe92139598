"""Programs in runs of several processes. Each process has a server of its own; on Ray programs run in the driver's."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import processes
import pytest
import torch
from asked_programs import ask, assistant, user
from folders import ROOT, SUPPORT
from launches import ranks_of
from tiny_runs import config_of, end_of

from maporl.config.parse import to_yaml
from maporl.runs import train as run

pytestmark = pytest.mark.slow
UPDATES = 3


def talk(question, base_url):
    """Bob is shown what ann says, and ann what he says to it."""
    anns = [user(question)]
    anns.append(assistant(ask(base_url, "ann", anns)))
    heard = ask(base_url, "bob", [user(f"{anns[-1]['content']};{question}")])
    return ask(base_url, "ann", [*anns, user(heard)])


def fails_in_one(question, base_url):
    """The second process has a question with which the program cannot do anything."""
    if os.environ["RANK"] == "1":
        raise ValueError("no such city")
    return talk(question, base_url)


def config(folder, program=talk, sections=None, **training):
    protocol = {"name": "program", "run": f"test_program_processes:{program.__name__}", "on_failure": "stop"}
    sections = {"protocol": protocol, "evaluation": {"questions": 7}, **(sections or {})}
    return config_of(folder, UPDATES, sections, **training)


def two_processes(folder, program):
    """The processes of a run in two of them, half of a batch each."""
    file = folder / "config.yaml"
    file.write_text(to_yaml(config(folder / "run", program, per_device_train_batch_size=8)))
    places = os.pathsep.join(map(str, (ROOT, SUPPORT, Path(__file__).parent)))
    return ranks_of(["-m", "maporl", "train", file, "-q"], 2, {"PYTHONPATH": places})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process without Ray leaves."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run.train(config(folder), resume=False, quiet=True)
    return end_of(folder, UPDATES)


def assert_close(end, other):
    """The same words, and weights and metrics but for rounding, which depends on the batches, and these on time."""
    (weights, records, dialogues), (expected, calm, spoken) = end, other
    said, once = ([json.loads(line)["utterances"] for line in part.splitlines()] for part in (dialogues, spoken))
    assert [[u["response_ids"] for u in d] for d in said] == [[u["response_ids"] for u in d] for d in once]
    assert len(said) == 4 * UPDATES and {len(d) for d in said} == {3}
    assert weights.keys() == expected.keys()
    for name, tensors in expected.items():
        for key, value in tensors.items():
            torch.testing.assert_close(weights[name][key], value, atol=1e-4, rtol=0)
    for key in ("ann/objective/scores", "ann/grad_norm", "ann/continued_share", "program/failed", "accuracy/turn_1"):
        found, wanted = ([record[key] for record in part if key in record] for part in (records, calm))
        assert found and found == pytest.approx(wanted, abs=2e-4), key


def test_two_processes_end_with_the_weights_of_one(alone, tmp_path):
    ended = processes.end_of(two_processes(tmp_path, talk), 200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_close(end_of(tmp_path / "run", UPDATES), alone)


def test_a_program_that_fails_in_one_process_ends_both(tmp_path):
    first, second = two_processes(tmp_path, fails_in_one)
    assert second.wait(200) == 2 and first.wait(60) != 0
    assert "ValueError: no such city" in second.output()[1] and "protocol.on_failure" in second.output()[1]


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")
def test_on_ray_programs_run_where_the_driver_is(alone, tmp_path):
    run.train(config(tmp_path / "run", sections={"cluster": {"backend": "ray"}}), resume=False, quiet=True)
    assert_close(end_of(tmp_path / "run", UPDATES), alone)
