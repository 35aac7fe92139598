"""The command line and whole runs: what people type, and what they see when it goes wrong."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch
import yaml
from folders import ROOT
from processes import maporl, start
from processes import run as python
from safetensors.torch import load_file
from tiny_runs import TINY
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.errors import ConfigError
from maporl.runs import train as run
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run


@pytest.fixture
def written(tmp_path):
    """``written(**changes)`` -> path of a small configuration whose output goes to ``tmp_path/run``."""

    def write(name="run", **changes):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**TINY, "output_dir": str(tmp_path / name), **changes}))
        return path

    return write


def test_a_run_from_the_documented_entry_leaves_everything_it_names(written, tmp_path):
    path = written()
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/single.yaml",
         "train_multi_agent.py", "--config", str(path), "--set", "updates=2", "--set", "seed=5"],
        capture_output=True, text=True, cwd=ROOT, timeout=300, env=unset,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "threads: 1 (tiny models gain nothing from more" in done.stdout  # and not the one that accelerate has set
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "dialogues.jsonl", "final", "report.html"):
        assert str(run / name) in done.stdout.replace("\n", "") and (run / name).exists()
    assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 5
    assert "before" in done.stdout and "majority" in done.stdout
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    after = json.loads((run / "evaluation_after.json").read_text())
    again = maporl("eval", path, "--set", "seed=5", "--checkpoint", run / "final", "--json")
    assert again.returncode == 0, again.stderr
    evaluation = json.loads(again.stdout)
    assert evaluation["turns"] == after["turns"]
    assert {"ann alone", "bob alone"} <= set(evaluation["baselines"]) and len(evaluation["baselines"]) == 4
    refused = CliRunner().invoke(app, ["train", str(path)])
    assert refused.exit_code == 1 and "exists and is not empty; nothing was overwritten" in refused.stderr
    other = CliRunner().invoke(app, ["train", str(path), "--resume"])
    assert other.exit_code == 1 and "was started with another configuration" in other.stderr


def test_a_report_that_fails_costs_no_run(written, tmp_path, monkeypatch):
    from maporl.report import page

    monkeypatch.setattr(page, "write_report", lambda folders: 1 / 0)
    done = CliRunner().invoke(app, ["train", str(written(updates=1))])
    assert done.exit_code == 0 and (tmp_path / "run/final").is_dir()
    assert "warning: no report was written (ZeroDivisionError: division by zero); try: maporl report" in done.output


def test_a_path_may_have_an_equals_sign(written, tmp_path):
    (tmp_path / "lr=1e-4").mkdir()
    path = written().rename(tmp_path / "lr=1e-4/config.yaml")
    assert maporl("check", path, "training.learning_rate=1e-4").returncode == 0


@pytest.mark.parametrize("text, message", [
    ("", "is empty; configs/ppo/base.yaml shows every key"),
    ("task:\n\tname: toy_sum\n", r"indent with spaces"),
    ("a: [\n", r'in ".*broken.yaml", line 2'),
])  # fmt: skip
def test_a_broken_file_is_explained_in_its_own_words(tmp_path, text, message):
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as found:
        load(tmp_path / "broken.yaml")
    assert ": :" not in str(found.value) and "Input should" not in str(found.value)


def test_check_and_dry_run_load_no_weights(written):
    path = written()
    checked = maporl("check", path)
    assert checked.returncode == 0 and checked.stdout.strip().endswith("ok")
    assert "task toy_sum: 80 questions, 20 held out" in checked.stdout
    shown = maporl("train", path, "ppo.num_ppo_epochs=3", "--dry-run")
    assert from_dict(yaml.safe_load(shown.stdout)).ppo.num_ppo_epochs == 3
    assert "# policy ann: " in shown.stdout and "# policy bob: " in shown.stdout


def test_mistakes_are_a_line_each_and_exit_code_2(written, tmp_path):
    for arguments, message in (
        (["check", written(), "training.learning_rat=1"], "unknown key 'training.learning_rat'; did you mean 'learning_rate'"),
        (["train", written(), "protocol.turns=0"], "turns: expected at least 1, got 0"),
        (["train"], "expected one configuration file, got none"),
        (["check", written(), "ppo.response_length=200"], "agents.ann: a first prompt has 4 tokens and answers may have 200"),
        (["train", written("gsm", task={"name": "gsm8k", "source": "nowhere.jsonl"}, warm_start={"steps": 0})], "nowhere.jsonl: no such file"),
    ):  # fmt: skip
        done = maporl(*arguments)
        assert done.returncode == 2, done.stderr
        lines = done.stderr.splitlines()
        assert message in lines[0] and all(line.startswith("error: ") for line in lines)
        several = "agents.ann" in message or "nowhere.jsonl" in message
        assert len(lines) == (2 if several else 1), "both agents answer at such length, and one file has no test split"
    assert not (tmp_path / "run").exists()


UNFIT = {
    "training.lr_scheduler_type=linnear": "training.lr_scheduler_type: unknown 'linnear'; did you mean 'linear'",
    "training.report_to=[nobody]": "training.report_to: ['nobody'] cannot be reported to",
    "training.eval_strategy=sometimes": "eval_strategy",
    "agents.ann.tiny.alphabet='01234'": "agents.ann.tiny.alphabet: questions have characters",
    "agents.ann.chat_template=nowhere.jinja": "agents.ann.chat_template: 'nowhere.jinja' cannot be read",
    "agents.ann.chat_template='{{ broken('": "agents.ann: the chat template of",
    f"protocol.later='{'{question}' * 60}'": "agents.ann: a prompt of turn 2 has at least 245 tokens",
}


@pytest.mark.parametrize(("change", "message"), UNFIT.items(), ids=[change[:30] for change in UNFIT])
def test_what_no_schema_can_say_is_found_before_a_model_is_loaded(written, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run(load(written(), [change]))


def test_a_tokenizer_that_is_not_the_models_is_refused(tiny, written, tmp_path):
    model, _ = tiny(alphabet="0123456789+=;")
    _, larger = tiny(alphabet="0123456789+=;abcdefgh")
    model.save_pretrained(tmp_path / "base")
    larger.save_pretrained(tmp_path / "base")
    refused = maporl("check", written(agents={"ann": {"model": str(tmp_path / "base")}}, warm_start={"steps": 0}))
    assert refused.returncode == 2 and "its tokenizer has ids up to" in refused.stderr


def test_a_run_that_fails_before_training_leaves_the_folder_to_the_corrected_one(written, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 20)
    source = {"name": "gsm8k", "source": str(rows), "eval_source": str(rows)}
    failing = maporl("train", written(task=source, warm_start={"steps": 0}, reward={"sources": {"label": 1, "verifier": 1},
                     "verifier": {"model": "./tests"}}), "-q")  # fmt: skip
    assert failing.returncode != 0
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
    assert maporl("train", written(updates=1), "-q").returncode == 0


def test_a_base_model_needs_a_template_and_a_tokenizer_a_padding_token(tiny, written, tmp_path):
    model, tokenizer = tiny()
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    agents = {"ann": {"model": str(tmp_path / "base")}}
    refused = maporl("check", written(agents=agents, warm_start={"steps": 0}))
    assert refused.returncode == 2 and "set agents.ann.chat_template: fallback" in refused.stderr
    agents["ann"]["chat_template"] = "fallback"
    assert maporl("check", written(agents=agents, warm_start={"steps": 0})).returncode == 0
    settings = tmp_path / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "pad_token"}))
    refused = maporl("check", written(agents=agents, warm_start={"steps": 0}))
    assert refused.returncode == 2 and "set agents.ann.pad_token: '<eos>'" in refused.stderr


def test_metrics_go_to_tensorboard_when_asked(written, tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = {**TINY["training"], "report_to": ["tensorboard"]}
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    run.train(load(written(updates=2, training=training)), resume=False, quiet=True)
    read = events.EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    logged = {name: [event.value for event in read.Scalars(name)] for name in read.Tags()["scalars"]}
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    name = next(n for n in logged if n.endswith("approxkl_avg"))
    assert logged[name] == pytest.approx([row[name.removeprefix("train/")] for row in rows])


@pytest.mark.slow
def test_a_check_imports_nothing_that_only_training_needs(written):
    """Half a second of it: the data sets of Hugging Face, which transformers' trainer imports."""
    code = (
        "import sys\nfrom maporl.cli.main import app\n"
        f"app(['check', {str(written())!r}], standalone_mode=False)\n"
        "print(sorted({'datasets', 'pandas', 'transformers.trainer', 'deepspeed'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_a_run_killed_after_a_checkpoint_and_resumed_ends_bit_identical(written, tmp_path):
    training = {**TINY["training"], "save_steps": 2}
    whole = maporl("train", written("whole", updates=6, training=training), "-q")
    assert whole.returncode == 0, whole.stderr
    path = written("parts", updates=6, training=training)
    process = start(["-m", "maporl", "train", path, "-q"])
    checkpoint = tmp_path / "parts" / "checkpoint-2"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "parts" / "final").exists()
    resumed = maporl("train", path, "--resume", "-q")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("ann", "bob"):
        weights = [load_file(tmp_path / run / "final" / name / "model.safetensors") for run in ("whole", "parts")]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    records = [(tmp_path / run / "dialogues.jsonl").read_text() for run in ("whole", "parts")]
    assert records[0] == records[1]
    written_at = (tmp_path / "parts/final/ann/model.safetensors").stat().st_mtime_ns
    (tmp_path / "parts/evaluation_after.json").unlink()  # as if it had been killed in its last evaluation
    again = maporl("train", path, "--resume", "-q")
    assert again.returncode == 0 and "its run has ended; nothing is left to train" in again.stderr
    assert (tmp_path / "parts/final/ann/model.safetensors").stat().st_mtime_ns == written_at
    assert [
        json.loads((tmp_path / run / "evaluation_after.json").read_text())["turns"] for run in ("whole", "parts")
    ] == [json.loads((tmp_path / "whole/evaluation_after.json").read_text())["turns"]] * 2


