"""All sentences about a run, in one table: a row has a section, a condition on counts and a sentence.

The first screen, the page, the terminal and the model card draw them from here. What a part of the run promised and did
not do is said by another table of this kind, that of the audit (:mod:`maporl.report.audit`).
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from maporl.evaluation.tables import not_measured
from maporl.report.dialogues import LAST_UPDATES, outcome_of
from maporl.report.language import counted, few_updates, listed, part, part_name, percent
from maporl.text import visible

Section = Literal[
    "verdict", "about", "gain", "scope", "drawn", "answers", "rounds", "reward", "warm start",
    "tools", "others", "cells", "fails", "pace", "dialogue",
]  # fmt: skip
"""What a sentence is about. Its condition is one on the counts of a run (:class:`maporl.report.counts.Counts`) in the
first five, on what its configuration says in the next four, and then on the calls of an evaluation, a cross-play, a way
to fail, the processes that set the pace, and a dialogue that is shown."""


class Row(NamedTuple):
    """A row of the table. Of the rows with one ``name`` the first is said whose condition ``holds``. A text
    that is not made by a function may name the counts (``{n.best}``)."""

    section: Section
    name: str
    holds: Callable[[Any], Any]
    says: Callable[[Any], str] | str


def findings(section: Section, subjects: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the sentences of a section that hold, each with the counts that it is about."""
    found = []
    for n in subjects:
        names: set[str] = set()
        for row in FINDINGS:
            if row.section == section and row.name not in names and row.holds(n):
                names.add(row.name)
                text = row.says.format(n=n) if isinstance(row.says, str) else row.says(n)
                found += [(visible(text), n)] if text else []
    return found


def said(section: Section, *subjects: Any) -> str:
    """Return the sentences of a section that hold, as one text."""
    return " ".join(text for text, _ in findings(section, subjects))


_WAS = {True: ("wrong", "right"), False: ("right", "wrong")}
_SCORES = {1: "Scores rose", -1: "Scores fell", 0: "It is not clear that scores rose"}
_TALKING = {1: "Talking helps.", 0: "It is not clear that talking helps.", -1: "Talking hurts."}
_RIGHT = {1: "right more often", -1: "right less often", 0: "not clearly right more often or less often"}
WORK = {
    "learner": {"learning": "learns", "sending": "sends weights", "saving": "saves", "dead": "is dead"},
    "engines": {"sampling": "sample", "sending": "take over weights", "dead": "are dead"},
}
"""What the processes of a group do, as verbs."""
_PACE = {
    "learning": "Learning sets the pace: a larger cluster.groups.{group}.learner.devices shortens an update",
    "sampling": "Sampling sets the pace: a larger cluster.groups.{group}.engines.replicas shortens an update",
    "sending": "Sending weights sets the pace: adapters (lora) have fewer weights to send",
    "saving": "Saving sets the pace: training.async_save writes while training goes on, and training.save_steps saves less often",  # noqa: E501
    "dead": "Processes that die set the pace: the folder logs/ has what they printed",
}
_FAILS = {
    "all wrong": "Nobody is right at the end on {part}.",
    "wrong": "The last answer is wrong on {part}.",
    "mixed": "On {part} one agent is right at the end and another is wrong.",
    "spoiled": "On {part} an agent gave up a right answer on the way.",
    "unread": "{part} could not be read.",
    "cut": "{part} reached the length limit.",
    "illegal": "{part} ended with an illegal move.",
    "moved": "{of} moved illegally in {part} in which it moved.",
}
"""What is said of the dialogues that fail in a way."""


def _who(n: Any) -> str:
    return "The team" if len(n.agents) > 1 else "The agent"


def _changed(n: Any) -> str:
    return "No {} answer became {}".format(*_WAS[n.better])


def _heard(n: Any) -> str:
    return f", was shown what {listed(n.heard)} said," if n.heard else ""


