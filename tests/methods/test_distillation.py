"""On-policy distillation inside a team, through the trainer's own steps."""

import math
from itertools import chain

import pytest
from fast_cases import some
from scripted_training import TokenScript, logprobs_alone, played

from maporl.errors import ConfigError
from maporl.methods.distillation import Distillation
from maporl.methods.tiny_versions import tiny_version
from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict


def trainer_of(folder, changes=None, **distill):
    """The recipe team_opd with tiny models, and other options of its teacher."""
    values = tiny_version("team_opd", str(folder)) | {"warm_start": {"steps": 0}} | (changes or {})
    values["reward"] = {"distill": values["reward"]["distill"] | distill}
    return build_trainer(from_dict(values), quiet=True)


def what_teachers_read(trainer):
    """The completions that teachers are asked about, in a list that grows."""
    asked, logprobs = [], trainer.learning.logprobs
    trainer.learning.logprobs = lambda name, some: (asked.extend(some), logprobs(name, some))[1]
    return asked


def test_team_opd_pays_a_first_answer_for_what_the_policy_thinks_once_it_was_shown_another_dialogue(tmp_path):
    trainer = trainer_of(tmp_path, {"branching": {"group": 3}}, weight=0.5)
    batch = played(trainer)
    for name, rows in batch.token_batches.items():
        samples = batch.samples[name]
        for row, number in enumerate(rows.sample.tolist()):
            sample, mask = samples[number], rows.sampled_mask[row]
            expected = [0.0] * (len(sample.response_ids) - 1) + [sample.score]
            if sample.utterance.turn == 0:
                prompt, rollout, agent = map(sample.columns.values.get, ("prompt", "rollout", "agent"))
                others = [d for d in batch.dialogues if d.prompt == prompt and d.rollout != rollout]
                last = [[u for u in d.utterances if u.agent == agent][-1] for d in others]
                assert [u.turn for u in last] == [1, 1]
                policy, heat = trainer.team.policies[name], trainer.args.temperature
                taught = [logprobs_alone(policy, u.prompt_ids, sample.response_ids, heat) for u in last]
                gaps = [sum(t) / 2 - own for *t, own in zip(*taught, sample.sampled_logprobs, strict=True)]
                assert any(abs(gap) > 1e-3 for gap in gaps)
                expected = [e + 0.5 * gap for e, gap in zip(expected, gaps, strict=True)]
            assert rows.token_scores[row][mask].tolist() == pytest.approx(expected, abs=1e-4)
        assert batch.metrics[f"{name}/distill/share"] == 1.0


WORLD = {
    "agent_defaults": {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1, "heads": 2}},
    "task": {"name": "toy_sum", "largest": 9, "template": "{a}+{b}="},
    "training": {"per_device_train_batch_size": 1, "use_cpu": True},
    "ppo": {"response_length": 1, "temperature": 1.0, "num_mini_batches": 1},
}
"""A world of answers of one token, so that everything that an agent may say can be tried."""
TEXTS = {"later": "{others};{question}", "quote": "{text}", "separator": ";"}
DEBATE = {"name": "debate", "turns": 2, **TEXTS}
CHAIN = {"name": "chain", "turns": 2, "visibility": "all", **TEXTS}


@pytest.mark.parametrize(
    ("protocol", "teacher"),
    some([(DEBATE, "dialogue"), (DEBATE, "bob"), (CHAIN, "dialogue"), (CHAIN, "bob")], 1, 2),
    ids=["debate", "debate, bob", "chain", "chain, bob"],
)
def test_rewards_are_minus_a_kl_because_no_teacher_sees_the_answer_that_it_judges(protocol, teacher, tmp_path):
    """Every answer that ann may give is played to the end: what a teacher reads may depend on it."""
    trainer = trainer_of(tmp_path, WORLD | {"protocol": protocol}, teacher=teacher, weight=1.0)
    for parameter in chain(*(policy.model.parameters() for policy in trainer.team.policies.values())):
        parameter.data.mul_(3.0)  # so that what stands in a prompt matters
    asked = what_teachers_read(trainer)
    own, taught, contexts = [], [], []
    for token in range(trainer.team.policies["ann"].model.config.vocab_size):

        def says(request, token=token):
            judged = request.rng_key[-2] == 0 and request.ask.agent == "ann" and request.turn == 0
            return [token] if judged else [5 + request.utterance]

        engine = TokenScript(trainer.team.policies, says, tells_logprobs=True)
        trainer.engines.update(dict.fromkeys(trainer.engines, engine))
        asked.clear()
        batch = played(trainer)
        (sample,) = [s for s in batch.samples["ann"] if s.utterance.turn == 0 and s.columns.values["rollout"] == 0]
        contexts.append([read.prompt_ids for read in asked if sample.label in read.label])
        own += sample.sampled_logprobs
        taught.append(sample.token_scores[0] - sample.score + own[-1])
    assert all(read == contexts[0] for read in contexts) and len(contexts[0]) == 1
    assert sum(map(math.exp, own)) == pytest.approx(1.0, abs=1e-5)
    assert sum(map(math.exp, taught)) == pytest.approx(1.0, abs=1e-5)
    assert sum(math.exp(o) * (t - o) for o, t in zip(own, taught, strict=True)) < -1e-4


