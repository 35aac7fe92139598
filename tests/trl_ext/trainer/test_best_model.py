"""``load_best_model_at_end``, ``metric_for_best_model``, ``save_total_limit`` and ``EarlyStoppingCallback`` do for
trainers of one policy and of teams what they do in transformers, also in a run that goes on."""

from types import SimpleNamespace

import pytest
from one_policy import StopAfter, same
from transformers import EarlyStoppingCallback

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.errors import ArgumentError
from trl_ext.files.checkpoints import list_checkpoints

SCORES = [0.1, 0.2, 0.9, 0.3, 0.4, 0.5]
"""What evaluations say after each update. The best is that of update 3, which ``save_steps`` would not save."""


def options(folder, **more):
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "response_length": 3,
        "total_episodes": 24, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": 2,
        "eval_steps": 1, "load_best_model_at_end": True, **more,
    }  # fmt: skip


def one(tiny, folder, callbacks=(), **more):
    def reward(prompts, completions, trainer_state=None, **columns):
        return [SCORES[trainer_state.global_step - 1] + 0.01 * text.count("1") for text in completions]

    model, tokenizer = tiny(alphabet="0123456789+=;")
    args = PPOv2Config(**options(folder, eval_strategy="steps", metric_for_best_model="score", **more))
    rows = [{"prompt": f"{a}+1="} for a in range(8)]
    parts = {"train_dataset": rows, "eval_dataset": rows[:2], "reward_funcs": reward}
    return PPOv2Trainer(args, tokenizer, model, **parts, callbacks=list(callbacks))


class Judged(MultiAgentPPOTrainer):
    """A team whose evaluations say what the test wants, because a tiny one answers by chance."""

    def measure(self, task=None):
        values = {"accuracy/turn_1": 0.5, "accuracy/turn_1/ann": SCORES[self.state.global_step - 1]}
        return SimpleNamespace(metrics=lambda: values)


def team(tiny, folder, callbacks=(), **more):
    model, tokenizer = tiny(alphabet="0123456789+=;")
    args = MultiAgentPPOConfig(**options(folder, metric_for_best_model="accuracy/turn_1/ann", eval_questions=2, **more))
    task, agents = Arithmetic(largest=9), Team([Agent("ann", model, tokenizer)])
    return Judged(args, agents, task, Debate(turns=1), eval_task=task, callbacks=list(callbacks))


def weights(trainer):
    return {name: value.clone() for name, value in next(iter(trainer.learners.values())).model.state_dict().items()}


@pytest.mark.parametrize("build", [pytest.param(one, marks=pytest.mark.slow), team])
def test_a_run_ends_with_its_best_weights_and_keeps_their_checkpoint(build, tiny, tmp_path, capsys):
    plain = build(tiny, tmp_path / "plain", load_best_model_at_end=False, max_steps=3)
    plain.train()
    trainer = build(tiny, tmp_path / "run", save_total_limit=2)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_global_step) == (6, 3)
    assert same(weights(trainer), weights(plain))
    assert [folder.name for folder in list_checkpoints(tmp_path / "run")] == ["checkpoint-3", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run/checkpoint-3")
    assert "has the weights of update 3 of 6, the best (" in capsys.readouterr().err


@pytest.mark.parametrize("build", [one, pytest.param(team, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_knows_its_best_weights_and_how_patient_it_was(build, tiny, tmp_path):
    whole = build(tiny, tmp_path / "whole", [EarlyStoppingCallback(3)])
    whole.train()
    assert whole.state.global_step == 6, "after three evaluations that were not better"
    build(tiny, tmp_path / "parts", [EarlyStoppingCallback(3), StopAfter(5)]).train()
    parts = build(tiny, tmp_path / "parts", [EarlyStoppingCallback(3)])
    parts.train(resume_from_checkpoint=True)
    assert parts.state.best_global_step == 3 and parts.state.global_step == 6
    assert same(weights(parts), weights(whole))
    patient = build(tiny, tmp_path / "patient", [EarlyStoppingCallback(2)])
    patient.train()
    assert patient.state.global_step == 5 and same(weights(patient), weights(whole))
    assert (tmp_path / "patient/checkpoint-5").is_dir(), "the last weights are saved too"


@pytest.mark.parametrize("more", [{"eval_steps": None}, {"metric_for_best_model": None}])
def test_a_team_is_told_what_its_best_weights_need(tmp_path, more):
    with pytest.raises(ValueError, match="load_best_model_at_end: needs eval_steps, and the name of a metric_for_best"):
        MultiAgentPPOConfig(**options(tmp_path) | {"metric_for_best_model": "accuracy/turn_1"} | more)


@pytest.mark.parametrize("more, error, message", [
    ({"metric_for_best_model": "scores"}, ArgumentError, "metric_for_best_model: expected one of <lambda>, ended, score, got 'scores'"),
    ({"metric_for_best_model": None}, ValueError, "evaluations have no loss; name a metric of theirs, such as 'score'"),
])  # fmt: skip
def test_a_metric_that_evaluations_lack_is_refused_at_the_start(tiny, tmp_path, more, error, message):
    model, tokenizer = tiny()
    with pytest.raises(error, match=message):
        args = PPOv2Config(**options(tmp_path, eval_strategy="steps", **more))
        rows = [{"prompt": "1+1="}] * 4
        PPOv2Trainer(
            args, tokenizer, model, train_dataset=rows, eval_dataset=rows, reward_funcs=lambda p, c, **k: [0.0] * len(c)
        )
