"""What is counted of calls of tools, and the filter for dialogues in which nobody called."""

from types import SimpleNamespace

from maporl.evaluation.metrics import Difference, Share
from maporl.report.counts import Calls, Counts
from maporl.report.dialogues import flags_of
from maporl.types import Call, Dialogue, Example, Grade, Result, TurnEnd, Utterance


def turn(number, agent, called, right, failed=False):
    """An agent's turn: one utterance without a call, or two of which the first calls."""
    said = []
    if called:
        result = Result("no", error="raised") if failed else Result("5")
        said.append(
            Utterance(number, agent, agent, 0, number, [], "", calls=[Call(f"{number}.0", "add", {}, None, result)])
        )
        said[0].answers = False
    last = Utterance(number + len(said), agent, agent, 0, number, [], "5", turn_end=TurnEnd.ANSWER)
    last.grade = Grade("5", right, "")
    return [*said, last]


def dialogue(question, ann, bob):
    first = turn(0, "ann", *ann)
    return Dialogue(Example(question, "?", "5"), [*first, *turn(len(first), "bob", *bob)])


def run(**dialogues):
    recorded = {when: [SimpleNamespace(dialogue=d) for d in own] for when, own in dialogues.items()}
    return Counts(SimpleNamespace(of=lambda when: recorded.get(when, [])))


def test_how_often_agents_call_and_whether_they_are_right_then():
    before = [dialogue("a", (True, True, True), (False, False)), dialogue("b", (False, True), (False, False))]
    after = [dialogue("a", (True, True), (True, True)), dialogue("b", (True, True), (True, False))]
    # one question has a turn with a call, which is right, and one without, which is wrong
    assert run(before=before, after=after).calls == [
        Calls("before", {"ann": Share(1, 2), "bob": Share(0, 2)}, 1, 1, 1, Difference(1.0, 1.0, 1.0)),
        Calls("after", {"ann": Share(2, 2), "bob": Share(2, 2)}, 4, 0, 0, None),
    ]


def test_without_tools_nothing_is_said():
    silent = dialogue("a", (False, True), (False, True))
    for utterance in silent.utterances:
        utterance.turn_end = None
    assert run(after=[silent]).calls == [] and "no call" not in flags_of(silent)


def test_dialogues_in_which_nobody_called_can_be_found():
    assert "no call" in flags_of(dialogue("a", (False, True), (False, True)))
    assert "no call" not in flags_of(dialogue("a", (True, True), (False, True)))
