"""What a run has shown so far, for the first screen of its page: a verdict in words, and at most three numbers with
their 95% intervals."""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from maporl.evaluation.metrics import SCORE, Z95, Difference, Evaluation, Share
from maporl.evaluation.tables import not_measured
from maporl.report.audit import audit_of
from maporl.report.charts import finite, questions_by_step
from maporl.report.dialogues import LAST_UPDATES, graded, newest, right_share
from maporl.report.language import counted, few_updates, interval_of, listed
from maporl.report.names import agents_of
from maporl.report.read import Recorded, Run
from maporl.report.story import best_alone, is_game, paired_gain, talking_gain
from maporl.text import visible
from trl_ext.learning.audit import Audit, Numbers

MOST = 4
"""The most numbers of a first screen."""
PAID = "A score is the mean of what training pays an utterance before credit is assigned."
UNPAID = "What training pays for was not measured on these questions."
SCORES = {1: "Scores rose", -1: "Scores fell", 0: "It is not clear that scores rose"}
TALKING = "By talking"
LEAST_PART = 0.1
"""The least part of what a team has gained that the verdict names."""


@dataclass(frozen=True)
class Number:
    """A number as the page shows it. ``interval`` is its 95% interval, and ``note`` says what it is about."""

    label: str
    value: str
    interval: str
    note: str


def first_screen(run: Run) -> dict[str, Any]:
    """The ``verdict`` in sentences, what the ``numbers`` are about, and the numbers themselves."""
    done = audit_of(run)
    idle = [finding.subject for finding in done.findings if finding.severity != "doubt"]
    if is_game(run):
        about, numbers = _of_games(run)
    elif _unlabelled(run):
        about, numbers = _of_scores(run)
    else:
        about, numbers = _of_answers(run, done)
        if run.after is not None and _pays_more(run):
            scores = [replace(n, label=f"Score {n.label.lower()}") for n in _of_scores(run)[1] if n.label != TALKING]
            about += f" {PAID if scores else UNPAID}"
            numbers = [*scores, *numbers[:2]]
    about += "" if run.after is None else f" {not_measured(run.after)}".rstrip()
    return {
        "verdict": [visible(text) for text in (*verdict(run), *_idle(idle))],
        "about": visible(about),
        "numbers": [{k: visible(text) for k, text in asdict(number).items()} for number in numbers[:MOST]],
    }


def _idle(names: Sequence[str]) -> list[str]:
    """Say whose promises the run did not keep, in a sentence; the list below the numbers has the reasons."""
    return [f"{listed(list(dict.fromkeys(names)))} did not do what the run says."] if names else []


# -- in words -----------------------------------------------------------------------------------------------------


def verdict(run: Run) -> list[str]:
    """What the team learned and whether talking helps, as far as held-out answers show it."""
    if is_game(run):
        return []
    if _unlabelled(run):
        return [] if (sign := _score_sign(run)) is None else [f"{SCORES[sign]} on held-out questions."]
    if run.after is None or not run.after.final().total:
        return []
    gain, talking, alone = paired_gain(run), talking_gain(run), best_alone(run)
    told = [] if gain is None else [_apart(run, gain) or _learned(run, gain, talking is not None)]
    if talking is not None and talking.sign == 1 and alone is not None and alone[1].sign < 1:
        told.append(f"Talking helps on average, but the team is not clearly better than {alone[0]} alone.")
    elif talking is not None and talking.low == talking.high == 0:
        told.append("Talking changes nothing that the held-out questions show.")
    elif talking is not None:
        told.append({1: "Talking helps.", 0: "It is not clear that talking helps.", -1: "Talking hurts."}[talking.sign])
    return told


def _pays_more(run: Run) -> bool:
    """Whether training pays for more than right answers."""
    return any(weight for name, weight in (run.section("reward").get("sources") or {}).items() if name != "label")


def _apart(run: Run, gain: Difference) -> str:
    """What training changed where accuracy says something else than the score, which is paid. Empty if both agree."""
    paid = _score_sign(run)
    if not _pays_more(run) or paid == gain.sign:
        return ""
    right = {1: "right more often", -1: "right less often", 0: "not clearly right more often or less often"}[gain.sign]
    if paid is None:
        return f"Answers are {right} than before training. {UNPAID}"
    return f"{SCORES[paid]}, but answers are {right} than before training."


def _learned(run: Run, gain: Difference, talks: bool) -> str:
    """What training changed, in a sentence: whether the last answers got better, and whether the first ones did."""
    who = "The team" if len(agents_of(run)) > 1 else "The agent"
    if gain.sign == -1:
        return f"{who} got worse: its last answers are right less often than before training."
    if gain.low == gain.high == 0:
        return "Training changed nothing that the held-out questions show."
    if gain.sign == 0:
        return (
            f"It is not clear that {who.lower()} learned: chance in the choice of questions may explain the difference."
        )
    if talks:
        by_answering, by_talking = _where_it_learned(run)
        if by_talking and by_answering:
            return f"{who} learned to answer and to talk: first answers got better, and talking adds more to them."
        if by_talking:
            return f"{who} learned to use what is said: last answers got better, and first answers hardly did."
        if by_answering:
            return f"{who} learned to answer: first answers got better, and talking adds no more than before."
        return f"{who} learned: its last answers are right more often than before training."
    return f"{who} learned: its answers are right more often than before training."


