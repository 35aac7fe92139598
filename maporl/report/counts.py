"""What is counted of a run: one plain structure without a sentence. Whatever is said of the run is drawn from it."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from maporl.evaluation.metrics import SCORE, Difference, Share
from maporl.report.charts import finite
from maporl.report.dialogues import Graded, flags_of, game_of, graded, kind_of, last_answers, newest
from maporl.report.read import HELD_OUT, Recorded, Run
from maporl.types import Dialogue, Grade, Stop, Utterance

LEAST_PART = 0.1
"""The least part of what a team has gained that is named as what it learned."""
MOST_KINDS = 4
"""With more kinds of questions than this, a row cannot show what an agent knows of each."""


class Case(NamedTuple):
    """The dialogues that fail in one way: ``number`` of ``total`` things of a ``kind``. ``of`` names whose they are, or
    what they have in common."""

    way: str
    dialogues: list[Recorded]
    number: int
    total: int
    kind: str
    of: str = ""


class Calls(NamedTuple):
    """How agents with tools used them in an evaluation: the share of their ``turns`` with a call, and how much more
    often these are right, over ``questions`` with turns of both kinds."""

    when: str
    turns: dict[str, Share]
    calls: int
    failed: int
    questions: int
    gain: Difference | None


class Counts:
    """The counts of a ``run``. Each is made when it is first asked for."""

    def __init__(self, run: Run):
        self.run = run

    @cached_property
    def game(self) -> str:
        """The name of the game; empty where the dialogues are not of one."""
        return (game_of(self.run.dialogues[0].dialogue) or "") if self.run.dialogues else ""

    @cached_property
    def agents(self) -> list[str]:
        """The names of the agents: those of the configuration, or else of those who spoke."""
        said = [u for one in self.run.dialogues for u in one.dialogue.utterances]
        return list(self.run.agents()) or sorted({u.agent for u in said})

    @cached_property
    def temperatures(self) -> tuple[float | None, float | None]:
        """At which held-out answers and those of training are sampled; None where that is not recorded."""
        return self.run.section("evaluation").get("temperature"), self.run.section("ppo").get("temperature")

    @cached_property
    def newest(self) -> list[Recorded]:
        """The dialogues that show what the team can do now."""
        return newest(self.run)

    # -- right answers ----------------------------------------------------------------------------------------------

    @cached_property
    def right(self) -> dict[str, Share]:
        """The share of last answers that are right in each evaluation that graded some."""
        reports = {"before": self.run.before, "after": self.run.after}
        return {when: report.final() for when, report in reports.items() if report and report.final().total}

    @cached_property
    def last_turn(self) -> str:
        """The metric of right answers in the last turn of training; empty without one."""
        turns = [int(m[1]) for r in self.run.updates() for key in r if (m := re.fullmatch(r"accuracy/turn_(\d+)", key))]
        return f"accuracy/turn_{max(turns)}" if turns else ""

    @cached_property
    def unlabelled(self) -> bool:
        """Whether answers have scores and none is right or wrong."""
        report = self.run.after or self.run.before
        return report.unlabelled if report is not None else not self.last_turn

    @cached_property
    def graded(self) -> dict[str, list[tuple[Dialogue, list[list[Graded]]]]]:
        """The graded answers of each evaluation's dialogues, by turn."""
        return {
            when: [(one.dialogue, turns) for one in self.run.of(when) if (turns := graded(one.dialogue))]
            for when in HELD_OUT
        }

    @cached_property
    def pairs(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """Before and after training, the shares of right answers in the first and the last turn of each question."""
        before, after = (
            {d.example.id: (_right(turns[0]), _right(turns[-1])) for d, turns in self.graded[when]} for when in HELD_OUT
        )
        return [(before[name], after[name]) for name in after if name in before]

    @cached_property
    def gain(self) -> Difference | None:
        """How much more often the last turn is right after training than before it, on the questions of both."""
        return _difference([(was[1], now[1]) for was, now in self.pairs])

    @cached_property
    def talking(self) -> Difference | None:
        """How much more often the last turn is right than the first, after training. None for games and one turn."""
        if self.run.after is None or len(self.run.after.turns) < 2 or self.game:
            return None
        return _difference([(_right(turns[0]), _right(turns[-1])) for _, turns in self.graded["after"]])

    @cached_property
    def learned(self) -> tuple[bool, bool]:
        """Whether first answers gained by training, and whether the last ones gained more than they, by question.

        A part that is less than :data:`LEAST_PART` of the whole gain is not what the team learned, however sure it is.
        """
        if self.talking is None or not self.pairs:
            return False, False
        first = Difference.of([(was[0], now[0]) for was, now in self.pairs])
        more = Difference.of([(was[1] - was[0], now[1] - now[0]) for was, now in self.pairs], 2)
        least = LEAST_PART * (first.mean + more.mean)
        return first.sign == 1 and first.mean >= least, more.sign == 1 and more.mean >= least

    @cached_property
    def first_alone(self) -> bool:
        """Whether after training all first answers were given before their agents heard anybody."""
        return not any(u.parents for _, turns in self.graded["after"] for u, _ in turns[0])

    @cached_property
    def best(self) -> tuple[str, Difference] | None:
        """The agent whose first answers are right most often, and how much more often the last turn of all agents is.

        None for a single agent, and where agents hear others in the first turn.
        """
        if self.run.after is None or not self.first_alone:
            return None
        opening, closing = (self.run.after.turns[i].agents for i in (0, -1))
        both = [name for name in opening if name in closing and opening[name].total and closing[name].total]
        if len(both) < 2:
            return None
        best = max(both, key=lambda name: opening[name].value)
        found = [([g for u, g in turns[0] if u.agent == best], _right(turns[-1])) for _, turns in self.graded["after"]]
        gain = _difference([(float(bool(own[0].correct)), right) for own, right in found if own])
        return None if gain is None else (best, gain)

    def anybody(self, turn: int) -> float:
        """The share of questions on which at least one answer of a turn is right, after training."""
        right = [any(grade.correct for _, grade in turns[turn]) for _, turns in self.graded["after"]]
        return sum(right) / len(right)

    # -- who knows and who listens ------------------------------------------------------------------------------------

    @cached_property
    def known(self) -> dict[str, dict[str, list[bool]]]:
        """For each agent, whether its answers of the first turn after training are right, by kind of question. Empty
        for one kind, and where agents hear others in the first turn."""
        right: dict[str, dict[str, list[bool]]] = {}
        for dialogue, turns in self.graded["after"]:
            for u, grade in turns[0]:
                right.setdefault(u.agent, {}).setdefault(kind_of(dialogue) or "", []).append(bool(grade.correct))
        kinds = {kind for own in right.values() for kind in own}
        return right if self.first_alone and 1 < len(kinds) <= MOST_KINDS and "" not in kinds else {}

    @cached_property
    def listened(self) -> dict[tuple[str, bool], dict[str, list[bool]]]:
        """For each agent that was wrong and was shown a right answer, or was right (True) and was shown a wrong one:
        whether its next answers are right, by evaluation."""
        found: dict[tuple[str, bool], dict[str, list[bool]]] = {}
        for when in HELD_OUT:
            for dialogue, _ in self.graded[when]:
                for agent, was, heard, now in answers_again(dialogue):
                    if (not was) in heard:
                        found.setdefault((agent, was), {}).setdefault(when, []).append(now)
        return found

    @cached_property
    def calls(self) -> list[Calls]:
        """How tools were used, in each evaluation in which somebody could call them."""
        return [calls for when in HELD_OUT if (calls := _calls(when, [one.dialogue for one in self.run.of(when)]))]

    # -- scores -------------------------------------------------------------------------------------------------------

    @cached_property
    def pays_more(self) -> bool:
        """Whether training pays for more than right answers."""
        sources = self.run.section("reward").get("sources") or {}
        return any(weight for name, weight in sources.items() if name != "label")

    @cached_property
    def score_means(self) -> dict[str, float]:
        """The mean score of each evaluation that measured it."""
        reports = {"before": self.run.before, "after": self.run.after}
        return {when: report.rewards[SCORE] for when, report in reports.items() if report and SCORE in report.rewards}

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """The mean score of each question's utterances, by evaluation."""
        return {
            when: {one.dialogue.example.id: s for one in self.run.of(when) if (s := _score(one.dialogue)) is not None}
            for when in HELD_OUT
        }

    @cached_property
    def scored(self) -> list[dict[str, Any]]:
        """The updates whose score is recorded."""
        return [record for record in self.run.updates() if finite(record.get(SCORE)) is not None]

    @cached_property
    def score_sign(self) -> int | None:
        """1 if the scores of held-out answers rose, -1 if they fell, 0 if neither is clear, question by question. None
        if they are not measured."""
        before, after = (self.scores[when] for when in HELD_OUT)
        pairs = [(before[name], after[name]) for name in after if name in before]
        return Difference.of(pairs, math.inf).sign if pairs else None

    @cached_property
    def apart(self) -> bool:
        """Whether accuracy says something else than the score, which is paid."""
        return self.gain is not None and self.pays_more and self.score_sign != self.gain.sign

    @cached_property
    def score_gains(self) -> list[float]:
        """How much higher the scores of the last turn are than those of the first, of dialogues after training."""
        played = [one.dialogue for one in self.run.of("after")]
        ends = [(_score(d, 0), _score(d, d.turns() - 1)) for d in played if d.turns() > 1]
        return [now - was for was, now in ends if was is not None and now is not None]

    def paid(self, played: Iterable[Recorded], player: str) -> list[float]:
        """What a player was paid in each game in which it moved."""
        moves = [[u for u in one.dialogue.utterances if u.agent == player] for one in played]
        return [sum(finite(u.rewards.get("env")) or 0.0 for u in own) for own in moves if own]

    # -- where it fails -----------------------------------------------------------------------------------------------

    @cached_property
    def ended(self) -> list[Recorded]:
        """The newest dialogues with graded last answers."""
        return [one for one in self.newest if last_answers(one.dialogue)]

    @cached_property
    def unit(self) -> str:
        """What the dialogues are, in which a team may fail."""
        return "game" if self.game else "question" if self.run.of("after") else "dialogue"

    @cached_property
    def failed(self) -> list[Case]:
        """The ways in which the newest dialogues fail."""
        wrong = [(one, u, grade) for one in self.ended for u, grade in last_answers(one.dialogue) if not grade.correct]
        found = self._games_lost(wrong) if self.game else self._wrong(wrong)
        return [case._replace(dialogues=list(dict.fromkeys(case.dialogues))) for case in found if case.dialogues]

    def _wrong(self, wrong: list[tuple[Recorded, Utterance, Grade]]) -> Iterator[Case]:
        flags = [(one, flags_of(one.dialogue)) for one in self.ended]
        several = any(len(last_answers(one.dialogue)) > 1 for one in self.ended)
        for flag in ("all wrong", "mixed", "spoiled"):
            found = [one for one, names in flags if flag in names]
            way = flag if several or flag != "all wrong" else "wrong"
            yield Case(way, found, len(found), len(self.ended), self.unit)
        unread = [one for one, _, grade in wrong if grade.answer is None]
        yield Case("unread", unread, len(unread), len(wrong), "wrong last answer")
        cut = [one for one, u, _ in wrong if u.stop == Stop.LENGTH]
        yield Case("cut", cut, len(cut), len(wrong), "wrong last answer")

    def _games_lost(self, wrong: list[tuple[Recorded, Utterance, Grade]]) -> Iterator[Case]:
        illegal = [(one, u, grade) for one, u, grade in wrong if one.dialogue.outcome == "illegal"]
        games = [one for one, *_ in illegal]
        yield Case("illegal", games, len(set(games)), len(self.ended), "game")
        speakers = [{u.agent for u in one.dialogue.utterances} for one in self.ended]
        for agent in sorted(set().union(*speakers)):
            own = [one for one, u, _ in illegal if u.agent == agent]
            yield Case("moved", own, len(own), sum(agent in each for each in speakers), "game", agent)
        cut = [one for one, u, _ in illegal if u.stop == Stop.LENGTH]
        yield Case("cut", cut, len(cut), len(illegal), "illegal move")


def counts_of(run: Run) -> Counts:
    """Return the counts of ``run``, which are made once."""
    return run.kept.setdefault("counts", Counts(run))


def answers_again(dialogue: Dialogue) -> list[tuple[str, bool, list[bool], bool]]:
    """For each answer after an agent's first: the agent, and if its last one, those it heard and this are right."""
    answers = [(u, bool(grade.correct)) for turn in graded(dialogue) for u, grade in turn]
    right = {u.id: correct for u, correct in answers}
    by_turn = {(u.agent, u.turn): correct for u, correct in answers}
    speaker = {u.id: u.agent for u, _ in answers}
    again = []
    for u, correct in answers:
        # the agent may have been silent in the turn before
        before = max((v.turn for v in dialogue.utterances if v.agent == u.agent and v.turn < u.turn), default=-1)
        if (u.agent, before) in by_turn:
            heard = [right[p] for p in u.parents if speaker.get(p, u.agent) != u.agent]
            again.append((u.agent, by_turn[u.agent, before], heard, correct))
    return again


def _calls(when: str, dialogues: Sequence[Dialogue]) -> Calls | None:
    by_turn: dict[tuple[int, str, int], list[Utterance]] = {}
    for number, dialogue in enumerate(dialogues):
        for u in dialogue.utterances:
            by_turn.setdefault((number, u.agent, u.turn), []).append(u)
    turns = {key: turn for key, turn in by_turn.items() if any(u.turn_end is not None for u in turn)}
    called: dict[str, list[bool]] = {}
    right: dict[str, tuple[list[Any], list[Any]]] = {}
    for (number, agent, _), turn in turns.items():
        calls, grade = any(u.calls for u in turn), turn[-1].grade
        called.setdefault(agent, []).append(calls)
        if grade is not None and grade.correct is not None:
            right.setdefault(dialogues[number].example.id, ([], []))[calls].append(grade.correct)
    pairs = [(sum(no) / len(no), sum(yes) / len(yes)) for no, yes in right.values() if no and yes]
    results = [call.result for turn in turns.values() for u in turn for call in u.calls]
    failed = sum(result is not None and result.error is not None for result in results)
    shares = {agent: Share(sum(own), len(own)) for agent, own in sorted(called.items())}
    return Calls(when, shares, len(results), failed, len(pairs), _difference(pairs)) if turns else None


def _difference(pairs: Sequence[tuple[float, float]]) -> Difference | None:
    return Difference.of(pairs) if pairs else None


def _right(turn: Sequence[Graded]) -> float:
    """The share of a turn's answers that are right."""
    return sum(bool(grade.correct) for _, grade in turn) / len(turn)


def _score(dialogue: Dialogue, turn: int | None = None) -> float | None:
    """The mean score of a dialogue's utterances, or of those of one turn."""
    said = [u for u in dialogue.utterances if turn is None or u.turn == turn]
    scores = [score for u in said if (score := finite(u.rewards.get("score"))) is not None]
    return sum(scores) / len(scores) if scores else None
