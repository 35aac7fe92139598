"""On-policy distillation inside a team, through the trainer's own steps."""

import pytest
from scripted_training import logprobs_alone, played

from maporl.errors import ConfigError
from maporl.playground.tiny_versions import tiny_version
from maporl.runs.build import build_trainer
from maporl.training.distillation import Distillation
from maporl.validation.load import from_dict


def trainer_of(folder, **distill):
    """The recipe team_opd with tiny models, two dialogues for each question, and other options of its teacher."""
    values = tiny_version("team_opd", str(folder))
    values |= {"warm_start": {"steps": 0}, "branching": {"group": 2}, "protocol": {"name": "debate", "turns": 2}}
    values["reward"] = {"distill": values["reward"]["distill"] | distill}
    return build_trainer(from_dict(values), quiet=True)


def test_team_opd_pays_a_first_answer_for_what_the_policy_thinks_once_it_was_shown_the_dialogue(tmp_path):
    trainer = trainer_of(tmp_path, weight=0.5)
    batch = played(trainer)
    for name, rows in batch.token_batches.items():
        samples = batch.samples[name]
        for row, number in enumerate(rows.sample.tolist()):
            sample, mask = samples[number], rows.sampled_mask[row]
            expected = [0.0] * (len(sample.response_ids) - 1) + [sample.score]
            if sample.columns.turn == 0:
                (dialogue,) = [
                    d
                    for d in batch.dialogues
                    if (d.prompt, d.rollout) == (sample.columns.prompt, sample.columns.rollout)
                ]
                last = [u for u in dialogue.utterances if u.agent == sample.columns.agent][-1]
                assert last.turn == 1
                taught = logprobs_alone(
                    trainer.team.policies[name], last.prompt_ids, sample.response_ids, trainer.args.temperature
                )
                gaps = [t - own for t, own in zip(taught, sample.sampled_logprobs, strict=True)]
                assert any(abs(gap) > 1e-3 for gap in gaps)
                expected = [e + 0.5 * gap for e, gap in zip(expected, gaps, strict=True)]
            assert rows.token_scores[row][mask].tolist() == pytest.approx(expected, abs=1e-4)
        assert batch.metrics[f"{name}/distill/share"] == 0.5


def test_another_agent_teaches_where_it_first_speaks(tmp_path):
    trainer = trainer_of(tmp_path, teacher="bob", weight=1.0)
    batch = played(trainer)
    assert batch.metrics["ann/distill/share"] == 0.5 and batch.metrics["bob/distill/share"] == 0.0
    (rows, samples) = batch.token_batches["ann"], batch.samples["ann"]
    row = next(i for i, n in enumerate(rows.sample.tolist()) if samples[n].columns.turn == 0)
    sample = samples[int(rows.sample[row])]
    taught = logprobs_alone(
        trainer.team.policies["bob"], sample.prompt_ids, sample.response_ids, trainer.args.temperature
    )
    gaps = [t - own for t, own in zip(taught, sample.sampled_logprobs, strict=True)]
    gaps[-1] += sample.score
    assert rows.token_scores[row][rows.sampled_mask[row]].tolist() == pytest.approx(gaps, abs=1e-4)


def test_a_teacher_that_knows_no_more_teaches_nothing(tmp_path):
    """Where the teacher reads the same prompt, what it thinks is what was sampled."""
    trainer = trainer_of(tmp_path)
    batch = trainer.score(trainer.collected())
    for dialogue in batch.dialogues:
        for spoken in dialogue.utterances:
            if spoken.turn:
                spoken.prompt_ids = next(u for u in dialogue.utterances if u.agent == spoken.agent).prompt_ids
    batch = trainer.advantage(batch)
    for name in batch.token_batches:
        assert batch.metrics[f"{name}/distill/reward"] == pytest.approx(0.0, abs=1e-5)


def test_teachers_that_cannot_read_the_pupils_are_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"reward.distill.teacher: expected dialogue or an agent that learns, \['ann', 'bob'\], got 'cy'",
    ):
        trainer_of(tmp_path / "1", teacher="cy")
    trainer = trainer_of(tmp_path / "2")
    trainer.team.policies["bob"].tokenizer.add_tokens(["new"])
    section = trainer.parts.reward.distill
    with pytest.raises(ConfigError, match="'ann' reads other tokens than policy 'bob'"):
        Distillation(type(section)(teacher="ann"), trainer.team)
    values = tiny_version("team_opd", str(tmp_path)) | {"cluster": {"backend": "ray"}}
    with pytest.raises(ConfigError, match=r"reward.distill: its teacher is asked in the trainer's own process"):
        from_dict(values)
