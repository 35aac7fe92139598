"""What an evaluation scores: by what training pays, and with a name for each reward that it leaves out."""

import json
import random

import pytest
from rich.console import Console

from maporl import Arithmetic, RewardSource, train
from maporl.config.schema import JudgeSection, RewardSection
from maporl.evaluation.metrics import Evaluation
from maporl.evaluation.tables import evaluation_table, learned
from maporl.methods.sections import AnnotatorSection, ArenaSection
from maporl.rewards.build import find_source
from maporl.rewards.scoring import why_not_measured
from maporl.runs.build import build_trainer
from maporl.tasks.prompts import Prompts
from maporl.validation.load import from_dict

AGENTS = RewardSection(
    judge=JudgeSection(agent="ref"), arena=ArenaSection(agent="ref"), annotator=AnnotatorSection(agent="ref")
)


class Fails(RewardSource):
    """A source that knows the questions of training alone, and draws random numbers."""

    def __call__(self, dialogues, task):
        if task.split == "eval":
            raise KeyError(f"column of {random.random():.0f}")
        return [[0.25 for _ in d.utterances] for d in dialogues]


def values(output, sources, **more):
    return {
        "output_dir": str(output), "updates": 1, "task": {"name": "toy_sum", "largest": 9}, "protocol": {"name": "debate", "turns": 2},
        "agents": {"ann": {"tiny": {"context": 512}}, "bob": {"tiny": {"context": 512}}}, "reward": {"sources": sources},
        "ppo": {"response_length": 3}, "evaluation": {"questions": 6},
        "training": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True, "eval_steps": 1}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("name, why", [
    ("label", ""), ("format", ""), ("critical_steps", ""),
    ("majority", "it compares dialogues, and an evaluation plays each question once"),
    ("arena", "it compares dialogues, and an evaluation plays each question once"),
    ("repeats", "it compares dialogues, and an evaluation plays each question once"),
    ("annotator", "it learns, so what it gives before and after training is not measured alike"),
    ("judge", "agent ref would be asked about every answer"),
])  # fmt: skip
def test_evaluations_leave_out_what_they_cannot_measure_or_should_not_pay_for(name, why):
    class Voices:
        def speak(self, agent, conversations):
            raise AssertionError("no judge is asked here")

    source = find_source(name)(AGENTS, Voices())
    assert why_not_measured(source, Arithmetic(largest=9)) == why
    if name == "judge":
        assert why_not_measured(source, Prompts([{"prompt": "?"}])) == "", "without labels there is nothing else"


def test_a_run_reports_the_mean_trained_score_and_what_it_is_without(tmp_path):
    """The score is 1 label + 0.1 format, recomputed from the grades of the recorded answers."""
    sources = {"label": 1.0, "format": 0.1, "majority": 0.5, "tokens": 0.0, f"{__name__}:Fails": 0.2}
    before, after = train(from_dict(values(tmp_path / "run", sources)), resume=False, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run/evaluation_after.jsonl").read_text().splitlines()]
    said = [u for row in rows for u in row["utterances"]]
    scores = [float(u["grade"]["correct"]) + 0.1 * (u["grade"]["answer"] is not None) for u in said]
    assert len(said) == 24 and after.rewards["reward/score"] == pytest.approx(sum(scores) / 24)
    assert after.rewards["reward/format"] > 0 and "reward/majority" not in after.rewards
    assert list(after.unmeasured) == ["majority", f"{__name__}:Fails"] == list(before.unmeasured)
    assert after.unmeasured[f"{__name__}:Fails"].startswith(f"it failed: reward source '{__name__}:Fails' failed on ")
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    held_out = next(line for line in logged if "eval_accuracy/turn_2" in line)
    assert held_out["eval_reward/score"] == after.rewards["reward/score"], "the weights after the only update"
    assert next(line for line in logged if "reward/majority" in line)[f"reward/{__name__}:Fails"] == 0.25
    console = Console(record=True, width=200)
    for table in (evaluation_table(after, before, ("before", "after")), evaluation_table(after)):
        console.print(table)
    text = " ".join(console.export_text().split())
    assert text.count(f"{after.rewards['reward/score']:.4g}") >= 2 and "reward/format" not in text
    assert text.count("The score is without rewards that an evaluation does not ask for (majority: it compares") == 2
    assert learned(before, after).endswith(f"{after.rewards['reward/score']:.4g} after training")
    record = after.to_json()
    assert Evaluation.from_json(record) == after
    del record["unmeasured"]
    assert Evaluation.from_json(record).unmeasured == {}, "an evaluation of an older version"


def test_scoring_an_evaluation_changes_no_random_state_and_no_training_reward(tmp_path):
    trainer = build_trainer(from_dict(values(tmp_path / "run", {"label": 1.0, f"{__name__}:Fails": 0.2})), quiet=True)
    state = random.getstate()
    found = trainer.measure()
    assert random.getstate() == state and found.unmeasured and "reward/score" in found.metrics()
