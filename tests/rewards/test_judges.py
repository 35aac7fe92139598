"""Judges: pointwise and pairwise, through agents of the team; and sampling until dialogues differ."""

import pytest

from maporl import Arithmetic
from maporl.config.schema import JudgeSection
from maporl.errors import ConfigError
from maporl.methods.arenarl import PairwiseJudge
from maporl.methods.sections import ArenaSection
from maporl.rewards.base import RewardFailure, as_source
from maporl.rewards.judges import PointwiseJudge
from maporl.runs.build import build_trainer
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict

TASK = Arithmetic(largest=9)


def dialogues(*answers):
    return [
        Dialogue(Example(f"e{p}", "2+2=", "4"), [Utterance(0, "ann", "ann", 0, 0, [], text)], prompt=p, rollout=r)
        for p, r, text in answers
    ]


def test_a_judge_scores_each_answer_and_must_be_readable():
    asked = []

    def speak(agent, conversations):
        asked.extend((agent, c[0]["content"]) for c in conversations)
        return ["good. Score: 3 no, Score: 8" if "4" in c[0]["content"].split("|")[1] else "?" for c in conversations]

    section = JudgeSection(agent="jo", prompt="{question}|{answer}|{reference}")
    assert PointwiseJudge(section, speak)(dialogues((0, 0, "4")), TASK) == [[0.8]]
    assert asked == [("jo", "2+2=|4|4")]
    with pytest.raises(RewardFailure, match=r"judge 'jo' gave a verdict in which .* about agent 'ann'.*: '\?'"):
        PointwiseJudge(section, speak)(dialogues((0, 0, "5")), TASK)
    lenient = JudgeSection(agent="jo", prompt="{question}|{answer}", unreadable=-1.0)
    assert PointwiseJudge(lenient, speak)(dialogues((0, 0, "5"), (0, 1, "4")), TASK) == [[-1.0], [0.8]]


def test_a_tournament_ranks_the_answers_of_each_question_in_common_rounds():
    calls = []

    def speak(agent, conversations):
        calls.append(len(conversations))
        pairs = [c[0]["content"].split("|")[1:] for c in conversations]
        return [f"Better: {'A' if int(a) > int(b) else 'B'}" for a, b in pairs]

    section = ArenaSection(agent="jo", prompt="{question}|{first}|{second}")
    answers = dialogues(*((0, r, q) for r, q in enumerate("5863")), *((1, r, q) for r, q in enumerate("12")))
    got = PairwiseJudge(section, speak)(answers, TASK)
    assert [v for row in got for v in row] == pytest.approx([1 / 3, 1, 2 / 3, 0, 0, 1])
    assert calls == [2 * 4, 2 * 3, 2 * 1]  # both orders; seeds of both questions, then their rounds
    tied = PairwiseJudge(section, lambda agent, c: ["Better: A"] * len(c))(answers[:2], TASK)
    assert tied == [[1.0], [0.0]]


BASE = {
    "output_dir": "x", "task": {"name": "toy_sum", "largest": 9}, "agents": {n: {"tiny": {}} for n in ("ann", "bob", "jo")},
    "protocol": {"name": "debate", "turns": 1, "agents": ["ann", "bob"]},
}  # fmt: skip


def test_an_agent_that_does_not_play_judges_with_its_own_weights(tmp_path):
    tiny = {"hidden_size": 32, "layers": 1, "heads": 2, "alphabet": "0123456789+=;?"}
    judge = {"agent": "jo", "prompt": "{question}{answer}", "pattern": r"(\d)", "largest": 9, "unreadable": 0.0}
    config = from_dict({
        **BASE, "output_dir": str(tmp_path), "agents": {n: {"tiny": tiny} for n in ("ann", "bob", "jo")},
        "reward": {"sources": {"judge": 1.0}, "rules": ["own"], "judge": judge}, "evaluation": {"questions": 0},
        "ppo": {"response_length": 3}, "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "use_cpu": True},
    })  # fmt: skip
    trainer = build_trainer(config, quiet=True)
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    scored = batch.dialogues
    values = [u.rewards["judge"] for d in scored for u in d.utterances]
    assert len(values) == 4 and all(0 <= v <= 1 for v in values)
    assert trainer.player.speak("jo", [[{"role": "user", "content": "1+1="}]]) == trainer.player.speak("jo", [[{"role": "user", "content": "1+1="}]])  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [
    ({"reward": {"sources": {"judge": 1}}}, r"reward\.judge: the source 'judge' needs it"),
    ({"reward": {"sources": {"judge": 1}, "judge": {"agent": "ann"}}}, r"'ann' must be one of .* that does not play"),
    ({"reward": {"sources": {"arena": 1}, "arena": {"agent": "jo"}}}, r"reward\.sources: arena compares .*; set branching\.group to 2 or more"),
    ({"branching": {"resample": 2}}, r"one dialogue per question has no reward variance"),
])  # fmt: skip
def test_judges_that_cannot_judge_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({**BASE, **change})


def test_questions_whose_dialogues_earn_the_same_are_replaced(tmp_path):
    from tiny_runs import scheduled_config

    settings = scheduled_config(
        tmp_path, branching={"group": 2, "resample": 3}, ppo={"response_length": 3, "num_ppo_epochs": 1},
        advantage={"returns": "utterance", "baseline": "mean", "scale": "none", "key": ["prompt", "agent"]},
    )  # fmt: skip
    trainer = build_trainer(settings, quiet=True)
    rounds = []

    def source(played, task):
        """Dialogues of the questions 1, 3 and 6 have reward variance, and those of others do not."""
        rounds.append(len({d.prompt for d in played}))
        return [[float(d.prompt in (1, 3, 6) and d.rollout == 0)] * len(d.utterances) for d in played]

    trainer.player.scorer.sources["label"] = as_source(source)
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.dialogues
    assert rounds == [4, 2, 1, 1]  # 0 to 3; 4 and 6 for 0 and 2; 8 for 4; 12 for 8
    assert list(dict.fromkeys(d.prompt for d in answers)) == [12, 1, 6, 3]  # each where the first one stood
    credits = {}
    for d in answers:
        credits.setdefault(d.prompt, set()).add(d.utterances[0].rewards["credit"])
    assert sum(len(values) == 2 for values in credits.values()) >= 3
    rows = trainer.advantage(batch).token_batches
    assert set(rows) == {"ann", "bob"}


def test_answers_of_replacing_questions_are_not_taken_for_copies_of_replaced_ones(tmp_path):
    from tiny_runs import scheduled_config

    settings = scheduled_config(
        tmp_path, protocol={"name": "chain"}, branching={"how": "fork_every", "group": 2, "resample": 1},
        advantage={"returns": "utterance", "baseline": "mean", "scale": "none", "key": ["prompt", "agent"]},
    )  # fmt: skip
    trainer = build_trainer(settings, quiet=True)
    told = iter(range(10_000))

    def source(played, task):  # dialogues of the first two questions differ, those of the others do not, until replaced
        return [[float(next(told)) if d.prompt < 2 or d.prompt >= 4 else 0.0 for _ in d.utterances] for d in played]

    trainer.player.scorer.sources["label"] = as_source(source)
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.dialogues
    assert {d.prompt for d in answers} == {0, 1, 6, 7}
    rows = trainer.advantage(batch).token_batches
    distinct = {
        (d.prompt, u.sample if u.sample is not None else (d.rollout, u.id)) for d in answers for u in d.utterances
    }
    assert sum(map(len, rows.values())) == len(distinct) == 4 * (2 + 4)
