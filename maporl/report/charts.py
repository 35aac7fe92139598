"""The charts of a report, as data: which numbers over the updates, under which title, with which intervals."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from maporl.evaluation.metrics import Share
from maporl.report.read import Run

Numbers = list[float | None]


@dataclass
class Series:
    """A line: a number for each of the chart's updates, None where there is none. ``low`` and ``high``: a 95% interval. ``colour``:
    the place in the page's palette, where it is not the line's own place."""

    name: str
    values: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    held_out: bool = False
    colour: int | None = None


@dataclass
class Chart:
    """Lines over the same updates. ``share``: numbers are shares, shown in %; ``whole``: the axis goes from 0 to 1. ``about`` says in
    words what is drawn; ``part`` is the part of the page that it belongs to. ``limit``: a value of the configuration that bounds or
    cuts what is drawn, and its name."""

    title: str
    about: str
    steps: list[int]
    series: list[Series]
    share: bool = False
    whole: bool = False
    part: str = "learning"
    limit: tuple[float, str] | None = None
    id: str = ""


@dataclass(frozen=True)
class Panel:
    """What a chart shows: metrics whose names match ``pattern``; its first group names the line. ``limit``: the key of the
    configuration that bounds it. ``debate``: it says nothing of a game."""

    title: str
    about: str
    pattern: str
    share: bool = False
    label: Callable[[str], str] = field(default=lambda name: name.replace("_", " "))
    part: str = "learning"
    limit: tuple[str, str] | None = None
    debate: bool = False


def _changed(name: str) -> str:
    for old, new in (("_to_", " to "), ("/", ", "), ("improved", "corrected"), ("declined", "spoiled")):
        name = name.replace(old, new)
    return f"turn {name}"


PANELS = [
    Panel("Accuracy, by turn", "Share of answers that are right, all agents together.", r"accuracy/(turn_\d+)", True),
    Panel("Accuracy of the majority vote", "Share of questions that the agents' vote gets right; a tie counts as its chance of being right.", r"majority/(turn_\d+)", True, debate=True),
    Panel("Agreement", "Share of questions to which all agents give the same answer.", r"agreement/(turn_\d+)", True, debate=True),
    Panel("Corrected and spoiled answers", "Share of answers that went from wrong to right, or from right to wrong, from a turn to the next.", r"change/(\d+_to_\d+/(?:improved|declined))", True, label=_changed, debate=True),
    Panel("Questions ended early", "Share of questions that consensus ended, by turn.", r"finished/(turn_\d+)", True, debate=True),
    Panel("Reward, by name", "Mean over all utterances of each named term. Score: the weighted sum of the sources; credit: after rules and penalties, what is trained on.", r"reward/([^/]+)"),
    Panel("Penalties", "Mean of each penalty, over the utterances that got it.", r"reward/(penalty/[^/]+)", label=lambda n: n.removeprefix("penalty/").replace("_", " ")),
    Panel("KL to the reference", "How far a policy is from where it began: nats per answer, by policy.", r"(.+)/objective/kl", part="health"),
    Panel("Entropy", "How undecided a policy is about the next token: nats, by policy.", r"(.+)/policy/entropy_avg", part="health"),
    Panel("KL of the update", "How far an update moves a policy: approximate KL in nats per token, by policy.", r"(.+)/policy/approxkl_avg", part="health", limit=("ppo", "target_kl")),
    Panel("Clipped tokens", "Share of tokens whose probability ratio was clipped, by policy.", r"(.+)/policy/clipfrac_avg", True, part="health"),
    Panel("Gradient norm", "Before it is cut to its limit, by policy.", r"(.+)/grad_norm", part="health", limit=("training", "max_grad_norm")),
    Panel("Critic", "Explained variance of the returns: 1 is perfect, 0 no better than the mean.", r"(.+)/val/explained_variance", part="health"),
    Panel("Sampler against trainer", "Mean distance between the log-probabilities that sampled a token and those that train on it: nats, by policy.", r"(.+)/policy/engine_gap", part="machine"),
    Panel("Tokens per second", "Sampled tokens over the seconds of the whole update.", r"(tokens_per_second)", label=lambda n: "tokens per second", part="machine"),
    Panel("Seconds per update", "By phase: playing the dialogues, scoring them, advantages, the update.", r"time/(.+)", part="machine"),
    Panel("Memory", "Peak of this process, in GiB.", r"memory/(peak)", part="machine"),
]  # fmt: skip
WHOLE = ("accuracy", "majority", "agreement", "finished")
COMPARED = {
    "Final turn, held out": r"eval_accuracy/turn_(\d+)",
    "Final turn, in training": r"accuracy/turn_(\d+)",
    "Majority vote at the final turn": r"majority/turn_(\d+)",
}


def charts(run: Run) -> list[dict[str, Any]]:
    """What a run's report shows over its updates; what the run does not have is not there."""
    game = run.section("protocol").get("name") == "game"
    found = []
    for panel in PANELS:
        if panel.debate and (game or (panel.pattern.startswith("majority") and _voters(run) < 3)):
            continue
        names = [(held, m[1], name) for held, name, m in _matching(run.metrics, panel.pattern)]
        steps = sorted({r["step"] for r in run.metrics if any(name in r for _, _, name in names)})
        series = []
        for held, key, name in sorted(names, key=lambda n: (n[0], _in_order(n[1]))):
            one = _series(run, name, steps, panel.label(key), held)
            if panel.pattern.startswith("accuracy") and not held:
                one.low, one.high = _intervals(run, one.values, steps)
            series.append(one)
        if panel.pattern.startswith("accuracy"):
            steps, series = _with_ends(run, steps, series)
        if panel.title == "Critic" and not any(value for one in series for value in one.values):
            continue  # there is none
        if series:
            held_out = any(one.held_out for one in series)
            about = panel.about + (" Dots: held-out questions." if held_out else "")
            whole = panel.pattern.startswith(WHOLE)
            limit = finite(run.section(panel.limit[0]).get(panel.limit[1])) if panel.limit else None
            bound = (limit, panel.limit[1]) if panel.limit and limit else None
            title = panel.title
            if game and panel.pattern.startswith("accuracy"):
                title, about = "Won, by turn", "Share of moves whose player won the game, by the turn of the move."
            found.append(Chart(title, about, steps, _merged(series), panel.share, whole, panel.part, bound))
    return [_numbered(chart) for chart in found]