def _stage(stage: dict[str, Any]) -> str:
    build = stage.get("build")
    if build is None:  # a stage by updates has no builder
        return f"by {counted(stage['updates'], 'update')} of {stage['train'].upper()}"
    name = build if isinstance(build, str) else next(iter(build))
    return f"a reward model on {name}" if stage["train"] == "reward" else f"by {stage['train'].upper()} on {name}"


FINDINGS: tuple[Row, ...] = (
    # what the team learned, and whether talking helps
    Row("verdict", "learned", lambda n: n.game, ""),
    Row("verdict", "learned", lambda n: n.unlabelled and n.score_sign is not None,
        lambda n: f"{_SCORES[n.score_sign]} on held-out questions."),
    Row("verdict", "learned", lambda n: n.apart and n.score_sign is None,
        lambda n: f"Answers are {_RIGHT[n.gain.sign]} than before training."),
    Row("verdict", "learned", lambda n: n.apart,
        lambda n: f"{_SCORES[n.score_sign]}, but answers are {_RIGHT[n.gain.sign]} than before training."),
    Row("verdict", "learned", lambda n: n.gain and n.gain.sign == -1,
        lambda n: f"{_who(n)} got worse: its last answers are right less often than before training."),
    Row("verdict", "learned", lambda n: n.gain and n.gain.low == n.gain.high == 0,
        "Training changed nothing that the held-out questions show."),
    Row("verdict", "learned", lambda n: n.gain and n.gain.sign == 0,
        lambda n: f"It is not clear that {_who(n).lower()} learned: chance in the choice of questions may explain the "
        "difference."),
    Row("verdict", "learned", lambda n: n.learned == (True, True),
        lambda n: f"{_who(n)} learned to answer and to talk: first answers got better, and talking adds more to them."),
    Row("verdict", "learned", lambda n: n.learned == (False, True),
        lambda n: f"{_who(n)} learned to use what is said: last answers got better, and first answers hardly did."),
    Row("verdict", "learned", lambda n: n.learned == (True, False),
        lambda n: f"{_who(n)} learned to answer: first answers got better, and talking adds no more than before."),
    Row("verdict", "learned", lambda n: n.gain,
        lambda n: f"{_who(n)} learned: its answers are right more often than before training."),
    Row("verdict", "talking", lambda n: n.talking and n.talking.sign == 1 and n.best and n.best[1].sign < 1,
        "Talking helps on average, but the team is not clearly better than {n.best[0]} alone."),
    Row("verdict", "talking", lambda n: n.talking and n.talking.low == n.talking.high == 0,
        "Talking changes nothing that the held-out questions show."),
    Row("verdict", "talking", lambda n: n.talking, lambda n: _TALKING[n.talking.sign]),
    Row("gain", "gain", lambda n: n.gain and n.talking, lambda n: f"By training: {n.gain.points()}."),
    # what the numbers of the first screen are about
    Row("about", "about", lambda n: not n.run.dialogues and not n.run.updates(), "Nothing has been trained yet."),
    Row("about", "about", lambda n: n.game and n.ended, lambda n: f"{n.game}: {said('scope', n)}."),
    Row("about", "about", lambda n: n.unlabelled and (n.score_means or n.scored),
        "The mean score of an utterance. The questions have no labels."),
    Row("about", "about", lambda n: n.right.get("after"),
        lambda n: f"How often answers are right, on {counted(n.right['after'].total, 'held-out question')}."),
    Row("about", "about", lambda n: n.last_turn or n.right, "How often answers of the last turn are right."),
    Row("about", "after", lambda n: n.run.after is None and n.run.updates(),
        "No evaluation after training is recorded."),
    Row("about", "paid", lambda n: n.right.get("after") and n.pays_more and n.score_means,
        "A score is the mean of what training pays an utterance before credit is assigned."),
    Row("about", "paid", lambda n: n.right.get("after") and n.pays_more,
        "What training pays for was not measured on these questions."),
    Row("about", "unmeasured", lambda n: n.run.after, lambda n: not_measured(n.run.after)),
    Row("drawn", "drawn", lambda n: None not in n.temperatures and len({*n.temperatures}) > 1,
        lambda n: f"Held-out answers are {said('answers', n.temperatures[0])}, and answers in training are sampled at "
        f"temperature {n.temperatures[1]:g}, so the charts of training cannot be compared with the held-out numbers."),
    # how the team was trained
    Row("answers", "answers", lambda n: n == 0, "the likeliest ones"),
    Row("answers", "answers", lambda n: n is not None, lambda n: f"sampled at temperature {n:g}"),
    Row("rounds", "done", lambda n: not n.updates(), "No round has ended."),
    Row("rounds", "done", lambda n: n.finished,
        lambda n: f"The team was trained in {counted(len(n.updates()), 'round')}."),
    Row("rounds", "done", bool, lambda n: f"The team was trained in {len(n.updates())} of "
        f"{counted(n.section('loop')['rounds'], 'round')} so far."),
    Row("rounds", "stages", lambda n: n.updates(),
        lambda n: f"A round samples up to {counted(n.section('loop')['questions'], 'question')} and then trains "
        f"{', then '.join(map(_stage, n.section('loop')['stages']))}."),
    Row("reward", "reward", lambda n: n.get("sources"), lambda n: "The reward is {}.".format(" + ".join(
        part_name(name) if weight == 1 else f"{weight:g} {part_name(name)}" for name, weight in n["sources"].items()))),
    Row("warm start", "steps", lambda n: n.get("steps"),
        lambda n: f"A supervised warm start of {counted(n['steps'], 'step')} on written answers came first, and "
        "\u201cbefore training\u201d means after it."),
    # tools, and the agents of other runs
    Row("tools", "called", bool, lambda n: "{} training, {}.".format(n.when.capitalize(), ", ".join(
        f"{agent} called in {percent(share)} of {counted(share.total, 'turn')}" for agent, share in n.turns.items()))),
    Row("tools", "failed", lambda n: n.calls, lambda n: f"{n.failed} of {counted(n.calls, 'call')} failed."),
    Row("tools", "right", lambda n: n.gain,
        lambda n: f"Over {counted(n.questions, 'question')} with turns of both kinds, accuracy with calls minus "
        f"accuracy without is {n.gain.points()}."),
    Row("others", "teams", bool,
        lambda n: f"Teams that trained together are right {percent(n.self_play())} of the time, and teams whose agents "
        f"come from different runs {percent(n.cross_play())}, on {counted(n.questions, 'question')}. Trained together "
        f"minus mixed: {n.gap().points()}."),
    Row("others", "verdict", lambda n: n.proves_nothing(), lambda n: n.proves_nothing()),
    Row("others", "verdict", lambda n: n.gap().sign == 1,
        "So a part of what the agents learned works with their own partners only."),
    Row("others", "verdict", lambda n: n.gap().sign == -1,
        "So the agents do not depend on their own partners: teams of strangers are even better."),
    Row("others", "verdict", bool, "The interval contains 0, so no dependence on the own partners is seen."),
    Row("others", "left out", lambda n: n.left_out,
        lambda n: f"{counted(n.left_out, 'held-out question')} of {n.runs[0]} were left out, because another run was "
        "trained on them."),
    Row("cells", "cells", lambda n: len(n.seats) == 2,
        "A row has {n.seats[0]} of one run, and a column has {n.seats[1]} of one run."),
    Row("cells", "cells", bool,
        lambda n: f"A row has the agents {listed(n.seats)} of one run. Off the diagonal, one of them comes from the "
        "column's run; the number is the mean over which one."),
    Row("cells", "mean", bool,
        lambda n: "The diagonal has the teams that trained together. The mean of the others is over "
        f"{counted(sum(not team.self_play for team in n.teams), 'mixed team')}."),
    Row("cells", "survival", lambda n: len(n.seats) == 2 and n.teams[0].survives is not None,
        lambda n: "Where seats were refilled again and again by the agents of whichever run does better (alpha-Rank), "
        "the time would be spent in these teams: {}.".format(", ".join(
            f"{n.seats[0]} of {n.runs[t.runs[0]]} with {n.seats[1]} of {n.runs[t.runs[1]]} {t.survives:.0%}"
            for t in n.teams if (t.survives or 0.0) >= 0.01))),
    # where it still fails
    Row("scope", "scope", lambda n: not n.ended, ""),
    Row("scope", "scope", lambda n: n.run.of("after"),
        lambda n: f"{counted(len(n.ended), f'held-out {n.unit}')} after training"),
    Row("scope", "scope", bool,
        lambda n: f"{counted(len(n.ended), n.unit)} recorded in the last {few_updates(LAST_UPDATES)}"),
    Row("fails", "fails", bool, lambda n: _FAILS[n.way].format(part=part(n.number, n.total, n.kind), of=n.of)),
    # which processes the others wait for, and what would help
    Row("pace", "slowest", lambda n: not n.work,
        lambda n: f"The processes of every group are idle more than half of the time; those of {n.group} work "
        f"{n.share:.0%} of it. The driver sets the pace: the chart of seconds per update says with what."),
    Row("pace", "slowest", bool,
        lambda n: f"{'Group' if n.part == 'learner' else 'The engines of'} {n.group} {WORK[n.part][n.work]} "
        f"{n.share:.0%} of the time."),
    Row("pace", "remedy", lambda n: n.work, lambda n: f"{_PACE[n.work].format(group=n.group)}."),
    # the two dialogues of the first screen
    Row("dialogue", "game", lambda n: n.kind == "game" and n.one is None,
        lambda n: f"None of {counted(n.asked, 'game')} was one."),
    Row("dialogue", "game", lambda n: n.kind == "game" and outcome_of(n.one.dialogue),
        lambda n: f"It ended: {outcome_of(n.one.dialogue)}."),
    Row("dialogue", "answer", lambda n: n.kind == "answer" and n.one is None,
        lambda n: f"No recorded answer is {_WAS[n.better][1]}."),
    Row("dialogue", "answer", lambda n: n.kind == "answer", lambda n: f"{n.now.agent} is {_WAS[n.better][1]}."),
    Row("dialogue", "training", lambda n: n.kind == "training" and n.one is None,
        lambda n: f"{_changed(n)} on {counted(n.asked, 'held-out question')}."),
    Row("dialogue", "training", lambda n: n.kind == "training",
        lambda n: "{} was {} before training and is {} after it.".format(n.now.agent, *_WAS[n.better])),
    Row("dialogue", "score", lambda n: n.kind == "score" and n.one is None, "No answer has one."),
    Row("dialogue", "score", lambda n: n.kind == "score", "{n.now.agent} earned {n.now.rewards[score]:.3f}."),
    Row("dialogue", "scores", lambda n: n.kind == "scores" and n.one is None,
        lambda n: f"No answer's score was {'raised' if n.better else 'lowered'} by talking."),
    Row("dialogue", "scores", lambda n: n.kind == "scores",
        lambda n: f"{n.now.agent} earned {n.was.rewards['score']:.3f} in turn {n.was.turn + 1} and "
        f"{n.now.rewards['score']:.3f} in turn {n.now.turn + 1}."),
    Row("dialogue", "changed", lambda n: n.kind == "talking" and n.one is not None,
        lambda n: f"{n.now.agent} was {_WAS[n.better][0]} in turn {n.was.turn + 1}{_heard(n)} and is "
        f"{_WAS[n.better][1]} in turn {n.now.turn + 1}."),
    Row("dialogue", "held out", lambda n: n.kind == "talking" and n.asked,
        lambda n: f"{_changed(n)} in {counted(n.asked, 'held-out dialogue')} after training."),
    Row("dialogue", "recent", lambda n: n.kind == "talking" and n.one is None and (n.recent or not n.asked),
        lambda n: f"{_changed(n)} in {counted(n.recent, 'dialogue')} of the last {few_updates(LAST_UPDATES)}."),
)  # fmt: skip
"""The table. A sentence that is not here is one of the audit's, or stands in a chart or a table of the page."""
