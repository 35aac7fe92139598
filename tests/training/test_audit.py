"""What a team's run did, against what its parts promise: the table of a team, and runs that do not do what they say."""

import json
from dataclasses import dataclass

import pytest
from folders import ROOT
from transformers import TrainerCallback
from typer.testing import CliRunner

from maporl import Agent, Arithmetic, Ask, MultiAgentPPOConfig, MultiAgentPPOTrainer, Protocol, RewardSection, Team
from maporl.cli.main import app
from maporl.config.schema import AdvantageConfig, BranchingSection
from maporl.protocols import Debate
from maporl.report.audit import TEAM, audit_of, dialogue_counts
from maporl.report.page import payload
from maporl.report.read import read_run
from maporl.types import Call, Dialogue, Example, Grade, Result, Stop, Utterance
from trl_ext.learning.audit import LEARNER, audit, counted

BROKEN = {
    ("learns from near answers", "doubt"): ({"due": 3, "far": 2, "learned": 1, "moved": 1},
                                            "learned in 2 of 3 updates from answers of weights that were 0.1 nats a token away"),
    ("learns from all its roles", "doubt"): ({"by_role": 3, "captured": 2}, "was moved by one of its roles for 70% and more in 2 of 3 updates"),
    ("is trained", "idle"): ({"rounds": 2}, "was trained on no row, in 2 rounds"),
    ("asks who learns", "void"): ({"dialogues": 8, "failed": 2, "due": 1}, "asked none of the agents that learn, in 8 dialogues"),
    ("plays", "void"): ({"dialogues": 4, "failed": 4}, "failed in all 4 dialogues"),
    ("plays", "doubt"): ({"dialogues": 4, "failed": 1}, "failed in 1 of 4 (25%) dialogues"),
    ("is answered", "void"): ({"learns": True, "asked": 3, "refused": 3}, "was refused all of its 3 requests"),
    ("is asked", "idle"): ({"learns": True, "updates": 3}, "is to learn and was asked nothing in 3 updates"),
    ("is asked", "doubt"): ({"updates": 3}, "plays and was asked nothing in 3 updates"),
    ("ends its answers", "doubt"): ({"ends": True, "asked": 4, "cut": 3}, "did not end 3 of 4 (75%) answers within the longest length"),
    ("is credited", "doubt"): ({"uncredited": 1, "credited": 7}, "learned nothing from 1 of 8 utterances, which had no credit: nothing "
                               "scored them, and they were shown to nobody who had a credit"),
    ("can be right", "doubt"): ({"learns": True, "wrong": 9}, "was right in none of 9 graded answers"),
    ("can be wrong", "doubt"): ({"learns": True, "right": 9}, "was right in all of 9 graded answers"),
    ("is measured on other questions", "doubt"): ({"overlap": "8 of 8 held-out questions are also training questions"},
                                                  "is measured on what it trains: 8 of 8 held-out questions are also training questions"),
    ("has labels", "doubt"): ({"labels": 50, "unreadable": 2}, "has labels that nobody can read: 2 of the 50 that were tried"),
    ("has one label for a question", "doubt"): ({"conflicting": 3}, "asks 3 questions again with another label"),
    ("is graded", "doubt"): ({"ungraded": 1, "graded": 3}, "could not grade 1 of 4 answers to questions with a label"),
    ("is used", "doubt"): ({"updates": 3}, "was never called in 3 updates"),
    ("works", "doubt"): ({"updates": 3, "calls": 4, "failed": 3}, "failed in 3 of 4 (75%) calls"),
}  # fmt: skip
REFUSED = {
    "program": ({"dialogues": 4, "refused": 2}, "was refused 2 requests in 4 dialogues"),
    "agent": ({"asked": 40, "refused": 2}, "was refused 2 of 40 (5%) requests"),
}


@pytest.mark.parametrize(
    "row", [row for row in TEAM if row not in LEARNER], ids=lambda r: f"{r.kind} {r.name} {r.severity}"
)
def test_each_promise_is_broken_by_its_numbers_and_says_them(row):
    refused = row.name == "is answered" and row.severity == "doubt"
    numbers, told = REFUSED[row.kind] if refused else BROKEN[row.name, row.severity]
    others = {"agent": {"asked": 9} if row.name != "is asked" else {}, "tool": {"updates": 3}}.get(row.kind, {})
    found = audit({row.kind: {"ann": others | numbers}}, {}, TEAM).findings
    assert [(f.promise, f.severity, f.text) for f in found] == [(row.name, row.severity, told)]