def _where_it_learned(run: Run) -> tuple[bool, bool]:
    """Whether first answers gained by training, and whether the last ones gained more than they, by question.

    A part that is less than :data:`LEAST_PART` of the whole gain is not what the team learned, however sure it is.
    """
    before, after = (
        {d.example.id: (right_share(d, 0), right_share(d)) for one in run.of(when) if graded(d := one.dialogue)}
        for when in ("before", "after")
    )
    both = [(before[name], after[name]) for name in after if name in before]
    first = Difference.of([(was[0], now[0]) for was, now in both])
    # halved, because a difference is of numbers between 0 and 1, and these are between -1 and 1
    more = Difference.of([((was[1] - was[0]) / 2, (now[1] - now[0]) / 2) for was, now in both])
    least = LEAST_PART * (first.mean + 2 * more.mean)
    return first.sign == 1 and first.mean >= least, more.sign == 1 and 2 * more.mean >= least


# -- right and wrong answers ----------------------------------------------------------------------------------------


def _of_answers(run: Run, done: Audit) -> tuple[str, list[Number]]:
    """Accuracy on held-out questions; where none were asked after training, on the questions of the updates."""
    before, after = (_final(report) for report in (run.before, run.after))
    if after is None:
        trained = _trained(run)
        held_out = [_share("Before training", before, f"{before.total} held-out questions")] if before else []
        if not trained and held_out:
            return "How often answers of the last turn are right. No update has been made.", held_out
        return (
            f"How often answers of the last turn are right. {_no_evaluation(run)}" if trained else "",
            [*held_out, *trained[-2:]] if held_out else trained,
        )
    talking = talking_gain(run)
    note = "last turn" if run.after is not None and len(run.after.turns) > 1 else ""
    numbers = [_share("Before training", before, note)] if before else []
    numbers.append(_share("After training", after, note))
    if talking is not None:
        numbers.append(_points("By talking", talking, "last turn minus first turn, after training"))
    elif (gain := paired_gain(run)) is not None:
        numbers.append(_points("By training", gain, "after minus before"))
    overlap = done.numbers("task").get("the task", Numbers({})).overlap
    what = counted(after.total, "question" if overlap else "held-out question")
    return f"How often answers are right, on {what}.{f' But {overlap}.' if overlap else ''}", numbers


def _no_evaluation(run: Run) -> str:
    """Why figures are those of training."""
    ended = run.finished or run.config.get("updates") is None
    return "No evaluation after training is recorded." if ended else "The training goes on, or was cut off."


def _final(report: Evaluation | None) -> Share | None:
    return report.final() if report is not None and report.final().total else None


def _share(label: str, share: Share, note: str) -> Number:
    return Number(label, f"{share.value:.1%}", interval_of(share), note)


def _points(label: str, gain: Difference, note: str) -> Number:
    interval = f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f} points"
    return Number(label, f"{100 * gain.mean:+.1f} points", interval, note)