def _voters(run: Run) -> int:
    """Agents that answer in the last turn, as far as an evaluation says."""
    report = run.after or run.before
    return len(report.turns[-1].agents) if report else len(run.agents())


def _with_ends(run: Run, steps: list[int], series: list[Series]) -> tuple[list[int], list[Series]]:
    """The evaluations before and after training, as the ends of the held-out lines."""
    trained = [r["step"] for r in run.updates()]
    both = ((0, run.before), (max(trained, default=0), run.after))
    ends = [(step, report) for step, report in both if report is not None and trained]
    if not ends:
        return steps, series
    at = sorted({*steps, *(step for step, _ in ends)})
    for one in series:
        for name in ("values", "low", "high"):
            known = getattr(one, name)
            if known is not None:
                by_step = dict(zip(steps, known, strict=True))
                setattr(one, name, [by_step.get(step) for step in at])
    for number in range(max(len(report.turns) for _, report in ends)):
        label = f"turn {number + 1}, held out"
        line = next((one for one in series if one.name == label), None)
        if line is None:
            line = Series(label, [None] * len(at), held_out=True)
            series.append(line)
        for step, report in ends:
            if number < len(report.turns) and report.turns[number].team.total:
                line.values[at.index(step)] = finite(report.turns[number].team.value)
    return at, series


def _merged(series: list[Series]) -> list[Series]:
    """Lines that lie on each other become one, with all their names."""
    found: list[Series] = []
    for one in series:
        same = next((o for o in found if o.values == one.values and o.held_out == one.held_out and o.low is None), None)
        if same is None or not any(one.values):
            found.append(one)
        else:
            same.name += f" = {one.name}"
    return found


