"""The report of a run: what it says, what it survives, and what it never lets through."""

import ast
import base64
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from pathlib import Path

import httpx2
import pytest
from hostile_runs import AFTER, HOSTILE, NOTHING, RIGHT, WRONG, data_of, debate, utterance, write_run
from typer.testing import CliRunner

from maporl.cli import look as cli
from maporl.cli.main import app
from maporl.errors import RunError
from maporl.evaluation.metrics import Difference
from maporl.integrations.hub.push import push
from maporl.report.charts import charts, compared
from maporl.report.counts import counts_of
from maporl.report.dialogues import entry, flags_of
from maporl.report.failures import failures
from maporl.report.live import LivePage, PageSeat
from maporl.report.metric_panels import ROWS, lines_of
from maporl.report.page import payload, write_report
from maporl.report.read import Recorded, RunReader, read_run
from maporl.report.story import story
from maporl.report.terminal import frame, sparkline
from maporl.text import LONGEST, visible
from maporl.types import (
    Call,
    Dialogue,
    Example,
    Grade,
    Result,
    Stop,
    Trace,
    TurnEnd,
    Utterance,
    from_json,
    from_record,
    to_json,
    to_record,
    without_tokens,
)

NAN = float("nan")


# -- what it says -------------------------------------------------------------------------------------------------


def test_the_page_says_whether_talking_helps_and_where_the_team_fails(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    told = {part["title"]: part["text"] for part in story(run)}
    # the last turn of all minus bob's first answers: 7 x 0, -1/2, 2 x 0
    assert told["Does talking help?"] == (
        "What talking is worth beside what one agent alone could do. Held-out questions, after training. at least one "
        "agent, first turn: 80.0%. at least one agent, last turn: 80.0%. all agents in the last turn minus bob, the best, "
        "in its first, in points: -5.0 (-14.8 to +4.8)."
    )
    failed = failures(run)
    assert failed["scope"] == "10 held-out questions after training"
    assert [(line["text"], line["keys"]) for line in failed["lines"]] == [
        ("Nobody is right at the end on 2 of 10 questions (20.0%).", ["after/q8", "after/q9"]),
        ("On 1 of 10 questions (10.0%) one agent is right at the end and another is wrong.", ["after/q7"]),
        ("On 1 of 10 questions (10.0%) an agent gave up a right answer on the way.", ["after/q7"]),
        ("2 of 5 wrong last answers (40.0%) could not be read.", ["after/q9"]),
    ]
    [table] = failed["groups"]
    assert (table["title"], table["column"]) == ("Length of the right answer", "characters")
    assert [(r["name"], r["questions"], round(r["now"], 3), r["before"]) for r in table["rows"]] == [
        ("1", 9, 0.833, 0.0),
        ("2", 1, 0.0, 0.0),
    ]


def test_a_difference_is_judged_question_by_question(tmp_path):
    """25 of 256 questions improve and none gets worse. The Wilson intervals overlap, and yet it is not chance."""
    same = [debate(f"r{n}", (RIGHT, RIGHT), (RIGHT, RIGHT)) for n in range(154)]
    wrong = [debate(f"w{n}", (WRONG, WRONG), (WRONG, WRONG)) for n in range(102)]
    better = [debate(f"w{n}", (WRONG, WRONG), (RIGHT, RIGHT)) for n in range(25)]
    run = read_run(write_run(tmp_path / "run", before=same + wrong, after=same + better + wrong[25:]))
    gain = counts_of(run).gain
    # 25 ones in 256: 0.09766 -+ 1.96 x sqrt(0.09766 x 0.90234 x 256 / 255 / 256)
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.09766, 0.06123, 0.13409), abs=2e-5) and gain.sign == 1
    assert gain == counts_of(run).talking
    one = Difference.of([(0, 0)] * 255 + [(0, 1)])
    assert one.sign == 0 and Difference.of([(1, 0)] * 3).sign == -1


def specialists(name, kind, first, second):
    """ann and bob, who are shown each other's first answers; each turn says which of the two are right."""
    utterances = [
        utterance(i, agent, turn, "2" if ok else "3", ok, parents=(1 - i % 2,) if turn else ())
        for i, (turn, agent, ok) in enumerate(
            (t, a, ok) for t, pair in enumerate((first, second)) for a, ok in zip(("ann", "bob"), pair, strict=True)
        )
    ]
    return Dialogue(Example(name, f"{name}=", "2", {"skill": kind}), utterances)