def test_the_first_example_runs(monkeypatch, capsys):
    """As it stands, but for the length of its warm start."""
    monkeypatch.setenv("UPDATES", "2")
    monkeypatch.setenv("WARM_START", "5")
    runpy.run_path(str(ROOT / "examples/01_tiny_debate.py"), run_name="__main__")
    assert "turn 2: held-out accuracy" in capsys.readouterr().out


def test_parts_of_ones_own_train():
    done = python(["examples/02_add_your_own.py"])
    assert done.returncode == 0, done.stderr
    assert "after three updates" in done.stdout


@pytest.mark.slow
def test_the_verifiers_pipeline_runs_end_to_end(tmp_path, monkeypatch, capsys):
    """The example as it stands, but for the epochs; each command that it starts is a process with the libraries
    loaded."""
    pytest.importorskip("fastapi")
    folder = tmp_path / "pipeline"

    def command(words, check):
        anyway = ["--save-anyway"] if "verifier" in words and "train" in words else []  # two epochs teach it nothing
        done = python(["2" if before == "--epochs" else word for before, word in pairwise(words)] + anyway)
        print(done.stdout)
        assert check and done.returncode == 0, done.stderr[-3000:]

    monkeypatch.setattr(subprocess, "run", command)
    monkeypatch.setattr(subprocess, "Popen", lambda words: start(words[1:]))
    options = ["--folder", str(folder), "--updates", "2", "--samples", "4"]
    monkeypatch.setattr(sys, "argv", ["03_verifier_pipeline.py", *options])
    runpy.run_path(str(ROOT / "examples/03_verifier_pipeline.py"), run_name="__main__")
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in (folder / "team/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(0 <= row["reward/verifier"] <= 1 and row["verifier/requests"] > 0 for row in rows)
    assert "mean |share right - 1/2| by question" in shown and "AUC" in shown


def test_the_benchmark_prints_the_documented_keys():
    size = ["--batch", "2", "--prompt-len", "8", "--response-len", "8", "--epochs", "1"]
    done = python(["benchmarks/ppo_step.py", *size, "--json"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"seconds_per_update", "seconds_per_phase", "tokens_per_second", "peak_rss_bytes", "work"} <= result.keys()
    assert result["work"]["sampled_tokens_per_update"] == 16 and result["work"]["first_ratio"] == pytest.approx(
        1, abs=1e-5
    )
