"""The parts of ``benchmarks/gpu_acceptance.py``, run here and spoilt on purpose."""

import json
import sys

import gpu_acceptance
import pytest

from trl_ext.ppo import maths

SPEEDS = {
    "logprobs.times_of_bandwidth", "speed.rollout_tokens_s", "speed.update_mfu", "trees.times_as_fast_as_rows",
}  # fmt: skip


CHECKS = {
    "losses.logprobs", "losses.metrics", "losses.weights", "sampling.rows", "sampling.engine_gap", "dropped_rows.kept",
    "resume.distance", "masters.movement", "logprobs.exact", "adapters.rows", "trees.logprobs", "two_agents.ann",
    "two_agents.bob", "two_agents.base",
}  # fmt: skip


"""What is checked on every device. The rest is speed, and vLLM."""


def assert_all_passed(result):
    """A device passed everything but vLLM, whose speed is not judged."""
    assert result["failed"] == {}
    assert set(result["passed"]) == CHECKS
    not_compared = {"trl"} if "trl" in result["skipped"] else {"trl.times_as_fast"}  # an older TRL may be installed
    assert set(result["skipped"]) == SPEEDS | {"vllm"} | not_compared


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
