"""``benchmarks/gpu_acceptance.py``: what a CPU can run of it passes, and each check fails where its subject is
broken."""

import json
import os
import subprocess
import sys

import pytest
import torch
from folders import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # last, because benchmarks/reward_server.py has the name of a package
import gpu_acceptance

from trl_ext.learning import learner
from trl_ext.ppo import maths, prefix_tree
from trl_ext.sampling import sample as sampling
from trl_ext.sharding import master_weights

SPEEDS = {
    "logprobs.times_of_bandwidth", "speed.rollout_tokens_s", "speed.times_of_bare",
    "trees.times_as_fast_as_rows", "recorded.times_as_fast",
}  # fmt: skip


CHECKS = {
    "losses.logprobs", "losses.metrics", "losses.weights", "sampling.rows", "sampling.engine_gap", "dropped_rows.kept",
    "resume.distance", "masters.movement", "logprobs.exact", "adapters.rows", "trees.logprobs", "two_agents.ann",
    "two_agents.bob", "two_agents.base", "recorded.rows", "team.ann.engine_gap", "team.bob.engine_gap",
}  # fmt: skip
"""What is checked on every device. The rest is speed, and vLLM."""


def assert_all_passed(result):
    """A device passed everything but vLLM, whose speed is not judged."""
    assert result["failed"] == {}
    assert set(result["passed"]) == CHECKS
    not_compared = {"trl"} if "trl" in result["skipped"] else {"trl.times_as_fast"}  # an older TRL may be installed
    assert set(result["skipped"]) - {"liger"} == SPEEDS | {"vllm"} | not_compared


def run_parts(monkeypatch, capsys, *parts, more=("--cpu",)):
    """Run the command in this process. Return its exit status, its JSON and its errors."""
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--small", *more, "--only", *parts])
    with pytest.raises(SystemExit) as exit_:
        gpu_acceptance.main()
    said = capsys.readouterr()
    assert said.out, said.err[-3000:]
    return int(exit_.value.code), json.loads(said.out.strip().splitlines()[-1]), said.err


def spoil_logprobs(monkeypatch):
    right = maths.token_logprobs
    monkeypatch.setattr(maths, "token_logprobs", lambda *a, **k: right(*a, **k) + 0.02)


@pytest.mark.slow
def test_the_cpu_passes_every_part_that_it_can_run(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/gpu_acceptance.py", "--cpu", "--small", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    assert_all_passed(result)
    assert set(result["seconds"]) | set(result["skipped"]) >= set(gpu_acceptance.PARTS)
    assert result["figures"]["speed.seconds"]["update"] > 0
    assert result["figures"]["ceilings.tflops"] > 0 and result["figures"]["recorded.tokens_s"]["recorded"] > 0
    assert result["versions"]["torch"] == torch.__version__


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def spoil_float32(monkeypatch):
    right = learner.read_actions

    def rounded(model, *arguments, **options):
        found = right(model, *arguments, **options)
        if model.dtype == torch.float64:
            return found
        return (found[0], found[1] * 1.01, *found[2:])

    monkeypatch.setattr(learner, "read_actions", rounded)


def spoil_masters(monkeypatch):
    monkeypatch.setattr(master_weights, "HALF_PRECISION", ())


def spoil_sampling(monkeypatch):
    right = sampling._batches

    def other_numbers(rows, *limits):
        for batch in right(rows, *limits):
            if len(batch) > 1:
                for row in batch:
                    row.uniforms = row.uniforms.flip(0)
            yield batch

    monkeypatch.setattr(sampling, "_batches", other_numbers)


def spoil_dropped_rows(monkeypatch):
    right = gpu_acceptance.GlobalBatch.take
    monkeypatch.setattr(gpu_acceptance.GlobalBatch, "take", lambda self, index: right(self, index.flip(0)))


def spoil_resume(monkeypatch):
    right = gpu_acceptance.PPOv2Trainer.restore_state

    def other_weights(self, state):
        right(self, state)
        with torch.no_grad():
            for parameter in self.learners["policy"].model.parameters():
                parameter.add_(1e-3)

    monkeypatch.setattr(gpu_acceptance.PPOv2Trainer, "restore_state", other_weights)


def spoil_adapters(monkeypatch):
    right = gpu_acceptance.sample

    def one_adapter(*arguments, adapters=None, **options):
        return right(*arguments, adapters=adapters and dict.fromkeys(adapters, "x"), **options)

    monkeypatch.setattr(gpu_acceptance, "sample", one_adapter)


def spoil_trees(monkeypatch):
    right = prefix_tree.Layout.seen
    monkeypatch.setattr(prefix_tree.Layout, "seen", lambda self, device: torch.ones_like(right(self, device)).tril())


def spoil_two_agents(monkeypatch):
    right = learner.Learner.step

    def second_stands_still(self):
        return 0.0 if self.name == "bob" else right(self)

    monkeypatch.setattr(learner.Learner, "step", second_stands_still)


@pytest.mark.parametrize(("part", "name", "spoil"), [
    ("losses", "losses.logprobs", spoil_float32),
    ("logprobs", "logprobs.exact", spoil_logprobs),
    ("masters", "masters.movement", spoil_masters),
    ("sampling", "sampling.rows", spoil_sampling),
    ("dropped_rows", "dropped_rows.kept", spoil_dropped_rows),
    pytest.param("resume", "resume.distance", spoil_resume, marks=pytest.mark.slow),
    pytest.param("adapters", "adapters.rows", spoil_adapters, marks=pytest.mark.slow),
    pytest.param("trees", "trees.logprobs", spoil_trees, marks=pytest.mark.slow),
    pytest.param("two_agents", "two_agents.bob", spoil_two_agents, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_is_broken_is_named(part, name, spoil, monkeypatch, capsys):
    spoil(monkeypatch)
    status, result, said = run_parts(monkeypatch, capsys, part)
    assert status == 1
    assert name in result["failed"]
    assert "expected" in result["failed"][name]
    assert f"FAILED {name}: " in said


def test_a_part_that_raises_is_a_failed_check_and_the_others_run(monkeypatch, capsys):
    def broken(run):
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setitem(gpu_acceptance.PARTS, "losses", broken)
    status, result, said = run_parts(monkeypatch, capsys, "losses", "logprobs")
    assert status == 1
    assert result["failed"] == {"losses": "RuntimeError: device-side assert triggered"}
    assert result["passed"] == ["logprobs.exact"]
    assert "FAILED losses: RuntimeError: device-side assert triggered" in said


def test_a_part_for_which_no_time_is_left_has_not_passed(monkeypatch, capsys):
    status, result, _ = run_parts(monkeypatch, capsys, "logprobs", more=("--cpu", "--limit", "-1"))
    assert status == 1
    assert result["failed"] == {"logprobs": "did not begin within --limit -1 seconds"}
    assert result["skipped"]["losses"] == "not among --only"


def test_a_slow_accelerator_fails(monkeypatch):
    run = gpu_acceptance.Run(gpu_acceptance.argparse.Namespace(cpu=True, small=True, limit=0))
    run.cpu = run.small = False  # as on an accelerator
    run.speed("speed.update_mfu", 0.1, False, "above 0.35")
    assert run.failed == {"speed.update_mfu": "0.1, expected above 0.35"}
    run.check("not a number", float("nan"), float("nan") < 1, "under 1")
    assert run.failed["not a number"] == "nan, expected under 1"