def test_the_page_says_what_specialists_know_and_when_they_listen(tmp_path):
    before = [
        *(specialists(f"n{n}", "next", (True, False), (True, n == 0)) for n in range(4)),
        *(specialists(f"r{n}", "reversed", (False, True), (False, n != 0)) for n in range(4)),
    ]
    after = [
        *(specialists(f"n{n}", "next", (True, n == 3), (n != 2, n != 0)) for n in range(4)),
        *(specialists(f"r{n}", "reversed", (False, True), (n < 2, True)) for n in range(4)),
    ]
    more = {"warm_start": {"steps": 300}, "branching": {"how": "independent", "group": 4}}
    run = read_run(write_run(tmp_path / "run", before=before, after=after, **more))
    told = {p["title"]: p["text"] for p in story(run)}
    assert told["Who knows what?"].endswith(" ann: next 100.0%, reversed 0.0%. bob: next 25.0%, reversed 100.0%.")
    # ann was wrong 4 times beside bob's right answers; beside n3, where both were right, nothing was to be gained or
    # lost
    was, then = "it was", "then right, before training"
    assert told["When do they listen?"].endswith(
        f"ann: {was} wrong, shown a right answer, cases 4, {then} 0.0%, then right, after training 50.0%. "
        f"ann: {was} right, shown a wrong answer, cases 3, {then} 100.0%, then right, after training 66.7%. "
        f"bob: {was} wrong, shown a right answer, cases 3, {then} 25.0%, then right, after training 66.7%. "
        f"bob: {was} right, shown a wrong answer, cases 4, {then} 75.0%, then right, after training 100.0%."
    )
    assert told["How it was trained"] == (
        "Updates: 4 updates of 8 questions each, each played 4 times. Warm start: A supervised warm start of 300 steps on "
        "written answers came first, and \u201cbefore training\u201d means after it."
    )


def move(number, agent, text, won, paid, state):
    return Utterance(
        number, agent, "shared", number // 2, number, [], text, grade=Grade(text, won, "the game's end"),
        rewards={"env": paid}, tags={"game": "kuhn_poker", "state": state},
    )  # fmt: skip


def test_a_game_is_told_as_a_game(tmp_path):
    won = [Dialogue(Example(f"g{n}", "", ""), [move(0, "first", "b", True, 1, "0: K"), move(1, "second", "p", False, -1, "1: Q")],
                    {"first": 1.0, "second": -1.0}) for n in range(3)]  # fmt: skip
    lost = [Dialogue(Example("g3", "", ""), [move(0, "first", "--5", False, -1.5, "0: Q")], "illegal")]
    run = read_run(write_run(tmp_path / "run", before=None, after=won + lost, protocol={"name": "game"}))
    told = {part["title"]: part["text"] for part in story(run)}
    assert "Does talking help?" not in told
    assert told["The team"] == "Agent ann: tiny llama, 2 layers. Agent bob: org/model, LoRA. Game: kuhn_poker."
    assert told["What it learned"] == (
        "kuhn_poker: 4 held-out games after training. Ended by an illegal move: 25.0% (4.6 to 69.9%). first is paid: +0.38 "
        "(-0.85 to +1.60 a game). second is paid: -1.00 (-1.00 to -1.00 a game)."
    )
    assert [line["text"] for line in failures(run)["lines"]] == [
        "1 of 4 games (25.0%) ended with an illegal move.",
        "first moved illegally in 1 of 4 games (25.0%) in which it moved.",
    ]
    shown = payload([run])["dialogues"]
    assert (shown[0]["question"], shown[0]["outcome"], shown[0]["flags"]) == (
        "kuhn_poker: 0: K | 1: Q",
        "first +1, second -1",
        [],
    )
    assert (shown[3]["outcome"], shown[3]["flags"]) == ("illegal", ["illegal"])
    assert "Agreement" not in {chart["title"] for chart in charts(run)}


