"""benchmarks/gpu_acceptance.py on the CPU: every part that can run here does, and a fault is found and named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = str(ROOT / "benchmarks" / "gpu_acceptance.py")
HERE = {
    "losses": {"logprobs", "metrics", "weights"},
    "sampling": {"same_alone_and_in_a_batch", "engine_gap_bfloat16"},
    "dropped_rows": {"rows", "their_tokens"},
    "resume": {"distance"},
    "masters": {"movement", "rounded_copy"},
    "ceilings": set(),
    "logprobs": {"times_the_bandwidth"},
    "speed": {"rollout_tokens_per_second", "update_mfu"},
    "trees": {"logprobs", "times_as_fast"},
    "adapters": {"same_alone_and_mixed"},
    "team": {"metrics_not_finite", "adapters_that_stood_still", "policies_saved"},
}
OF_SPEED = {"times_the_bandwidth", "rollout_tokens_per_second", "update_mfu", "times_as_fast"}


def run(*words):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words, "--cpu", "--small"], capture_output=True, text=True, env=environment)


def test_every_part_that_needs_no_accelerator_passes():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["failed"] == [] and found["device"] == "cpu" and found["small"] is True
    assert set(found["skipped"]) >= {"trl"} and set(found["parts"]) | set(found["skipped"]) == {*HERE, "vllm", "trl"}
    for name, wanted in HERE.items():
        checks = found["parts"][name]["checks"]
        assert set(checks) == wanted
        for check, result in checks.items():
            assert result["passed"] is (None if check in OF_SPEED else True), (name, check, result)
    assert found["parts"]["masters"]["checks"]["movement"]["value"] == pytest.approx(1.0, abs=0.05)
    assert found["parts"]["ceilings"]["figures"]["matmul_tflops"] > 0


def test_a_fault_is_named_and_ends_with_status_1_and_the_other_parts_go_on():
    faults = (
        "import runpy, sys\n"
        "import trl_ext.token_batch as t, trl_ext.mixed_adapters as m\n"
        "take = t.TokenBatch.take\n"
        "t.TokenBatch.take = lambda self, index: take(self, index.sort().values)\n"  # rows lose their order
        "m._Rows.choose = lambda self, adapters: setattr(self, 'chosen', [0] * len(adapters))\n"  # all have one adapter
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run("-c", faults, PROGRAM, "--only", "dropped_rows", "ceilings", "adapters", "vllm")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["failed"] == ["dropped_rows.rows", "dropped_rows.their_tokens", "adapters.same_alone_and_mixed"]
    assert found["parts"]["ceilings"]["figures"]["matmul_tflops"] > 0 and "vllm" in found["skipped"]


def test_an_error_is_a_failed_check_with_its_words():
    fault = (
        "import runpy, sys\n"
        "import trl_ext.prefix_tree as p\n"
        "def broken(*rows):\n    raise RuntimeError('device-side assert')\n"
        "p.PrefixTree.of = broken\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = run("-c", fault, PROGRAM, "--only", "dropped_rows", "ceilings")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["failed"] == ["dropped_rows.runs"]
    assert "device-side assert" in found["parts"]["dropped_rows"]["checks"]["runs"]["wanted"]


def test_without_an_accelerator_the_program_says_how_it_runs():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    if done.returncode != 2:
        pytest.skip("this machine has an accelerator")
    assert "no accelerator here; --cpu --small runs the program itself" in done.stderr