def _in_order(name: str) -> list[int | str]:
    """Turn 2 before turn 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def compared(runs: list[Run]) -> list[dict[str, Any]]:
    """Charts that have a line for each run; policies' numbers are averaged over the policies of a run."""
    named = list(zip(unique_names(runs), runs, strict=True))
    found = []
    for title, pattern in COMPARED.items():
        if pattern.startswith("majority") and all(_voters(run) < 3 for run in runs):
            continue
        about = "Share of answers, or votes, that are right."
        found.append(_compare(title, about, [(n, run, last_turn(run, pattern)) for n, run in named], True, True))
    for panel in PANELS:
        policies = panel.pattern.startswith("(.+)/")
        if policies or panel.title in ("Tokens per second", "Memory"):
            about = f"{panel.about.replace(', by policy', '')} Mean over policies." if policies else panel.about
            lines = [(n, run, [key for _, key, _ in _matching(run.metrics, panel.pattern)]) for n, run in named]
            found.append(_compare(panel.title, about, lines, panel.share, part=panel.part))
    lines = [(n, run, ["reward/score"]) for n, run in named]
    found.append(_compare("Reward", "Mean score of an utterance.", lines))
    return [_numbered(chart) for chart in found if chart.series]


def unique_names(runs: list[Run]) -> list[str]:
    """A name for each run: its folder's, with as many parents as it takes to tell them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # one run, given twice


def last_turn(run: Run, pattern: str) -> list[str]:
    """The metric of the last turn among those that match, in a list; its first group is the turn. Empty where there is none."""
    held_out = pattern.startswith("eval_")
    turns = [(int(m[1]), key) for held, key, m in _matching(run.metrics, pattern) if held == held_out]
    return [max(turns)[1]] if turns else []


def _compare(
    title: str,
    about: str,
    lines: list[tuple[str, Run, list[str]]],
    share: bool = False,
    whole: bool = False,
    part: str = "learning",
) -> Chart:
    steps = sorted({r["step"] for _, run, keys in lines for r in run.metrics if any(k in r for k in keys)})
    series = []
    for number, (name, run, keys) in enumerate(lines):
        each = [_series(run, key, steps, "", False).values for key in keys]
        means = [_mean(column) for column in zip(*each, strict=True)]
        if any(value is not None for value in means):
            series.append(Series(name, means, colour=number))
    return Chart(title, about, steps, series, share, whole, part)


def _mean(values: tuple[float | None, ...]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _matching(metrics: list[dict[str, Any]], pattern: str) -> list[tuple[bool, str, re.Match[str]]]:
    """(held out, name, match) of the metrics whose whole name matches, those of the evaluation split too."""
    whole = re.compile(f"(?:eval_)?{pattern}")
    names = sorted({name for record in metrics for name in record})
    return [(n.startswith("eval_"), n, m) for n in names if (m := whole.fullmatch(n))]


def _series(run: Run, name: str, steps: list[int], label: str, held_out: bool) -> Series:
    by_step = {r["step"]: finite(r[name]) for r in run.metrics if name in r}
    return Series(label + (", held out" if held_out else ""), [by_step.get(s) for s in steps], held_out=held_out)


def finite(value: Any) -> float | None:
    """What JSON can say: six digits; NaN and infinities are no numbers there."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _intervals(run: Run, values: Numbers, steps: list[int]) -> tuple[Numbers, Numbers]:
    """95% Wilson intervals over the questions of each update."""
    episodes = {r["step"]: r["episode"] for r in run.metrics if finite(r.get("episode")) is not None}
    questions = {s: int(episodes[s] - episodes.get(s - 1, 0)) for s in episodes if s - 1 in episodes or s == 1}
    low: Numbers = []
    high: Numbers = []
    for step, value in zip(steps, values, strict=True):
        n = questions.get(step, 0)
        bounds = Share(value * n, n).interval() if value is not None and n and 0 <= value <= 1 else (None, None)
        low.append(finite(bounds[0]))
        high.append(finite(bounds[1]))
    return low, high


def _numbered(chart: Chart) -> dict[str, Any]:
    chart.id = re.sub(r"[^a-z]+", "-", chart.title.lower()).strip("-")
    return asdict(chart)