def _trained(run: Run) -> list[Number]:
    """Accuracy of the last turn over the first and the last updates, and the gain over the first turn in the last."""
    updates = run.updates()
    turns = sorted(
        {int(m[1]) for record in updates for name in record if (m := re.fullmatch(r"accuracy/turn_(\d+)", name))}
    )
    measured = [r for r in updates if turns and finite(r.get(f"accuracy/turn_{turns[-1]}")) is not None]
    if not measured:
        return []
    few = max(1, min(LAST_UPDATES, len(measured) // 3))
    asked = questions_by_step(run)
    numbers = [_over("Last updates", f"accuracy/turn_{turns[-1]}", measured[-few:], asked, f"last {few_updates(few)}")]
    if len(measured) > 2 * few:
        first = f"first {few_updates(few)}"
        numbers.insert(0, _over("First updates", f"accuracy/turn_{turns[-1]}", measured[:few], asked, first))
    ends = [tuple(finite(r.get(f"accuracy/turn_{turn}")) for turn in (turns[0], turns[-1])) for r in measured[-few:]]
    pairs = [(first, last) for first, last in ends if first is not None and last is not None]
    if len(turns) > 1 and pairs:
        gain = Difference.of(pairs)
        number = _points("By talking", gain, f"training questions, last turn minus first, last {few_updates(few)}")
        numbers.append(number if len(pairs) > 1 else replace(number, interval=""))
    return numbers


def _over(label: str, name: str, updates: list[dict[str, Any]], asked: dict[int, int], when: str) -> Number:
    """The mean of a metric over updates, with its interval over their questions where these are counted."""
    values = [value for record in updates if (value := finite(record.get(name))) is not None]
    mean, total = sum(values) / len(values), sum(asked.get(record["step"], 0) for record in updates)
    share = Share(mean * total, total) if total and 0 <= mean <= 1 else None
    return Number(label, f"{mean:.1%}", "" if share is None else interval_of(share), f"training questions, {when}")


# -- scores and games -----------------------------------------------------------------------------------------------


def _unlabelled(run: Run) -> bool:
    """Whether answers have scores and none is right or wrong."""
    report = run.after or run.before
    if report is not None:
        return report.unlabelled
    return not any("accuracy/turn_1" in record for record in run.updates())


def _of_scores(run: Run) -> tuple[str, list[Number]]:
    """The mean score of answers that are not right or wrong."""
    numbers = []
    for when, report in (("before", run.before), ("after", run.after)):
        mean = None if report is None else report.rewards.get(SCORE)
        if mean is not None:
            interval = _around(mean, [value for one in run.of(when) if (value := _score(one)) is not None])
            numbers.append(Number(f"{when.capitalize()} training", f"{mean:.3f}", interval, "held-out questions"))
    if run.after is None:
        updates = [r for r in run.updates() if finite(r.get(SCORE)) is not None]
        few = max(1, min(LAST_UPDATES, len(updates) // 3))
        parts = [("First updates", "first", updates[:few]), ("Last updates", "last", updates[-few:])]
        for label, which, part in parts[1 if len(updates) <= 2 * few else 0 :] if updates else ():
            scores = [float(r[SCORE]) for r in part]
            mean = sum(scores) / len(scores)
            note = f"training questions, {which} {few_updates(len(part))}"
            numbers.append(Number(label, f"{mean:.3f}", _around(mean, scores), note))
    else:
        gains = [gain for one in run.of("after") if (gain := _score_gain(one)) is not None]
        if gains:
            mean = sum(gains) / len(gains)
            note = "last turn minus first turn, after training"
            numbers.append(Number(TALKING, f"{mean:+.3f}", _around(mean, gains, "+"), note))
    return ("The mean score of an utterance. The questions have no labels." if numbers else ""), numbers


def _score_sign(run: Run) -> int | None:
    """1 if the scores of held-out answers rose, -1 if they fell, 0 if neither is clear, question by question. None if
    they are not measured."""
    before = {one.dialogue.example.id: _score(one) for one in run.of("before")}
    pairs = [(before.get(one.dialogue.example.id), _score(one)) for one in run.of("after")]
    both = [(was, now) for was, now in pairs if was is not None and now is not None]
    return Difference.of(both, math.inf).sign if both else None


def _around(mean: float, values: Sequence[float], sign: str = "", digits: int = 3) -> str:
    """The normal 95% interval of the mean of ``values``, around ``mean``; empty for fewer than two of them."""
    if len(values) < 2:
        return ""
    low, high = _interval(mean, values)
    return f"{low:{sign}.{digits}f} to {high:{sign}.{digits}f}"


def _interval(mean: float, values: Sequence[float]) -> tuple[float, float]:
    half = Z95 * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _score(one: Recorded, turn: int | None = None) -> float | None:
    """The mean score of a dialogue's utterances, or of those of one turn."""
    said = [u for u in one.dialogue.utterances if turn is None or u.turn == turn]
    scores = [score for u in said if (score := finite(u.rewards.get("score"))) is not None]
    return sum(scores) / len(scores) if scores else None


def _score_gain(one: Recorded) -> float | None:
    last = max((u.turn for u in one.dialogue.utterances), default=0)
    was, now = _score(one, 0), _score(one, last)
    return now - was if last and was is not None and now is not None else None


def _of_games(run: Run) -> tuple[str, list[Number]]:
    """How many games ended with an illegal move, and what each player was paid."""
    played, before = newest(run), run.of("before")
    if not played:
        return "", []
    ended = Share(sum(one.dialogue.outcome == "illegal" for one in played), len(played))
    was = Share(sum(one.dialogue.outcome == "illegal" for one in before), len(before))
    numbers = [_share("Ended by an illegal move", ended, f"before training {was.value:.1%}" if before else "")]
    for player in sorted({u.agent for one in played for u in one.dialogue.utterances}):
        paid, earlier = _paid(played, player), _paid(before, player)
        mean = sum(paid) / len(paid)
        note = f"before training {sum(earlier) / len(earlier):+.2f}" if earlier else ""
        interval = _around(mean, paid, "+", 2)
        numbers.append(Number(f"{player} is paid", f"{mean:+.2f}", f"{interval} a game" if interval else "", note))
    when = "after training" if run.of("after") else f"of the last {few_updates(LAST_UPDATES)}"
    return f"{counted(len(played), 'game')} {when}.", numbers


def _paid(played: list[Recorded], player: str) -> list[float]:
    """What a player was paid in each game in which it moved."""
    return [
        sum(finite(u.rewards.get("env")) or 0.0 for u in own)
        for one in played
        if (own := [u for u in one.dialogue.utterances if u.agent == player])
    ]
