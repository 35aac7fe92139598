"""How the page tells of a program's dialogue: how it ended, and what became of its requests."""

import pytest

from maporl.report.dialogues import entry, flags_of, outcome_of
from maporl.report.read import Recorded
from maporl.types import Dialogue, Example, Utterance

EXAMPLE = Example("e", "2+2=", "4")


def said(**fields):
    return Utterance(0, "ann", "ann", 0, 0, [{"role": "user", "content": "2+2="}], "4", **fields)


@pytest.mark.parametrize(
    ("outcome", "words", "flags"),
    [
        ({"answer": "4", "calls": 2}, "the program returned '4' after 2 calls", []),
        (
            {"answer": None, "failure": "Traceback\nValueError: no city", "calls": 1},
            "the program failed: ValueError: no city after 1 calls",
            ["program failed"],
        ),
        (
            {"answer": "4", "refused": ["n: only 1 is supported"], "calls": 1},
            "the program returned '4' after 1 calls; refused: n: only 1 is supported",
            ["refused"],
        ),
        ({"ann": 1.0, "bob": -1.0}, "ann +1, bob -1", []),
        ({"answer": 4, "calls": "many"}, "answer +4", []),
    ],
)
def test_how_a_dialogue_ended(outcome, words, flags):
    dialogue = Dialogue(EXAMPLE, [said(answers=False)], outcome)
    assert outcome_of(dialogue) == words
    assert [flag for flag in flags_of(dialogue) if flag not in ("unanswered", "all right")] == flags


def test_what_became_of_a_request_and_an_answer():
    changed = "changed: message 2, of the role assistant, is not the one that the agent knows"
    dialogue = Dialogue(EXAMPLE, [said(submitted="four", tags={"history": changed})], {"answer": "four", "calls": 1})
    shown = entry(Recorded(0, 1, "1", dialogue))
    assert shown["said"][0]["notes"] == ["submitted: four", f"history {changed}"]
    assert "history changed" in shown["flags"]
    refused = Dialogue(EXAMPLE, [said(tags={"refused": "n: no", "history": "continued"})])
    assert entry(Recorded(0, 1, "1", refused))["said"][0]["notes"] == ["refused: n: no"]
