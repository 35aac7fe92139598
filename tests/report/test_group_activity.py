"""The bars of groups on the page and in the terminal, and the sentence that says what sets the pace."""

import io
import json

import pytest
from hostile_runs import LEARNS, SAMPLES, of_group, run_with, write_run
from rich.console import Console

from maporl.report.groups import Pace, bars, pace_of, section
from maporl.report.page import about
from maporl.report.read import read_run
from maporl.report.terminal import frame


def test_a_bar_has_the_seconds_of_the_last_updates(tmp_path):
    update = of_group("ann", 10.0, LEARNS, SAMPLES) | of_group("frozen", 10.0, None, SAMPLES)
    run = run_with(tmp_path / "run", [update] * 25)
    steps, found = bars(run)
    assert steps == list(range(6, 26)), "the last 20"
    assert [(bar.group, bar.part) for bar in found] == [("ann", "learner"), ("ann", "engines"), ("frozen", "engines")]
    assert (
        found[0].updates == [{"learning": 7, "sampling": 0, "sending": 0.5, "saving": 0, "dead": 0, "idle": 2.5}] * 20
    )
    shown = section(run)
    assert shown["bars"][1] == {
        "name": "ann, engines", "updates": [[0, 2, 0.5, 0, 0, 7.5]] * 20, "shares": [0, 0.2, 0.05, 0, 0, 0.75]
    }  # fmt: skip
    assert about([run])["runs"][0]["groups"] == json.loads(json.dumps(shown)) | {"kinds": shown["kinds"]}
    titles = {chart["title"]: chart for chart in about([run])["charts"]}
    assert [s["name"] for s in titles["Idle processes"]["series"]] == ["ann, engines = frozen, engines", "ann, learner"]


def test_a_run_without_groups_has_no_bars(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert section(run) is None and "idle" not in shown_in_terminal(run, 100)


@pytest.mark.parametrize(
    "update, pace",
    [
        (
            of_group("ann", 10.0, LEARNS, SAMPLES) | of_group("bob", 10.0, {"learning": 1.0}, {"sampling": 6.0}),
            Pace("ann", "learner", "learning", 0.7),
        ),
        (
            of_group("ann", 10.0, {"learning": 2.0}, {"sampling": 4.0})
            | of_group("bob", 10.0, {"learning": 5.0}, {"sampling": 6.0, "sending": 1.0}),
            Pace("bob", "engines", "sampling", 0.6),
        ),
        (of_group("ann", 10.0, {"learning": 2.0}, {"dead": 6.0}), Pace("ann", "engines", "dead", 0.6)),
        (
            of_group("ann", 10.0, {"learning": 2.0}, {"sampling": 2.5})
            | of_group("bob", 10.0, None, {"sampling": 1.0}),
            Pace("ann", "", "", 0.45),
        ),
    ],
)
def test_the_processes_that_are_idle_least_set_the_pace(update, pace, tmp_path):
    found = pace_of(bars(run_with(tmp_path / "run", [update]))[1])
    assert found[:3] == pace[:3] and found.share == pytest.approx(pace.share)


def test_what_people_wrote_into_the_metrics_does_no_harm(tmp_path):
    update = {"group/ann/seconds": "x", "group/ann/learner/learning": float("nan"), "group/ann/learner/idle": -3}
    assert section(run_with(tmp_path / "run", [update]))["bars"][0]["shares"] == [0] * 6


def shown_in_terminal(run, width):
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(frame(run, width))
    return text.getvalue()


def test_the_terminal_shows_the_time_as_letters(tmp_path):
    run = run_with(tmp_path / "run", [of_group("ann", 10.0, LEARNS, SAMPLES)] * 2)
    lines = [line.rstrip() for line in shown_in_terminal(run, 64).splitlines()]
    assert "L learning  S sampling  W sending  C saving  X dead  . idle" in lines
    assert "ann, learner          " + ("L" * 14 + "W" + "." * 5) * 2 in lines
    assert "ann, engines          " + ("S" * 4 + "W" + "." * 15) * 2 in lines
