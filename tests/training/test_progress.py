"""The progress bar where nobody watches it, and where an error ends it."""

import os
import re
import subprocess
import sys

import pytest

BROKEN = """
def late(dialogues, task):
    late.calls = getattr(late, "calls", 0) + 1
    if late.calls > 2:
        raise ValueError("the third call")
    return [[0.0 for u in d.utterances] for d in dialogues]
"""


@pytest.mark.slow
def test_a_log_gets_few_lines_of_the_bar_and_the_error_a_line_of_its_own(tmp_path):
    (tmp_path / "late_p.py").write_text(BROKEN)
    values = [
        "output_dir=run", "updates=4", "warm_start.steps=40", "warm_start.batch_size=2", "evaluation.questions=0",
        "training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=1", "training.use_cpu=true",
        'reward.sources={"label": 1.0, "late_p:late": 0.0}',
    ]  # fmt: skip
    options = [part for value in values for part in ("--set", value)]
    found = subprocess.run(
        [sys.executable, "-m", "maporl", "train", "quickstart", *options],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert found.returncode == 1, found.stderr
    lines = re.split(r"[\r\n]+", found.stderr)
    errors = [line for line in lines if "error:" in line]
    assert (
        len(errors) == 1
        and errors[0].startswith("error: ")
        and "late_p.py, line 5: ValueError: the third call" in errors[0]
    )
    warm = [line for line in lines if line.startswith("warm start") and line.strip()]
    assert len(warm) <= 3, "not a line for each of 40 steps"
