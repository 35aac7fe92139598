"""What a run did, against what its parts promise: the table of learners, and the audit of PPOv2Trainer."""

import json
import re

import pytest
from one_policy import letters, small_trainer

from trl_ext.learning.audit import LEARNER, Watch, audit, counted, source_counts

BROKEN = {
    ("is not masked", "void"): ({"advantaged": 91, "learned": 0, "due": 1, "tokens": 91}, "had 91 tokens with an advantage"),
    ("chooses", "idle"): ({"tokens": 12, "forced": 12}, "chose none of its 12 tokens"),
    ("is told apart", "idle"): ({"compared": 4, "differ": 0, "learned": 0, "groups": "updates"}, "never had .*, in 4 updates"),
    ("learns", "idle"): ({"due": 3, "tokens": 20, "learned": 0}, "learned from none of its 20 tokens"),
    ("moves", "idle"): ({"learned": 20, "tokens": 20, "moved": 0, "due": 3}, "its weights moved in none of 3 updates"),
    ("has a critic", "idle"): ({"critic": "head", "sequences": 8, "valued": 0}, r"a critic \(head\) .* on no value"),
    ("is told apart", "doubt"): ({"compared": 100, "differ": 19, "learned": 7, "moved": 1, "groups": "groups"}, r"by 81 of 100 groups \(81%\)"),
    ("ends its answers", "doubt"): ({"ends": True, "sequences": 8, "ended": 3}, "did not end 5 of 8 answers"),
    ("scores", "idle"): ({"weight": 1.0, "updates": 2, "values": 0}, "scored nothing"),
    ("tells answers apart", "doubt"): ({"weight": 0.5, "updates": 2, "values": 16, "differs": 0}, "all 16 answers the same value"),
}  # fmt: skip
"""Numbers of a subject that break a promise and no other, and what is said of them."""


@pytest.mark.parametrize("row", LEARNER, ids=lambda row: f"{row.name}, {row.severity}")
def test_each_promise_is_broken_by_its_numbers_and_says_them(row):
    numbers, told = BROKEN[row.name, row.severity]
    [found] = audit({row.kind: {"ann": numbers}}, {}, LEARNER).findings
    assert (found.promise, found.severity) == (row.name, row.severity) and re.search(told, found.text)
    assert not audit({row.kind: {"ann": {}}}, {}, LEARNER).findings, "what was not counted breaks nothing"


def test_counts_add_up_to_a_verdict_a_table_and_a_status():
    built = {"learner": {"a/b": {"groups": "groups", "critic": ""}, "bob": {"groups": "groups"}}}
    names = ("due", "tokens", "learned", "advantaged", "moved", "compared", "differ", "asked", "answered")
    updates = [
        {f"audit/learner/a/b/{name}": n for name, n in zip(names, (1, 10, 4, 4, 1, 2, 1, 3, 3), strict=True)},
        {f"audit/learner/a/b/{name}": n for name, n in zip(names, (1, 10, 0, 0, 0, 2, 0, 3, 3), strict=True)}
        | {"loss": 1},
    ]
    done = audit(built, counted(updates), LEARNER)
    assert str(done.findings[0]).startswith("a/b was told nothing by 3 of 4 groups (75%)")
    assert done.status() == 0 and done.status(strict=True) == 1
    assert done.table()[1] == [
        ["a/b", "6", "6", "1 of 4 (25%)", "4 of 20 (20%)", "1 of 2 (50%)"],
        ["bob", "0", "0", "\u2013", "\u2013", "\u2013"],
    ]
    idle = audit(built, counted(updates[1:]), LEARNER)
    assert [(f.promise, f.severity) for f in idle.findings] == [("is told apart", "idle")], "and not the learning rate"
    assert idle.status() == 1
    assert audit(built, {}, LEARNER).lines() == ["audit: nothing is void, idle or in doubt"]


def test_a_doubt_is_told_once_by_the_counts_of_three_updates():
    built, watch = {"source": {"label": {"weight": 1.0}}}, Watch(LEARNER)
    alike, apart = (source_counts("label", values) for values in ([1.0, 1.0, 1.0], [0.0, 1.0, None]))
    told = [len(list(watch.add(built, counts))) for counts in (alike, alike, apart, alike, alike, alike, alike)]
    assert told == [0, 0, 0, 0, 0, 1, 0]
    assert watch.total["source/label/values"] == 20
    assert source_counts("v", [0.5, 0.5002])["source/v/differs"] == 0.0, "a spread of less than a thousandth"
    again = Watch(LEARNER)
    again.restore(json.loads(json.dumps(watch.state())))
    assert again.total == watch.total and again.logged() == watch.logged()


def ppo(tiny, folder, reward, **options):
    return small_trainer(tiny, folder, reward_funcs=reward, response_length=4, **options)


def ones(completions, **columns):
    return [1.0] * len(completions)


def test_a_run_of_one_policy_counts_what_it_learned_from(tiny, tmp_path):
    trainer = ppo(tiny, tmp_path / "run", letters)
    trainer.train()
    done = trainer.audit
    counts = {key.removeprefix("learner/policy/"): value for key, value in done.counts.items() if "policy" in key}
    assert counts["sequences"] == counts["asked"] == 16 and counts["due"] == counts["moved"] == counts["compared"] == 4
    assert 0 < counts["learned"] <= counts["advantaged"] <= counts["tokens"] == counts["valued"]
    assert done.built["learner"]["policy"]["critic"] == "head" and done.counts["source/letters/values"] == 16
    assert done.status() == 0
    assert json.loads((tmp_path / "run/audit.json").read_text())["counts"] == done.counts


@pytest.mark.parametrize(("reward", "options", "found"), [
    (ones, {"critic": "none"}, {("is told apart", "idle"), ("tells answers apart", "doubt")}),
    (ones, {}, {("is told apart", "doubt"), ("tells answers apart", "doubt")}),
    (letters, {"learning_rate": 0.0}, {("moves", "idle")}),
    (letters, {"max_grad_norm": 1e-30, "optim": "sgd"}, {("moves", "idle")}),
], ids=["equal rewards", "equal rewards and a critic", "no rate", "no step"])  # fmt: skip
def test_a_policy_that_did_not_learn_is_told(tiny, tmp_path, reward, options, found):
    trainer = ppo(tiny, tmp_path / "run", reward, **options)
    trainer.train()
    assert {(f.promise, f.severity) for f in trainer.audit.findings if f.promise != "ends its answers"} == found
