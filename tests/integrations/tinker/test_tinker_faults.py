"""What a service does wrongly is found before it costs anything, and what it cannot do for a while is waited for."""

import asyncio
import shutil
import signal
import threading
import time

import processes
import pytest
import yaml
from tinker_runs import RANK, base, difference, final_of, on, served, trainer_of, values_of  # noqa: F401  # two are fixtures

from maporl.integrations.tinker.probe import probe
from maporl.integrations.tinker.service import Adapter, Row, Service, ServiceFailure, times
from trl_ext.files.manifest import CheckpointError

VOCABULARY = 16
PROBED = 11
"""The optimizer steps of a probe of the stand-in."""
REFUSED = {
    "sign": "advantages have the wrong sign",
    "shifted": "off by a token",
    "unordered": "before the steps that were asked for earlier",
    "left_over": "weights of an earlier one that was left over",
    "halved": "a step is 0.2",
}


def service_of(stub, seconds=60.0):
    return Service(stub.url, "NO_KEY", 1, seconds)


@pytest.mark.parametrize("wrong", REFUSED)
def test_the_probe_names_a_server_that_cannot_be_trained_with(base, served, wrong):
    stub = served(wrong)
    with pytest.raises(ServiceFailure, match=REFUSED[wrong]):
        probe(service_of(stub), base, VOCABULARY, clips=True)
    assert not [name for name in stub.models if ":train:" in name]  # the throw-away adapters are gone


@pytest.mark.parametrize(
    "wrong, divides, over",
    [((), "sum", "request"), (("mean_tokens",), "tokens", "request"), (("mean_rows",), "rows", "request"),
     (("mean_sequence",), "sequence", "request"), (("mean_sequence", "mean_step"), "sequence and rows", "step")],
)  # fmt: skip
def test_the_probe_measures_by_what_losses_are_divided(base, served, wrong, divides, over):
    service = service_of(served(*wrong))
    (line,) = probe(service, base, VOCABULARY, clips=True)
    facts = service.facts[base]
    assert (facts["divides"], facts["over"]) == (divides, over) and facts["clips"] and facts["gap"] < 1e-5
    assert ("it divides losses by" in line) == bool(wrong)


def test_a_server_that_does_not_clip_is_told(base, served):
    service = service_of(served("no_clip"))
    (line,) = probe(service, base, VOCABULARY, clips=True)
    assert "it ignores grad_clip_norm" in line and service.facts[base]["clips"] is False
    assert "grad_clip_norm" not in probe(service, base, VOCABULARY, clips=False)[0]


@pytest.mark.parametrize("divides, expected", [("sum", 1), ("rows", 3), ("tokens", 20), ("sequence", 5)])
def test_advantages_are_multiplied_by_what_a_server_divides_by(divides, expected):
    assert times(5, divides, rows=3, tokens=20) == expected


def run_of(tmp_path, base, stub, name="run", **options):
    trainer = trainer_of(on(stub, values_of(tmp_path / name, base, **options) | {"updates": 2}))
    trainer.train()
    return final_of(tmp_path / name)


@pytest.fixture
def quick(monkeypatch):
    """The SDK waits for a moment where it would wait for seconds."""
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *more: sleep(min(seconds, 0.05), *more))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["optim_step", "asample", "forward_backward"])
def test_a_busy_server_and_a_lost_session_change_nothing(tmp_path, base, served, quick, route):
    calm = run_of(tmp_path, base, served(), "calm", save_steps=0)
    stub = served()
    answer, stub.busy = stub.answer, 3

    def lossy(path, body, headers):
        if path.endswith(route) and stub.calls.get("save_weights") == 2 and not stub.lost:  # after the first update
            stub.lost |= {name.split(":")[0] for name in stub.models}
        return answer(path, body, headers)

    stub.answer = lossy
    assert difference(run_of(tmp_path, base, stub, "lost", save_steps=0), calm) == 0.0
    assert len(stub.lost) == 1 and stub.calls["create_session"] == 2 and not stub.busy


def test_what_takes_too_long_ends_the_run_and_says_so(base, served):
    stub = served()
    adapter = Adapter(service_of(stub, seconds=0.5), "policy 'ann'", base, RANK, 0)
    rows = [Row([3, 4, 5], 1)]
    assert adapter.logprobs(rows, adapter.forward(rows))[0].shape == (2,)
    stub.silent.add("retrieve_future")
    with pytest.raises(ServiceFailure, match=r"no answer within 0.5 s, asked to read rows for policy 'ann'"):
        adapter.logprobs(rows, adapter.forward(rows))
    stub.silent.clear()


def test_a_run_resumes_from_the_service_and_from_nowhere_else(tmp_path, base, served):
    stub = served()
    values = values_of(tmp_path / "cut", base) | {"updates": 2}
    whole = run_of(tmp_path, base, stub, "cut")
    assert not [name for name in stub.models if ":train:" in name]  # every adapter is unloaded
    for path in ("final", "checkpoint-2"):
        shutil.rmtree(tmp_path / "cut" / path)
    steps = stub.calls["optim_step"]
    trainer_of(on(stub, values)).train(resume_from_checkpoint=True)
    assert difference(final_of(tmp_path / "cut"), whole) == 0.0
    assert stub.calls["optim_step"] - steps == 2 * 4 + PROBED  # four epochs of two policies, and nothing twice
    with pytest.raises(CheckpointError, match=r"its weights are in a service .*, and this run has them in files"):
        trainer_of(values).train(resume_from_checkpoint=True)


def test_a_run_that_began_here_cannot_go_to_a_service(tmp_path, base, served):
    values = values_of(tmp_path / "here", base) | {"updates": 1}
    trainer_of(values).train()
    shutil.rmtree(tmp_path / "here/final")
    with pytest.raises(CheckpointError, match="its weights are in files, and this run has them in a service"):
        trainer_of(on(served(), values)).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, base, served):
    calm = run_of(tmp_path, base, served(), "calm", save_steps=1)
    stub = served()
    values = on(stub, values_of(tmp_path / "killed", base) | {"updates": 2})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    answer, killed = stub.answer, threading.Event()

    def deadly(path, body, headers):
        found = answer(path, body, headers)
        if path.endswith("optim_step") and stub.calls["optim_step"] == PROBED + 8 + 3 and not killed.is_set():
            killed.set()
            process.kill()  # in the second epoch of the second update
        return found

    stub.answer = deadly
    process = processes.start(["-m", "maporl", "train", tmp_path / "run.yaml", "-q"])
    assert process.wait(100) == -signal.SIGKILL and killed.is_set()
    assert not (tmp_path / "killed/final").exists() and (tmp_path / "killed/checkpoint-1").is_dir()
    before = stub.calls["optim_step"]
    trainer_of(values).train(resume_from_checkpoint=True)
    assert difference(final_of(tmp_path / "killed"), calm) == 0.0
    assert stub.calls["optim_step"] - before == PROBED + 8  # the update that was cut, and no other


@pytest.mark.slow
def test_a_signal_saves_the_run_and_unloads_its_adapters(tmp_path, base, served):
    stub = served()
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(on(stub, values_of(tmp_path / "run", base, save_steps=0) | {"updates": 50}))
    )
    process = processes.start(["-m", "maporl", "train", tmp_path / "run.yaml", "-q"])
    deadline = time.monotonic() + 100
    while stub.calls.get("save_weights", 0) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert (checkpoint / "policies/ann/tinker.json").is_file()
    assert not [name for name in stub.models if ":train:" in name] and stub.calls["unload_model"] == 4