def test_what_is_no_count_in_a_damaged_record_is_left_out():
    odd = {str(n): value for n, value in enumerate((None, "9", [1], float("nan"), float("inf"), -1, 10**400, 2**53))}
    records = [{f"audit/learner/ann/{name}": value for name, value in odd.items()}, {"audit/learner/ann/due": 2.0}]
    assert counted([*records, {"audit/learner/ann/due": 1, "loss": 3.0}]) == {"learner/ann/due": 3.0}


def test_what_dialogues_count():
    asked = {"messages": [], "policy": "p"}
    said = [
        Utterance(0, "ann", turn=0, order=0, text="7", stop=Stop.LENGTH, grade=Grade("7", True, ""), **asked),
        Utterance(1, "ann", turn=1, order=1, text="8", grade=Grade("8", False, ""), **asked),
        Utterance(2, "bob", turn=0, order=2, text="?", grade=Grade(None, None, ""), **asked),
        Utterance(3, "bob", turn=1, order=3, text="", answers=False, tags={"refused": "too long"}, **asked),
    ]
    said[1].calls = [
        Call("1.0", "buy", place="shop", result=Result("no", error="raised")),
        Call("1.1", "buy", place="shop", result=Result("yes")),
    ]
    outcome = {
        "answer": None,
        "calls": 4,
        "failure": "ValueError",
        "refused": ["n", "logprobs"],
        "requests": 6,
        "answered": 4,
    }
    counts = dialogue_counts([Dialogue(Example("1", "3+4=", "7"), said, outcome)])
    assert {key: int(number) for key, number in counts.items()} == {
        "run/the run/dialogues": 1, "run/the run/failed": 1,
        "program/the program/dialogues": 1, "program/the program/failed": 1, "program/the program/refused": 2,
        "agent/ann/asked": 2, "agent/ann/cut": 1, "agent/ann/right": 1, "agent/ann/wrong": 1,
        "agent/bob/asked": 2, "agent/bob/refused": 1, "learner/p/asked": 4, "learner/p/answered": 3,
        "task/the task/graded": 2, "task/the task/ungraded": 1,
        "tool/buy/calls": 2, "tool/shop/calls": 2, "tool/buy/failed": 1, "tool/shop/failed": 1,
    }  # fmt: skip


# -- runs -------------------------------------------------------------------------------------------------------------


def letters(dialogues, task):
    """Something that differs from answer to answer."""
    return [[float(sum(map(ord, u.text)) % 7) for u in d.utterances] for d in dialogues]


def ones(dialogues, task):
    return [[1.0 for _ in d.utterances] for d in dialogues]


@dataclass(frozen=True)
class OnlyFirst(Protocol):
    """A protocol that forgets all agents but the first."""

    def play(self, example, agents):
        yield [Ask(agents[0], [{"role": "user", "content": example.question}])]


def team_run(folder, tiny, source=letters, protocol=None, **parts):
    team = Team([Agent(n, *tiny(seed=i, hidden_size=32, layers=1)) for i, n in enumerate(["ann", "bob"])])
    usual = {"total_episodes": 12, "num_ppo_epochs": 1, "kl_coef": 0.0, "save_strategy": "no"}
    options = usual | parts.pop("options", {})
    args = MultiAgentPPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, response_length=3, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    reward = RewardSection(sources={"own": 1.0}, horizon="current", share="individual")
    task = Arithmetic(largest=9)
    protocol = protocol or Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")
    return MultiAgentPPOTrainer(args, team, task, protocol, reward=reward, sources={"own": source}, **parts)


def said_of(folder, *options):
    done = CliRunner().invoke(app, ["audit", str(folder), *options])
    return done.exit_code, done.stdout


def found(done):
    """What is broken but for what every tiny model breaks: its answers are long and wrong."""
    usual = ("ends its answers", "can be right")
    return {(f.severity, f.subject, f.promise) for f in done.findings if f.promise not in usual}


def test_a_healthy_run_counts_each_learner_and_every_place_says_the_same(tiny, tmp_path):
    trainer = team_run(tmp_path / "run", tiny)
    trainer.train()
    done = trainer.audit
    assert done.numbers("agent")["ann"].asked == 24 and done.numbers("source")["own"].values == 48
    ann = done.numbers("learner")["ann"]
    assert (ann.due, ann.moved, ann.compared, ann.differ, ann.asked, ann.answered) == (3, 3, 3, 3, 24, 24)
    assert 0 < ann.learned <= ann.advantaged <= ann.tokens == ann.valued
    assert found(done) == set() and done.status() == 0
    again = audit_of(read_run(tmp_path / "run"))
    assert again.counts == done.counts and again.findings == done.findings
    recorded = json.loads((tmp_path / "run/audit.json").read_text())
    assert recorded["counts"] == done.counts and recorded["note"] == ""
    assert said_of(tmp_path / "run")[0] == 0 and said_of(tmp_path / "run", "--strict")[0] == bool(done.findings)
    assert json.loads(said_of(tmp_path / "run", "--json")[1])["counts"] == done.counts
    shown = payload([read_run(tmp_path / "run")])["runs"][0]["audit"]
    assert [f["text"] for f in shown["findings"]] == [text for _, text in done.told()]
    assert shown["rows"] == done.table()[1]
    assert said_of(tmp_path)[0] == 2, "no run"


