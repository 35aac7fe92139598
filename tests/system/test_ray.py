"""Runs with ``cluster.backend: ray``: equal to local ones, although processes are killed; on loopback and behind a
token.

Starting Ray and a process that imports torch takes seconds each, so that few runs show many things.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from folders import ROOT, blocks
from killed_at import killed_after
from ray_groups import assert_equal
from safetensors.torch import load_file
from tiny_runs import config_of, end_of, start

from maporl.runs import train as run
from maporl.runs.build import build_trainer

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")


def sections(backend="ray", **cluster):
    return {"evaluation": {"questions": 8}, "cluster": {"backend": backend, **cluster} if backend == "ray" else {}}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What a run of three updates leaves without Ray."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run.train(config_of(folder, 3, sections("local")), resume=False, quiet=True)
    return end_of(folder, 3)


def listening(pids):
    """The addresses at which processes listen, as ``ss`` tells them."""
    shown = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    return [line.split()[3] for line in shown if any(f"pid={pid}," in line for pid in pids)]


@pytest.mark.slow
def test_a_run_on_ray_equals_a_local_one_to_the_bit_although_its_processes_are_killed(local, tmp_path, monkeypatch):
    """SIGKILL of an engine and of a process that trains, after the first update. Then nothing is left running."""
    psutil = pytest.importorskip("psutil")
    folder = tmp_path / "run"
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    monkeypatch.setenv("HF_TOKEN", "a token")
    trainer = build_trainer(config_of(folder, 3, sections()), quiet=True)
    backend = trainer.home
    try:
        children = psutil.Process().children(recursive=True)
        addresses = listening([os.getpid(), *(child.pid for child in children)])
        assert addresses and all(re.match(r"(127\.0\.0\.1|\[::1\]|\[::ffff:127\.0\.0\.1\]):", a) for a in addresses)
        refused = subprocess.run(
            [os.sys.executable, "-c", "import os, ray; ray.init(address=os.environ['RAY_ADDRESS_OF_TEST'])"],
            env={**os.environ, "RAY_ADDRESS_OF_TEST": backend.cluster.ray.get_runtime_context().gcs_address,
                 "RAY_AUTH_TOKEN_PATH": "/nowhere", "RAY_AUTH_MODE": "disabled"},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert refused.returncode != 0 and "token" in refused.stderr.lower()
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        # Ray has opened the folder in between to all users, and the other client did so again
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (token.parents[1], token)]
        assert modes == [0o700, 0o600]
        assert os.environ["OPENAI_API_KEY"] == "a key", "this process has it again"
        told = [child.environ() for child in children if child.is_running() and child.environ()]
        assert len(told) > 4 and not [own for own in told if own.keys() & {"OPENAI_API_KEY", "HF_TOKEN"}]
        victims = [next(iter(backend.pools["ann"]._members)), backend.learner_groups["bob"].members[0]]
        pids = [member.pid() for member in victims]
        assert [psutil.Process(pid).nice() for pid in pids] == [psutil.Process().nice()] * 2

        with killed_after(trainer, 1, *pids):
            trainer.train()
        assert backend.pools["ann"].replaced == 1 and backend.learner_groups["bob"].restarts == 1
    finally:
        backend.end()
    assert_equal(end_of(folder, 3), local)
    _, alive = psutil.wait_procs(children, timeout=15)
    assert all("maporl.integrations.ray.ray_folder" in process.cmdline() for process in alive), (
        "it waits for this process's own end"
    )
    names = sorted(path.name for path in (folder / "logs").iterdir())
    assert names[:2] == ["ann-engine-0.log", "ann-engine-1.log"] and "bob-learner-0.log" in names


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "replicated", "zero2", "zero3"])
def test_groups_of_two_processes_end_with_the_weights_of_one(strategy, tmp_path):
    """Both groups under a strategy of their own, in flow; the checkpoint goes on without Ray."""
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    folder = tmp_path / "run"
    two = {"devices": 2, "strategy": strategy}
    groups = {"a": {"policies": ["ann"], "learner": two}, "b": {"policies": ["bob"], "learner": two}}
    rate = {"learning_rate": 1e-3}  # Adam divides by gradients that differ by rounding
    options = {"use_cpu": not strategy.startswith("zero"), "async_save": True, **rate}
    run.train(config_of(tmp_path / "one", 3, sections("local"), **rate), resume=False, quiet=True)
    alone = end_of(tmp_path / "one", 3)[0]
    run.train(config_of(folder, 3, sections(groups=groups, batching="flow"), **options), resume=False, quiet=True)
    weights, records, _ = end_of(folder, 3)
    for name, tensors in alone.items():
        if name.startswith("final"):
            assert all(float((weights[name][key] - v).abs().max()) < 1e-5 for key, v in tensors.items()), name
    assert [record["step"] for record in records] == [1, 2, 3]
    resumed = config_of(tmp_path / "local", 3, sections("local"), save_steps=0, **rate)
    trainer = build_trainer(resumed, quiet=True)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    for name in ("ann", "bob"):
        end, expected = (
            load_file(path / "final" / name / "model.safetensors") for path in (tmp_path / "local", folder)
        )
        assert all(float((end[key] - v).abs().max()) < 1e-5 for key, v in expected.items())
    lines = [json.loads(line) for line in (tmp_path / "local/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3]


@pytest.mark.slow
def test_dialogues_are_played_ahead_and_the_run_goes_on_from_a_checkpoint(tmp_path):
    """Three batches in progress over ten updates; an engine is killed, and the run is resumed after eight."""
    options = {"async_depth": 2, "per_device_train_batch_size": 8}
    extra = {"ppo": {"response_length": 3, "engine_tis_cap": 2.0}, "dialogues_logged": 8}
    config = config_of(tmp_path / "run", 10, {**sections(batching="flow"), **extra}, **options)
    trainer = build_trainer(config, quiet=True)
    engine = next(iter(trainer.home.pools["ann"]._members))
    try:
        with killed_after(trainer, 3, engine.pid()):
            trainer.train()
    finally:
        trainer.home.end()
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    told = [record for record in told if "ann/policy/staleness" in record]
    assert [record["step"] for record in told] == list(range(1, 11))
    assert all(record[f"{name}/policy/staleness_max"] <= 2 for record in told for name in ("ann", "bob"))
    assert max(record["ann/policy/staleness_max"] for record in told) == 2
    assert max(record["async/across_updates"] for record in told) > 0, "dialogues go on over an update"
    dialogues = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    calm = config_of(tmp_path / "calm", 10, {**sections("local"), **extra}, **{**options, "async_depth": 0})
    run.train(calm, resume=False, quiet=True)
    asked = [json.loads(line)["example"]["id"] for line in (tmp_path / "calm/dialogues.jsonl").read_text().splitlines()]
    assert [dialogue["example"]["id"] for dialogue in dialogues] == asked, "the questions of every run, in its order"
    shutil.rmtree(tmp_path / "run/final")
    shutil.rmtree(tmp_path / "run/checkpoint-10")
    run.train(config, resume=True, quiet=True)
    lines = (tmp_path / "run/dialogues.jsonl").read_text().splitlines()
    assert [json.loads(line)["example"]["id"] for line in lines] == asked


@pytest.mark.slow
def test_a_central_critic_of_a_group_is_saved_and_goes_on(tmp_path):
    options = {"critic": "central", "save_total_limit": 3}
    calm, folder = tmp_path / "calm", tmp_path / "run"
    run.train(config_of(calm, 2, sections("local"), **options), resume=False, quiet=True)
    config = config_of(folder, 2, sections(), **options)
    run.train(config, resume=False, quiet=True)
    assert_equal(end_of(folder, 2), end_of(calm, 2))
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoint-2")
    run.train(config, resume=True, quiet=True)
    critics = [
        load_file(path / "checkpoint-2/others/central_critic/model/model.safetensors") for path in (folder, calm)
    ]
    assert all(value.equal(critics[1][name]) for name, value in critics[0].items())
    assert_equal(end_of(folder, 2), end_of(calm, 2))


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing_running_and_its_run_goes_on(local, tmp_path):
    psutil = pytest.importorskip("psutil")
    folder = tmp_path / "run"
    config = config_of(folder, 3, sections())
    process = start(tmp_path, config)
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert process.poll() is None, process.output()[1]
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 5
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    resumed = start(tmp_path, config, "--resume")
    assert resumed.wait(timeout=200) == 0, resumed.output()[1]
    assert_equal(end_of(folder, 3), local)


@pytest.mark.slow
def test_the_code_of_the_page_runs_on_ray_and_leaves_no_process(tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(ROOT / "docs/cluster.md", "python"))
    names = {"__name__": "__page__"}
    before = set(psutil.Process().children(recursive=True))  # of tests before this one
    exec(compile(code, "cluster.md", "exec"), names)
    begun = set(psutil.Process().children(recursive=True)) - before
    left = [process for process in begun if "maporl.integrations.ray.ray_folder" not in str(process.cmdline())]
    assert not psutil.wait_procs(left, timeout=15)[1]
    trained = load_file("runs/groups/final/ann/model.safetensors")
    assert all(
        value.equal(trained[name])
        for name, value in names["team"].policies["ann"].model.state_dict().items()
        if name in trained
    )
