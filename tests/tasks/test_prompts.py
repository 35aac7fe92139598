"""A data set of prompts and a reward function of TRL's signature, from a configuration: ``task: {name: prompts}``."""

import json
import statistics

import pytest
import torch
from datasets import Dataset

from maporl.advantages.estimator import Estimates
from maporl.errors import ConfigError
from maporl.runs.train import train
from maporl.tasks import TaskError, build_task
from maporl.training.assign import group_spreads
from maporl.validation.load import load
from maporl.validation.preflight import check_run

pytestmark = pytest.mark.usefixtures("forgotten")

ROWS = [{"prompt": f"{n}+1=", "target": str((n + 1) % 10)} for n in range(9)]
REWARD = """
steps = []

def digits(prompts, completions, target, agents, trainer_state, **columns):
    steps.append(None if trainer_state is None else trainer_state.global_step)
    assert all(p.endswith("+1=") and len(t) == 1 for p, t in zip(prompts, target)) and set(agents) == {"solo"}
    return [sum(c.isdigit() for c in text) / 4 for text in completions]

def needs_colour(prompts, completions, colour):
    return [0.0] * len(prompts)
"""
RUN = """
extends: grpo_single
output_dir: run
task: {name: prompts, source: rows.jsonl, eval_source: held.csv}
agents: {solo: {tiny: {hidden_size: 32, layers: 1, alphabet: "0123456789+= "}}}
reward: {sources: {"my_rewards_g:digits": 1.0}}
branching: {group: 4}
ppo: {response_length: 4}
training: {per_device_train_batch_size: 3, gradient_accumulation_steps: 1, use_cpu: true}
evaluation: {questions: 2}
warm_start: {steps: 0}
updates: 2
dialogues_logged: 99
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_g.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "held.csv").write_text("prompt,target\n1+1=,a\n2+1=,b\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_needs_no_python_besides_the_reward_function(folder):
    config = load("run.yaml")
    lines = check_run(config)
    assert lines[0] == "task prompts: 9 questions, 2 held out"
    train(config, resume=False, quiet=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shown = [json.loads(line) for line in (folder / "run" / "dialogues.jsonl").read_text().splitlines()]
    for step in (1, 2):
        played = [dialogue for dialogue in shown if dialogue["step"] == step]
        found = [sum(c.isdigit() for c in d["utterances"][0]["text"]) / 4 for d in played]
        assert len(found) == 12 and sum(found) > 0
        row = rows[step - 1]
        assert row["reward/my_rewards_g:digits"] == pytest.approx(sum(found) / 12)
        groups = [
            [share for d, share in zip(played, found, strict=True) if d["example"]["id"] == name]
            for name in {d["example"]["id"] for d in played}
        ]
        spreads = [statistics.stdev(group) for group in groups]
        assert len(spreads) == 3 and row["solo/reward_std"] == pytest.approx(sum(spreads) / 3, abs=1e-6)
        assert row["solo/frac_reward_zero_std"] == pytest.approx(spreads.count(0.0) / 3)
        utterances = [d["utterances"][0] for d in played]
        lengths, cut = [len(u["response_ids"]) for u in utterances], [u["stop"] == "length" for u in utterances]
        assert row["solo/completions/mean_length"] == pytest.approx(sum(lengths) / 12)
        assert row["solo/completions/clipped_ratio"] == pytest.approx(sum(cut) / 12)
    import my_rewards_g

    assert set(my_rewards_g.steps) >= {0, 1}, "the function sees the trainer's state"
    resumed = load("run/config.yaml")
    assert resumed.task["source"].endswith("/rows.jsonl") and "my_rewards_g:digits" in resumed.reward.sources


def test_the_spread_of_groups_counts_what_is_learned_from():
    """Groups (1, 0), (2, 2, and 9 of weight 0), a lone row, and (0, 3), whose second row is another policy's."""
    estimates = Estimates(
        torch.zeros(8), torch.tensor([1.0, 0, 2, 2, 9, 5, 0, 3]), torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 1])
    )
    groups, owners = [[0, 1], [2, 3, 4], [5], [6, 7]], [*["ann"] * 7, "bob"]
    ann = group_spreads(estimates, groups, owners, "ann")
    assert ann == pytest.approx({"reward_std": (0.5**0.5 + 0 + 4.5**0.5) / 3, "frac_reward_zero_std": 1 / 3})
    assert group_spreads(estimates, groups, owners, "bob") == pytest.approx(
        {"reward_std": 4.5**0.5, "frac_reward_zero_std": 0}
    )
    assert group_spreads(estimates, [], owners, "bob") == {}


def test_a_parameter_without_a_column_is_found_before_a_model_loads(folder):
    config = load("run.yaml", ['reward.sources={"my_rewards_g:needs_colour": 1.0}'])
    with pytest.raises(
        ConfigError, match=r"reward\.sources: reward function 'needs_colour': missing a required .*'colour'"
    ):
        check_run(config)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "target": "2", "agents": 3}\n')
    with pytest.raises(
        ConfigError, match="task prompts: the column 'agents' has the name of what a reward function gets"
    ):
        check_run(load("run.yaml"))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_rows_come_from_files_of_several_kinds(folder, ending):
    data, name = Dataset.from_list([{"prompt": "a, b?", "n": 7}, {"prompt": "c?", "n": 8}]), f"data.{ending}"
    {"jsonl": data.to_json, "csv": data.to_csv, "parquet": data.to_parquet}[ending](name)
    task = build_task({"name": "prompts", "source": name}, "train", 0)
    assert [task[i].question for i in range(2)] == ["a, b?", "c?"]
    assert task.columns(task[1]) == {"n": "8" if ending == "csv" else 8}
    assert len(build_task({"name": "prompts", "source": name, "limit": 1}, "train", 0)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "row.jsonl"}, "{folder}/row.jsonl: no such file; did you mean 'rows.jsonl'?"),
        ({"source": "data/rows.jsonl"}, "{folder}/data/rows.jsonl: no such file, and no such folder; give the path of a"),
        ({"source": "rows.jsonl", "limit": 0}, "limit: expected at least 1, got 0"),
        ({"source": "empty.jsonl"}, "prompts: the data set is empty"),
        ({"source": "broken.parquet"}, "broken.parquet: cannot be read as parquet (ArrowInvalid"),
        ({"source": "unnamed.csv"}, "unnamed.csv: no column 'prompt'; it has question: set task.prompt_column: question"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_in_one_line(folder, options, message):
    for name, text in (
        ("empty.jsonl", ""), ("broken.parquet", "x"), ("unnamed.csv", "question\na\n")
    ):  # fmt: skip
        (folder / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_task({"name": "prompts", **options}, "train", 0)
    assert message.format(folder=folder) in str(caught.value) and "\n" not in str(caught.value)


def test_one_file_has_nothing_to_evaluate_on(folder):
    with pytest.raises(
        (ConfigError, TaskError), match=r"no test split; set task\.eval_source, or evaluation\.questions to 0"
    ):
        build_task({"name": "prompts", "source": "rows.jsonl"}, "eval", 0)
    check_run(load("run.yaml", ["task.eval_source=null", "evaluation.questions=0"]))