def test_policies_that_learn_by_different_losses_are_not_drawn_on_one_axis(tmp_path):
    folder = write_run(tmp_path / "run", training={"max_grad_norm": 1.0})
    more = {"ann/grad_norm": 2.0, "bob/grad_norm": 9.0, "ann/policy/entropy_avg": 1.0, "bob/policy/entropy_avg": 2.0}
    lines = [json.loads(line) | more for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ann = {"objective": "ppo", "returns": "token_gae", "own": {}}
    bob = {"objective": "reinforce", "returns": "utterance", "own": {"max_grad_norm": 0.5}}
    drawn = {chart["title"]: chart for chart in charts(read_run(folder), {"ann": ann, "bob": bob})}
    norms = {title: chart for title, chart in drawn.items() if title.startswith("Gradient norm")}
    assert {title: [one["name"] for one in chart["series"]] for title, chart in norms.items()} == {
        "Gradient norm (ppo, token_gae)": ["ann"], "Gradient norm (reinforce, utterance)": ["bob"],
    }  # fmt: skip
    assert [chart["limit"][0] for chart in norms.values()] == [1.0, 0.5]
    assert [one["name"] for one in drawn["Entropy"]["series"]] == ["ann, ppo, token_gae", "bob, reinforce, utterance"]
    alike = {chart["title"]: chart for chart in charts(read_run(folder), {"ann": ann, "bob": ann})}
    assert [one["name"] for one in alike["Gradient norm"]["series"]] == ["ann", "bob"]


def test_charts_have_intervals_over_the_questions_of_an_update(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    by_title = {chart["title"]: chart for chart in charts(run)}
    accuracy = by_title["Accuracy, by turn"]
    assert accuracy["steps"] == [0, 1, 2, 3, 4] and accuracy["share"]
    second = next(s for s in accuracy["series"] if s["name"] == "turn 2")
    assert second["values"] == [None, 0.1, 0.2, 0.3, 0.4]
    # Wilson of 0.8 of 8 by hand: 0.2298 -+ 0.2146
    assert (second["low"][1], second["high"][1]) == pytest.approx((0.0152, 0.4443), abs=2e-4)
    held_out = next(s for s in accuracy["series"] if s["name"] == "turn 2, held out")
    # evaluations before and after training are its ends
    assert held_out["values"] == [0.0, None, 0.3, None, 0.75] and held_out["held_out"] and held_out["low"] is None
    kl = by_title["KL to the reference"]
    assert {s["name"]: s["values"] for s in kl["series"]} == {"ann": [0.01, 0.02, 0.03, 0.04], "bob": [None] * 4}, (
        "NaN is not a number"
    )
    assert {"Reward, by name", "Gradient norm", "Tokens per second", "Memory", "Seconds per update"} <= by_title.keys()


def test_the_lines_of_a_panel_are_in_order_and_named():
    names = ["eval_accuracy/turn_1", "accuracy/turn_10", "accuracy/turn_2", "accuracy/turn_2/ann", "reward/my_score", "reward/score",
             "change/1_to_2/improved", "change/1_to_2/declined", "change/1_to_2/same", "my_policy/objective/kl", "memory/peak",
             "ann/measure/trust"]  # fmt: skip
    found = {panel.title: [(line.name, line.label) for line in lines_of(panel, names)] for panel in ROWS}
    assert found["Accuracy, by turn"] == [
        ("accuracy/turn_2", "turn 2"),
        ("accuracy/turn_10", "turn 10"),
        ("eval_accuracy/turn_1", "turn 1"),
    ]
    assert found["Reward, by name"] == [("reward/my_score", "my score"), ("reward/score", "score")]
    assert found["Corrected and spoiled answers"] == [
        ("change/1_to_2/declined", "turn 1 to 2, spoiled"),
        ("change/1_to_2/improved", "turn 1 to 2, corrected"),
    ]
    assert found["KL to the reference"] == [("my_policy/objective/kl", "my policy")]
    assert found["Memory"] == [("memory/peak", "peak")] and found["Agreement"] == []
    assert found["Measures of the objective"] == [("ann/measure/trust", "ann, trust")]


@pytest.mark.parametrize(
    "dialogue, flags",
    [
        (debate("a", (WRONG, RIGHT), (RIGHT, RIGHT)), ["corrected", "all right"]),
        (debate("b", (RIGHT, RIGHT), (RIGHT, WRONG)), ["spoiled", "disagreed", "mixed"]),
        (debate("c", (NOTHING, WRONG), (NOTHING, WRONG)), ["disagreed", "all wrong", "unreadable"]),
        (debate("d", (WRONG, WRONG), (WRONG, WRONG), stop=Stop.LENGTH), ["all wrong", "cut off"]),
        (Dialogue(Example("e", "e=", "2"), []), ["unanswered"]),
    ],
)
def test_what_one_may_filter_by(dialogue, flags):
    assert flags_of(dialogue) == flags


def test_calls_and_penalties_are_shown_and_can_be_filtered_by():
    dialogue = debate("a", (RIGHT, RIGHT), (RIGHT, RIGHT))
    dialogue.utterances[0].calls = [
        Call("0.0", "buy", {"what": "tea", "count": 2}, "shop", Result("You have 2.", reward=0.5, seconds=0.25)),
        Call("0.1", "", {}, None, Result("it is not JSON", error="unread")),
        Call("0.2", "look"),
    ]
    dialogue.utterances[1].turn_end = TurnEnd.LIMIT
    dialogue.lost = ("shop",)
    dialogue.utterances[0].rewards["penalty/short"] = -0.5
    dialogue.example.meta["level"] = 3
    shown = entry(Recorded(0, 7, "7/a", dialogue))
    assert shown["flags"] == ["penalised", "all right", "called", "call failed", "call unread", "no calls left", "lost"]
    assert (shown["key"], shown["kind"], shown["when"]) == ("0/7/a", "3", 7)
    assert shown["said"][0]["calls"] == [
        {"line": 'shop.buy(what="tea", count=2)', "result": "You have 2.", "error": None, "reward": 0.5, "seconds": 0.25, "left_out": 0},
        {"line": "a call that could not be read", "result": "it is not JSON", "error": "unread", "reward": None, "seconds": 0.0, "left_out": 0},
        {"line": "look()", "result": None, "error": None, "reward": None, "seconds": None, "left_out": 0},
    ]  # fmt: skip


def test_runs_are_compared_with_what_differs_in_their_configurations(tmp_path):
    one = read_run(write_run(tmp_path / "one/run", updates=4))
    other = {"training": {"learning_rate": 1e-4}, "output_dir": "x", "seed": None, "task": {"name": "gsm8k"}}
    two = read_run(write_run(tmp_path / "two/run", updates=6, **other))
    content = payload([one, two])
    assert [run["name"] for run in content["runs"]] == ["one/run", "two/run"]
    versus = content["comparison"]
    assert versus["setup"] == [
        {"key": "task.name", "values": ['"toy_sum"', '"gsm8k"']}, {"key": "training.learning_rate", "values": ["\u2013", "0.0001"]},
        {"key": "updates", "values": ["4", "6"]},
    ]  # fmt: skip
    final = next(chart for chart in compared([one, two]) if chart["title"] == "Final turn, in training")
    assert [s["name"] for s in final["series"]] == ["one/run", "two/run"]
    assert final["series"][0]["values"] == [0.1, 0.2, 0.3, 0.4, None, None]
    assert {d["run"] for d in content["dialogues"]} == {0, 1} and not versus["comparable"]
    rows = {row["key"]: row["values"] for row in versus["results"]}
    assert rows["updates"] == ["4", "6"] and rows["points by training"][0] == "+75.0 (+48.7 to +100.0)"
    assert versus["verdict"] == "", "tasks differ"


# -- what it survives ---------------------------------------------------------------------------------------------


def test_a_report_is_written_beside_the_run_and_again_over_itself_but_over_nothing_else(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", dialogues=AFTER)
    file = write_report([folder])
    assert file == folder / "report.html" and write_report([folder]) == file
    content = data_of(file.read_text())
    assert content["recorded"] == 30 and len(content["dialogues"]) == 30
    recorded = [4] * 2 + [3] * 2 + [2] * 3 + [1] * 3
    assert [d["when"] for d in content["dialogues"]] == ["after"] * 10 + ["before"] * 10 + recorded
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    with pytest.raises(RunError, match="exists and is not a report; nothing was overwritten"):
        write_report([folder], mine)
    assert mine.read_text() == "<p>mine</p>"
    monkeypatch.chdir(tmp_path)
    assert write_report([folder, folder]) == Path("comparison.html")
    for place, message in (
        (tmp_path / "none/x.html", "cannot be written: No such file"),
        (folder, "is a folder; give"),
    ):
        with pytest.raises(RunError, match=message):
            write_report([folder], place)
    assert not list(folder.glob(".*"))


def test_text_of_models_is_data_and_nothing_else(tmp_path):
    dialogue = debate(HOSTILE, (RIGHT, RIGHT), (RIGHT, RIGHT), label=HOSTILE, text=HOSTILE)
    folder = write_run(tmp_path / "run", after=[dialogue], task={"name": HOSTILE})
    page = write_report([folder]).read_text()
    assert "<img" not in page and "title='owned'" not in page and "\u202e" not in page
    shown = data_of(page)["dialogues"][0]["said"][0]["text"]
    assert shown == HOSTILE.replace("\u202e", "\u27e6U+202E\u27e7").replace("\x1b", "\u241b")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    assert (
        "default-src 'none'" in policy
        and "'unsafe-inline'" not in policy.split("style-src")[0]
        and "connect-src 'none'" in policy
    )
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = re.findall(r"'sha256-([^']*)'", policy)
    assert [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts] == hashes, (
        "no other script runs"
    )
    assert not re.search(r'(src|href)="(https?:)?//', page), "nothing is fetched"


def test_control_characters_long_texts_and_other_scripts_are_shown():
    assert visible("a\x00\x07\x7f\n\tb") == "a\u2400\u2407\u2421\n\tb"
    assert visible("שלום 👩‍👩‍👧 emoji") == "שלום 👩‍👩‍👧 emoji"
    assert visible("\u2067x\ufeff") == "\u27e6U+2067\u27e7x\u27e6U+FEFF\u27e7"
    long = visible("x" * 1_000_000)
    assert len(long) < LONGEST + 200 and "[... 980,000 characters are left out here" in long


@pytest.mark.slow
def test_a_transcript_of_200_000_tokens_is_shown_with_its_middle_left_out(tmp_path):
    words = ["word "] * 200_000
    numbers = [0.5] * len(words)
    long = debate("q", (RIGHT, RIGHT), (RIGHT, RIGHT), text="".join(words), trace=Trace(words, numbers, numbers))
    folder = write_run(tmp_path / "run", dialogues=[long], before=None, after=None)
    file = write_report([folder])
    [dialogue] = data_of(file.read_text())["dialogues"]
    assert "980,000 characters are left out" in dialogue["said"][0]["text"] and dialogue["said"][0]["trace"] is None
    assert file.stat().st_size < 1e6


def test_a_longer_run_shows_its_last_evaluation_and_an_even_selection(tmp_path):
    folder = write_run(tmp_path / "run", updates=100, dialogues=[AFTER[0]] * 400, before=None)
    content = payload([read_run(folder)], most=60)
    assert content["recorded"] == 410 and len(content["dialogues"]) == 60
    steps = [d["when"] for d in content["dialogues"] if d["when"] != "after"]
    assert len(steps) == 50 and steps == sorted(steps, reverse=True) and steps[0] == 100 and steps[-1] <= 3


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda f: None, "no such folder; give a run's output_dir"),
        (lambda f: f.mkdir(), "is not a run: it has neither config.yaml nor metrics.jsonl nor dialogues.jsonl, and is empty"),
        (lambda f: (f.mkdir(), (f / "notes.txt").write_text("x")), "and holds notes.txt"),
        (lambda f: (f.mkdir(), (f / "config.yaml").write_text("a: [")), r"config.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused_in_one_line(tmp_path, make, message):
    make(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 1 and re.search(message, result.output), result.output
    assert result.output.startswith("error: ") and result.output.count("\n") == 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda f: (f.mkdir(), (f / "metrics.jsonl").write_text("{}\n")), r"metrics.jsonl: a record has no 'step'; it was not written by this version"),
        (lambda f: (f.mkdir(), (f / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')), r"metrics.jsonl: line 1 is damaged"),
        (lambda f: (f.mkdir(), (f / "metrics.jsonl").write_bytes(b"\xff\xfe\n\n")), r"metrics.jsonl: line 1 is damaged"),
        (lambda f: (f.mkdir(), (f / "dialogues.jsonl").write_text('{"step": 1}\n')), r"dialogues.jsonl: a record has no 'example'"),
        (lambda f: (f.mkdir(), (f / "config.yaml").write_text(""), (f / "evaluation_after.json").write_text("{}")), "evaluation_after.json: has no 'turns'"),
        (lambda f: (f.mkdir(), (f / "config.yaml").write_text(""), (f / "evaluation_after.json").write_text('{"turns": [3], "flips": []}')), r"evaluation_after.json: is not an evaluation \(TypeError"),
        (lambda f: write_run(f, after=None) and (f / "evaluation_after.json").write_text((f / "evaluation_before.json").read_text().replace('"count": 0.0, "total": 10', '"count": 11, "total": 10')), r"is not an evaluation \(ValueError\('11 of 10 cannot be a share'\)\)"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_left_out_and_named(tmp_path, caplog, make, message):
    """The page is written all the same, and it and the terminal say what it lacks."""
    make(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0 and re.search(message, caplog.text), result.output
    told = data_of((tmp_path / "run/report.html").read_text())["runs"][0]["story"][-1]
    assert told["title"] == "What could not be read?" and re.search(message, told["text"]), told
    with pytest.raises(RunError, match=message):
        push(tmp_path / "run", "org/team", dry_run=True)


def test_a_damaged_record_hides_no_other(tmp_path):
    folder = write_run(tmp_path / "run", dialogues=AFTER)
    whole = read_run(folder).recorded
    lines = (folder / "dialogues.jsonl").read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | {"utterances": 5})
    (folder / "dialogues.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(folder)
    assert run.recorded == whole - 1 and len(run.damaged) == 1


def test_a_run_that_was_cut_off_or_has_not_begun_has_a_report(tmp_path):
    folder = write_run(tmp_path / "run", dialogues=AFTER, before=None, after=None)
    with (folder / "dialogues.jsonl").open("ab") as file:
        file.write('{"step": 5, "example": {"id": "é'.encode()[:-1])  # in the middle of a character
    told = {part["title"]: part["text"] for part in story(read_run(folder))}
    assert told["How it was trained"].startswith("Updates: 4 of 4 updates")
    assert "No evaluation after training is recorded." in told["What it learned"]
    assert failures(read_run(folder))["scope"] == "10 dialogues recorded in the last 10 updates"
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.yaml").write_text("updates: 3")
    content = payload([read_run(tmp_path / "new")])
    assert content["charts"] == [] and content["runs"][0]["story"][-1]["text"] == "Nothing has been trained yet."
    assert "Nothing has been trained yet." in write_report([tmp_path / "new"]).read_text()


ODD = {
    "example": {"id": 7, "question": None, "answer": 2, "meta": ["no mapping"]},
    "utterances": [
        {"agent": "ann", "turn": 0, "text": None, "stop": "tired", "messages": [None, {"content": 5}], "trace": {"pieces": ["a"]}},
        {"agent": "bob", "turn": 0, "text": 3, "grade": {"answer": 2, "correct": True}, "rewards": {"score": None, "label": 1}},
        {"agent": "bob", "turn": 1, "grade": {"answer": None, "correct": None}, "rewards": [], "tags": "none", "parents": None},
        {"agent": "cy", "turn": 1, "trace": {"pieces": ["a", 1], "logprobs": [NAN, "x"], "advantages": [0.5, None]}, "role": ""},
    ],
    "outcome": {"ann": NAN, "bob": 1},
}  # fmt: skip


def test_a_record_that_somebody_has_edited_is_shown_as_far_as_it_goes(tmp_path):
    folder = write_run(tmp_path / "run", before=None, after=None)
    (folder / "dialogues.jsonl").write_text(json.dumps({"step": 1, **ODD}) + "\n")
    content = data_of(write_report([folder]).read_text())
    [shown] = content["dialogues"]
    told = ("key", "id", "question", "label", "kind", "outcome", "flags")
    assert [shown[name] for name in told] == ["0/1/7", "7", "", "2", None, "bob +1", ["all right"]]
    ann, bob, again, cy = shown["said"]
    assert (ann["text"], ann["stop"], ann["heard"], ann["trace"]) == ("", "eos", [["", "5"]], None)
    assert (bob["text"], bob["answer"], bob["correct"], bob["reason"]) == ("3", "2", True, "")
    assert bob["rewards"] == {"score": None, "label": 1.0} and again["rewards"] == {}
    assert (again["text"], again["answer"], again["correct"]) == ("", None, None)
    assert cy["trace"] == {"pieces": ["a", "1"], "logprobs": [None, None], "advantages": [0.5, None], "values": None}
    assert cy["role"] is None


def test_records_of_before_traces_and_new_keys_are_read():
    record = json.loads(to_json(AFTER[0]))
    for u in record["utterances"]:
        del u["trace"], u["sample"], u["fresh"]
        u["mood"] = "of a later version"
    record["weather"] = "fine"
    kept = json.dumps(record)
    assert from_record(record) == AFTER[0] == from_json(kept) and json.dumps(record) == kept
    assert json.dumps(to_record(AFTER[0]), ensure_ascii=False) == to_json(AFTER[0])
    del record["utterances"][0]["text"]
    with pytest.raises(TypeError, match="'text'"):
        from_record(record)
    traced = debate("t", (RIGHT, RIGHT), (RIGHT, RIGHT), trace=Trace(["a"], [-0.5], [1.0]))
    assert from_json(to_json(traced)) == traced


# -- while it goes on ---------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path):
    """(folder, seat, url) of a run that is watched."""
    folder, seat = write_run(tmp_path / "run", dialogues=AFTER[:2], after=None), PageSeat()
    page = LivePage(folder, 0, seat)
    thread = threading.Thread(target=page.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield folder, seat, page.url
    seat.close()
    page.shutdown()
    page.server_close()


def test_the_live_page_is_data_that_grow_with_the_run(live):
    folder, _, url = live
    page = httpx2.get(url)
    assert 'data-live="yes"' in page.text and "connect-src &#39;self&#39;" in page.text
    first = httpx2.get(f"{url}data").json()
    assert first["recorded"] == len(first["dialogues"]) == 12 and first["fresh"]
    where = f"epoch={first['epoch']}&after={first['last']}"
    assert httpx2.get(f"{url}data?{where}").json()["dialogues"] == []
    with (folder / "dialogues.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, **to_record(AFTER[9])}) + "\n" + '{"step": 10')
    time.sleep(0.5)  # a page takes at most a tenth of the time
    again = httpx2.get(f"{url}data?{where}").json()
    assert [d["key"] for d in again["dialogues"]] == ["0/9/q9"] and again["recorded"] == 13 and not again["fresh"]
    kept = [json.dumps({"step": 1, **to_record(AFTER[0])})]
    (folder / "dialogues.tmp").write_text(kept[0] + "\n")
    (folder / "dialogues.tmp").replace(folder / "dialogues.jsonl")  # resumed from an earlier checkpoint
    time.sleep(0.5)
    again = httpx2.get(f"{url}data?{where}").json()
    assert again["fresh"] and again["epoch"] == 1 and again["recorded"] == 11


def test_a_reader_reads_only_what_is_new_and_keeps_the_newest(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", dialogues=AFTER, before=None, after=None)
    reader = RunReader(folder, keep=4)
    assert len(reader.read().dialogues) == 4 and reader.read().recorded == 10
    parsed = []
    monkeypatch.setattr(
        "trl_ext.files.jsonl.json.loads", lambda line, known=json.loads: parsed.append(line) or known(line)
    )
    with (folder / "dialogues.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, **to_record(AFTER[9])}) + "\n")
    parsed.clear()
    run = reader.read()
    assert len(parsed) == 1 and run.recorded == 11 and [one.when for one in run.dialogues][-1] == 9
    assert [one.number for one in run.dialogues] == [7, 8, 9, 10], "numbers count what is not kept, too"


def test_tokens_are_dropped_while_reading(tmp_path):
    dialogue = debate("q", (RIGHT, RIGHT), (RIGHT, RIGHT), prompt_ids=[1], response_ids=[2], logprobs=[-0.5])
    [one] = read_run(write_run(tmp_path / "run", dialogues=[dialogue], before=None, after=None)).dialogues
    assert one.dialogue == without_tokens(dialogue)


def test_the_live_page_is_for_this_machine_and_for_who_knows_its_address(live):
    _, _, url = live
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{16}/", url)
    root = url.rsplit("/", 2)[0]
    assert httpx2.get(f"{url}data", headers={"Host": "evil.example"}).status_code == 403
    assert httpx2.get(f"{url}data", headers={"Host": "localhost:9000"}).status_code == 200, "a forwarded port"
    for address in (
        f"{root}/",
        f"{root}/data",
        f"{root}/{'x' * 16}/data",
        f"{url}config.yaml",
        f"{url}../../etc/passwd",
    ):
        assert httpx2.get(address).status_code == 404, address
    assert httpx2.get(url).headers["X-Frame-Options"] == "DENY"
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):  # what a form of another site can send
        posted = httpx2.post(f"{url}seat", content='{"number": 1, "text": "x"}', headers={"Content-Type": kind})
        assert posted.status_code == 403, kind
    for body in ('{"number": 1e999, "text": "x"}', "[" * 60_000, "[]"):
        assert (
            httpx2.post(
                f"{url}seat", content=body, headers={"Content-Type": "application/json; charset=utf-8"}
            ).status_code
            == 400
        )


@pytest.mark.parametrize(("path", "host", "status"), [
    ("{token}/data", "127.0.0.1", 200), ("{token}/data", "[::1", 400), ("{token}/data", "", 400), ("{token}/data", "a@b", 400),
    ("{token}/data", "127.0.0.1.nip.io", 403), ("{token}/data", "localhost:99999999", 400), ("/[", "localhost", 404),
    ("{token}/data?epoch=[::1", "localhost", 200), ("{token}/\xff", "localhost", 404), ("/[::1/data", "localhost", 404),
])  # fmt: skip
def test_a_malformed_address_gets_an_answer_and_no_traceback(live, capfd, path, host, status):
    where = httpx2.URL(live[2])
    with socket.create_connection((where.host, where.port), timeout=10) as connection:
        asked = f"GET /{path.format(token=where.path.strip('/'))} HTTP/1.0\r\nHost: {host}\r\n\r\n"
        connection.sendall(asked.encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split(b" ", 2)[1] == str(status).encode(), answer[:200]
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_is_typed_into_the_page(live):
    _, seat, url = live
    answers = []
    seat.show("1+1=")
    thread = threading.Thread(target=lambda: answers.append(seat.read("ann> ")))
    thread.start()
    while not (asked := httpx2.get(f"{url}seat").json()):
        time.sleep(0.01)
    assert asked == {"number": 1, "prompt": "ann", "lines": ["1+1="]}
    assert httpx2.post(f"{url}seat", json={"number": 7, "text": "2"}).status_code == 409
    assert httpx2.post(f"{url}seat", json={"number": 1, "text": "  "}).status_code == 400
    assert httpx2.post(f"{url}seat", json={"number": 1}).status_code == 400
    assert httpx2.post(f"{url}seat", json={"number": 1, "text": "x" * 70_000}).status_code == 413
    assert httpx2.post(f"{url}seat", json={"number": 1, "text": "two"}).status_code == 200
    thread.join(5)
    assert answers == ["two"] and httpx2.get(f"{url}seat").json() == {}
    assert not seat.submit(1, "again"), "an answer is given once"
    seat.show("it is over")
    seat.close()
    assert httpx2.get(f"{url}seat").json() == {"over": True, "lines": ["it is over"]}
    with pytest.raises(EOFError):
        seat.read("ann> ")


def test_a_port_in_use_is_named(live, tmp_path):
    folder, _, url = live
    result = CliRunner().invoke(app, ["watch", str(folder), "--port", url.split(":")[2].split("/")[0], "--no-browser"])
    assert result.exit_code == 1 and re.match(r"error: port \d+ is in use; choose another with --port", result.output)


def test_the_terminal_shows_a_run_in_60_columns(tmp_path, monkeypatch):
    folder = write_run(
        tmp_path / "run", dialogues=[debate(HOSTILE, (WRONG, RIGHT), (RIGHT, RIGHT), text=HOSTILE)], after=None
    )
    monkeypatch.setenv("COLUMNS", "60")
    result = CliRunner().invoke(app, ["watch", str(folder), "--tui"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.split("\n"))) <= 60 and "\x1b[31m" not in result.output
    for words in (
        "What it learned",
        "Accuracy, by turn",
        "turn 2",
        "40.0%",
        "a dialogue of update 1",
        "Ctrl-C ends this view",
    ):
        assert words in result.output, words
    assert sparkline([1.0, 2.0, 3.0], 3) == "▁▅█" and sparkline([], 5) == "" and sparkline([None, 2.0], 5) == "▁"
    assert frame(read_run(folder), 200).renderables


def test_without_a_browser_the_address_is_said(tmp_path, monkeypatch, capsys):
    def none(*arguments):
        raise webbrowser.Error

    monkeypatch.setattr(webbrowser, "get", none)
    cli.open_page("http://127.0.0.1:1/", True)
    assert capsys.readouterr().out.split("\n")[:2] == [
        "http://127.0.0.1:1/",
        "no browser was found here; open the address in one on this machine",
    ]


def test_no_command_line_and_no_other_user_sees_the_token(tmp_path):
    """A browser that notes what it is given, of a real ``maporl watch``."""
    folder, noted = write_run(tmp_path / "run"), tmp_path / "noted"
    browser = tmp_path / "firefox"
    browser.write_text(
        f"#!{sys.executable}\nimport os, sys, urllib.parse\nfile = urllib.parse.urlsplit(sys.argv[1]).path\n"
        "seen = [*sys.argv[:2], oct(os.stat(file).st_mode & 0o777), open(file).read()]\n"
        f"open({str(noted)!r} + '~', 'w').write(repr(seen))\nos.rename({str(noted)!r} + '~', {str(noted)!r})\n"
    )
    browser.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    found = {"BROWSER": "firefox", "DISPLAY": ":0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {**os.environ, **found, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "maporl", "watch", str(folder), "--port", "0"]
    watching = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        # a shell starts what runs in the background with SIGINT ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 120
        while not noted.exists():
            assert time.monotonic() < deadline and watching.poll() is None
            time.sleep(0.05)
        program, given, mode, content = ast.literal_eval(noted.read_text())
        url = re.search(r'url=(http://127\.0\.0\.1:\d+/([^/]+)/)"', content)
        assert mode == "0o600" and given.startswith("file:///") and url[2] not in program + given
        assert url[2] not in Path(f"/proc/{watching.pid}/cmdline").read_text()
        assert httpx2.get(url[1]).status_code == 200
        watching.send_signal(signal.SIGINT)
        watching.wait(60)
        assert not list(temporary.glob("maporl-*"))
    finally:
        watching.kill()
