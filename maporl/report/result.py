"""What a run has shown so far, for the first screen of its page: a verdict in words, and at most four numbers with
their 95% intervals."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from maporl.evaluation.metrics import SCORE, Difference, Share
from maporl.report.charts import finite, questions_by_step
from maporl.report.counts import Counts, counts_of
from maporl.report.dialogues import LAST_UPDATES
from maporl.report.findings import findings, said
from maporl.report.language import few_updates, interval_of
from maporl.report.read import Run
from maporl.text import visible

MOST = 4
"""The most numbers of a first screen."""
TALKING = "By talking"


class Number(NamedTuple):
    """A number as the page shows it. ``interval`` is its 95% interval, and ``note`` says what it is about."""

    label: str
    value: str
    interval: str
    note: str


def first_screen(run: Run) -> dict[str, Any]:
    """The ``verdict`` in sentences, what the ``numbers`` are about, and the numbers themselves."""
    c = counts_of(run)
    labelled = _of_answers if "after" in c.right else _of_training
    numbers = (_of_games if c.game else _of_scores if c.unlabelled else labelled)(c)
    return {
        "verdict": [text for text, _ in findings("verdict", [c])],
        "about": said("about", c),
        "numbers": [{name: visible(text) for name, text in n._asdict().items()} for n in numbers[:MOST]],
    }


def _share(label: str, share: Share, note: str) -> Number:
    return Number(label, f"{share.value:.1%}", interval_of(share), note)


def _points(label: str, gain: Difference, note: str) -> Number:
    interval = f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f} points"
    return Number(label, f"{100 * gain.mean:+.1f} points", interval, note)


def _mean(label: str, values: Sequence[float], note: str, form: str = ".3f", mean: float | None = None) -> Number:
    """The mean of ``values`` with its normal interval, or the interval around a ``mean`` that was recorded."""
    spread = Difference.of([(0.0, value) for value in values] or [(0.0, 0.0)], math.inf)
    mean, half = spread.mean if mean is None else mean, spread.high - spread.mean
    interval = f"{mean - half:{form}} to {mean + half:{form}}" if len(values) > 1 else ""
    return Number(label, f"{mean:{form}}", interval, note)


def _of_answers(c: Counts) -> list[Number]:
    """Accuracy on held-out questions. Where training pays for more than right answers, scores stand before it."""
    note = "last turn" if c.run.after is not None and len(c.run.after.turns) > 1 else ""
    numbers = [_share(f"{when.capitalize()} training", share, note) for when, share in c.right.items()]
    if c.talking is not None:
        numbers.append(_points(TALKING, c.talking, "last turn minus first turn, after training"))
    elif c.gain is not None:
        numbers.append(_points("By training", c.gain, "after minus before"))
    return [*_held_out(c, "Score {} training"), *numbers[:2]] if c.pays_more else numbers


def _held_out(c: Counts, label: str) -> list[Number]:
    """The mean score of held-out answers."""
    return [
        _mean(label.format(when).capitalize(), list(c.scores[when].values()), "held-out questions", mean=mean)
        for when, mean in c.score_means.items()
    ]


def _ends(records: list[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """The first and the last of some updates, with a label and in words; only the last if there are few."""
    few = max(1, min(LAST_UPDATES, len(records) // 3))
    ends = [("First updates", "first", records[:few])] if len(records) > 2 * few else []
    ends += [("Last updates", "last", records[-few:])] if records else []
    return [(label, f"{which} {few_updates(len(part))}", part) for label, which, part in ends]


def _of_training(c: Counts) -> list[Number]:
    """Accuracy of the last turn over the first and the last updates, and the gain over the first turn in the last."""
    measured, asked = [r for r in c.run.updates() if finite(r.get(c.last_turn)) is not None], questions_by_step(c.run)
    held_out = [_share("Before training", share, f"{share.total} held-out questions") for share in c.right.values()]
    numbers = []
    for label, which, records in _ends(measured):
        values = [float(r[c.last_turn]) for r in records]
        mean, total = sum(values) / len(values), sum(asked.get(record["step"], 0) for record in records)
        interval = interval_of(Share(mean * total, total)) if total and 0 <= mean <= 1 else ""
        numbers.append(Number(label, f"{mean:.1%}", interval, f"training questions, {which}"))
        firsts = [finite(r.get("accuracy/turn_1")) for r in records]
        pairs = [(first, last) for first, last in zip(firsts, values, strict=True) if first is not None]
        if label == "Last updates" and pairs and c.last_turn != "accuracy/turn_1":
            gain = _points(TALKING, Difference.of(pairs), f"training questions, last turn minus first, {which}")
            numbers.append(gain if len(pairs) > 1 else gain._replace(interval=""))
    return [*held_out, *numbers[-2:]] if held_out else numbers


def _of_scores(c: Counts) -> list[Number]:
    """The mean score of answers that are not right or wrong."""
    numbers = _held_out(c, "{} training")
    if c.run.after is None:
        return numbers + [
            _mean(label, [float(r[SCORE]) for r in records], f"training questions, {which}")
            for label, which, records in _ends(c.scored)
        ]
    gains = [_mean(TALKING, c.score_gains, "last turn minus first turn, after training", "+.3f")]
    return numbers + (gains if c.score_gains else [])


def _of_games(c: Counts) -> list[Number]:
    """How many games ended with an illegal move, and what each player was paid."""
    played, before = c.newest, c.run.of("before")
    if not played:
        return []
    ended, was = (Share(sum(o.dialogue.outcome == "illegal" for o in part), len(part)) for part in (played, before))
    numbers = [_share("Ended by an illegal move", ended, f"before training {was.value:.1%}" if before else "")]
    for player in sorted({u.agent for one in played for u in one.dialogue.utterances}):
        earlier = c.paid(before, player)
        note = f"before training {sum(earlier) / len(earlier):+.2f}" if earlier else ""
        number = _mean(f"{player} is paid", c.paid(played, player), note, "+.2f")
        numbers.append(number._replace(interval=f"{number.interval} a game" if number.interval else ""))
    return numbers
