"""Sentences about calls: how often agents call tools, how many calls fail, and whether calling goes with being right;
and which requests of programs were refused."""

from collections import Counter
from collections.abc import Sequence

from maporl.evaluation.metrics import Difference, Share
from maporl.report.language import counted, percent
from maporl.report.read import Recorded, Run
from maporl.types import Utterance, is_program


def calling(run: Run) -> str:
    """How agents with tools used them before and after training. Empty for a run in which nobody could call."""
    parts = [_told(when, run.of(when)) for when in ("before", "after")]
    return " ".join(part for part in parts if part)


def refusals(run: Run) -> str:
    """How many requests of programs were refused, and why, in the dialogues that are recorded. Empty without any."""
    outcomes = [one.dialogue.outcome for one in run.dialogues if is_program(one.dialogue)]
    requests, answered = (sum(outcome.get(name, 0) for outcome in outcomes) for name in ("requests", "answered"))
    reasons = Counter(str(why) for outcome in outcomes for why in outcome.get("refused", ()))
    whys = [f"{counted(times, 'time')}: {why}." for why, times in reasons.most_common()]
    refused = f"Of {counted(requests, 'request')} of the program {requests - answered} were refused."
    return " ".join([refused, *whys]) if requests > answered else ""


def _told(when: str, dialogues: Sequence[Recorded]) -> str:
    turns = turns_with_tools(dialogues)
    if not turns:
        return ""
    shares = []
    for agent in sorted({agent for _, agent, _ in turns}):
        called = [any(u.calls for u in turn) for _, name, turn in turns if name == agent]
        shares.append(f"{agent} called in {percent(Share(sum(called), len(called)))} of {counted(len(called), 'turn')}")
    calls = [call for _, _, turn in turns for u in turn for call in u.calls]
    failed = sum(call.result is not None and call.result.error is not None for call in calls)
    told = f"{when.capitalize()} training, {', '.join(shares)}."
    if calls:
        told += f" {failed} of {counted(len(calls), 'call')} failed."
    return " ".join([told, *_paired(turns)])


Turns = list[tuple[str, str, list[Utterance]]]
"""The question, the agent and the utterances of each turn."""


def turns_with_tools(dialogues: Sequence[Recorded]) -> Turns:
    """Return the turns of agents that could call tools."""
    turns: Turns = []
    for one in dialogues:
        by_turn: dict[tuple[str, int], list[Utterance]] = {}
        for u in one.dialogue.utterances:
            by_turn.setdefault((u.agent, u.turn), []).append(u)
        turns += [
            (one.dialogue.example.id, agent, turn)
            for (agent, _), turn in by_turn.items()
            if any(u.turn_end is not None for u in turn)
        ]
    return turns


def _paired(turns: Turns) -> list[str]:
    """Return how much more often turns with calls are right, over the questions that have turns of both kinds."""
    right: dict[str, tuple[list[bool], list[bool]]] = {}
    for question, _, turn in turns:
        grade = turn[-1].grade
        if grade is not None and grade.correct is not None:
            right.setdefault(question, ([], []))[any(u.calls for u in turn)].append(bool(grade.correct))
    pairs = [(sum(no) / len(no), sum(yes) / len(yes)) for no, yes in right.values() if no and yes]
    if not pairs:
        return []
    return [
        f"Over {counted(len(pairs), 'question')} with turns of both kinds, accuracy with calls minus accuracy without "
        f"is {Difference.of(pairs).points()}."
    ]