def test_dialogues_that_share_an_answer_do_not_judge_it(tmp_path):
    trainer = trainer_of(tmp_path, {"branching": {"how": "fork_every", "group": 2}})
    asked = what_teachers_read(trainer)
    batch = played(trainer)
    for name in batch.samples:
        assert batch.metrics[f"{name}/distill/share"] == 1.0
        for sample in (s for s in batch.samples[name] if s.utterance.turn == 0):
            read = [list(c.prompt_ids) for c in asked if c.label.startswith(f"{sample.label},")]
            last = [
                next(u for u in d.utterances if u.agent == name and u.turn == 1)
                for d in batch.dialogues
                if d.prompt == sample.columns.values["prompt"]
                and all(u.sample != sample.utterance.sample for u in d.utterances)
            ]
            assert len(last) == 2 and read == [u.prompt_ids for u in last]


def test_an_answer_without_another_dialogue_is_counted(tmp_path):
    """Where no dialogue has begun apart, as after a lost one, an answer earns its score alone."""
    trainer = trainer_of(tmp_path)
    batch = trainer.score(trainer.collected())
    batch.dialogues = [d for d in batch.dialogues if d.rollout == 0 or d.prompt > 0]
    batch = trainer.advantage(batch)
    assert batch.metrics["ann/distill/share"] == 6 / 7
    assert [s.token_scores for s in batch.samples["ann"] if s.columns.values["prompt"] == 0] == [None, None]


def test_another_agent_teaches_where_it_first_speaks(tmp_path):
    trainer = trainer_of(tmp_path, teacher="bob", weight=1.0)
    batch = played(trainer)
    assert batch.metrics["ann/distill/share"] == 1.0 and batch.metrics["bob/distill/share"] == 0.0
    (rows, samples) = batch.token_batches["ann"], batch.samples["ann"]
    row = next(i for i, n in enumerate(rows.sample.tolist()) if samples[n].utterance.turn == 0)
    sample = samples[int(rows.sample[row])]
    bob, heat = trainer.team.policies["bob"], trainer.args.temperature
    taught = logprobs_alone(bob, sample.prompt_ids, sample.response_ids, heat)
    gaps = [t - own for t, own in zip(taught, sample.sampled_logprobs, strict=True)]
    gaps[-1] += sample.score
    assert rows.token_scores[row][rows.sampled_mask[row]].tolist() == pytest.approx(gaps, abs=1e-4)


def test_teachers_that_cannot_read_the_pupils_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"reward.distill.teacher: expected .*\['ann', 'bob'\], got 'cy'"):
        trainer_of(tmp_path / "1", teacher="cy")
    trainer = trainer_of(tmp_path / "2")
    trainer.team.policies["bob"].tokenizer.add_tokens(["new"])
    section = trainer.parts.reward.distill
    with pytest.raises(ConfigError, match="'ann' reads other tokens than policy 'bob'"):
        Distillation(type(section)(teacher="ann"), trainer.team)
    values = tiny_version("team_opd", str(tmp_path)) | {"cluster": {"backend": "ray"}}
    with pytest.raises(ConfigError, match=r"reward.distill: its teacher is asked in the trainer's own process"):
        from_dict(values)


@pytest.mark.parametrize(("changes", "message"), [
    ({"branching": {"group": 1}}, "branching.group is 1; set branching.group to 2 or more"),
    ({"branching": {"how": "best_of", "group": 2}}, "best_of decides by the scores of first answers what follows"),
    ({"protocol": {"name": "debate", "turns": 1}}, "in protocol 'debate' all speak once"),
])  # fmt: skip
def test_a_run_in_which_nothing_can_be_taught_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=f"reward.distill: .*{message}"):
        from_dict(tiny_version("team_opd", str(tmp_path)) | changes)