@pytest.mark.parametrize(("changes", "idle", "doubts"), [
    ({"protocol": OnlyFirst()}, {("bob", "is asked")}, set()),
    ({"source": ones}, set(), {("own", "tells answers apart"), ("ann", "is told apart"), ("bob", "is told apart")}),
    ({"source": ones, "options": {"critic": "none"}}, {("ann", "is told apart"), ("bob", "is told apart")},
     {("own", "tells answers apart")}),
    ({"options": {"learning_rate": 0.0}}, {("ann", "moves"), ("bob", "moves")}, set()),
], ids=["never asked", "equal rewards and critics", "equal rewards", "no rate"])  # fmt: skip
def test_what_did_not_happen_is_told(tiny, tmp_path, changes, idle, doubts):
    if "learning_rate" in changes.get("options", {}):
        trainer = team_run(tmp_path / "run", tiny)
        for learner in trainer.learners.values():
            learner.optimizer.param_groups[0]["lr"] = 0.0
            learner.scheduler.step = lambda: None
    else:
        trainer = team_run(tmp_path / "run", tiny, **changes)
    trainer.train()
    assert found(trainer.audit) == {("idle", *each) for each in idle} | {("doubt", *each) for each in doubts}
    status, printed = said_of(tmp_path / "run")
    assert status == bool(idle) and all(f"{name} " in printed for name, _ in idle | doubts)


def test_equal_groups_are_counted_though_a_filter_drops_them(tiny, tmp_path):
    """Of a question's four dialogues, one is paid, for the questions below 5 alone."""

    def rare(dialogues, task):
        return [[float(d.rollout == 0 and d.prompt == 0) for _ in d.utterances] for d in dialogues]

    group = AdvantageConfig(
        returns="utterance", baseline="mean", scale="none", key=("prompt", "agent", "turn"), post=("drop_zeros",)
    )
    options = {"options": {"critic": "none"}, "advantage": group, "branching": BranchingSection(group=4)}
    trainer = team_run(tmp_path / "run", tiny, rare, **options)
    trainer.train()
    ann = trainer.audit.numbers("learner")["ann"]
    assert (ann.compared, ann.differ, ann.groups) == (24, 6, "groups")
    assert ("doubt", "ann", "is told apart") in found(trainer.audit)
    (told,) = (f.text for f in trainer.audit.findings if f.subject == "ann" and f.promise == "is told apart")
    assert told == "was told nothing by 18 of 24 groups (75%), in which all credits were equal"


def test_a_resumed_run_goes_on_counting_and_a_cut_one_is_audited_as_far_as_it_came(tiny, tmp_path):
    whole = team_run(tmp_path / "whole", tiny)
    whole.train()

    class Gone(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("the machine is gone")

    saving = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RuntimeError):
        team_run(tmp_path / "cut", tiny, options=saving, callbacks=[Gone()]).train()
    cut = audit_of(read_run(tmp_path / "cut"))
    assert cut.numbers("learner")["ann"].due == 2
    assert (
        said_of(tmp_path / "cut")[1].rstrip().endswith("audited after 2 of 3 updates; the run goes on, or was cut off")
    )
    resumed = team_run(tmp_path / "cut", tiny, options=saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.audit.counts == whole.audit.counts == audit_of(read_run(tmp_path / "cut")).counts


def test_a_run_without_an_audit_is_audited_by_its_records(tiny, tmp_path):
    team_run(tmp_path / "run", tiny, protocol=OnlyFirst()).train()
    (tmp_path / "run/audit.json").unlink()
    kept = [
        {key: value for key, value in json.loads(line).items() if not key.startswith("audit/")}
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    done = audit_of(read_run(tmp_path / "run"))
    assert done.numbers("learner")["ann"].moved == 3 and done.numbers("agent")["ann"].asked == 12
    assert done.note == "by the records of a run without an audit, which say nothing of masks and critics"
    (tmp_path / "run/audit.json").write_text("{")
    status, _ = said_of(tmp_path / "run")
    assert status == 2, "damaged"


def test_the_page_has_each_promise():
    page = (ROOT / "docs/howto/audit.md").read_text()
    rows = [f"| {row.kind} | {row.name} | {row.severity} | {row.remedy} |" for row in TEAM]
    assert [line for line in rows if line not in page] == [] and page.count("\n| ") == len(rows) + 1
