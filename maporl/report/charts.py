"""The charts of a report, as data: which numbers over the updates, under which title, with which intervals."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from maporl.evaluation import Share
from maporl.report.read import Run

Numbers = list[float | None]


@dataclass
class Series:
    """A line: a number for each of the chart's updates, None where there is none. ``low`` and ``high``: a 95% interval."""

    name: str
    values: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    held_out: bool = False


@dataclass
class Chart:
    """Lines over the same updates. ``share``: numbers are shares, shown in %; ``whole``: the axis goes from 0 to 1. ``about`` says in
    words what is drawn."""

    title: str
    about: str
    steps: list[int]
    series: list[Series]
    share: bool = False
    whole: bool = False
    id: str = ""


@dataclass(frozen=True)
class Panel:
    """What a chart shows: metrics whose names match ``pattern``; its first group names the line."""

    title: str
    about: str
    pattern: str
    share: bool = False
    label: Callable[[str], str] = field(default=lambda name: name.replace("_", " "))


PANELS = [
    Panel("Accuracy, by turn", "Share of answers that are right, all agents together. Dashed: held-out questions.", r"accuracy/(turn_\d+)", True),
    Panel("Accuracy of the majority vote", "Share of questions that the agents' vote gets right; ties count their expectation.", r"majority/(turn_\d+)", True),
    Panel("Agreement", "Share of questions to which all agents give the same answer.", r"agreement/(turn_\d+)", True),
    Panel("Changes of mind", "Share of answers that got better or worse from a turn to the next.", r"change/(\d+_to_\d+/(?:improved|declined))", True, label=lambda n: n.replace("_to_", " to ").replace("/", ", ")),
    Panel("Questions ended early", "Share of questions that consensus ended, by turn.", r"finished/(turn_\d+)", True),
    Panel("Reward, by name", "Mean over all utterances of each named term.", r"reward/([^/]+)"),
    Panel("Penalties", "Mean of each penalty, over the utterances that got it.", r"reward/(penalty/[^/]+)", label=lambda n: n.removeprefix("penalty/").replace("_", " ")),
    Panel("KL to the reference", "Nats per answer, by policy.", r"(.+)/objective/kl"),
    Panel("Entropy", "Of the next token, in nats, by policy.", r"(.+)/policy/entropy_avg"),
    Panel("Clipped tokens", "Share of tokens whose ratio was clipped, by policy.", r"(.+)/policy/clipfrac_avg", True),
    Panel("KL of the update", "Approximate KL of the updated to the sampling policy, in nats per token.", r"(.+)/policy/approxkl_avg"),
    Panel("Gradient norm", "Before clipping, by policy.", r"(.+)/grad_norm"),
    Panel("Critic", "Explained variance of the returns: 1 is perfect, 0 no better than the mean.", r"(.+)/val/explained_variance"),
    Panel("Engine against trainer", "Mean distance of log-probabilities, in nats per token, by policy.", r"(.+)/policy/engine_gap"),
    Panel("Tokens per second", "Sampled tokens over the seconds of the whole update.", r"(tokens_per_second)", label=lambda n: "tokens per second"),
    Panel("Seconds per update", "By phase.", r"time/(.+)"),
    Panel("Memory", "Peak of this process, in GiB.", r"memory/(peak)"),
]  # fmt: skip
WHOLE = ("accuracy", "majority", "agreement", "finished")
COMPARED = {
    "Final turn, held out": r"eval_accuracy/turn_(\d+)",
    "Final turn, in training": r"accuracy/turn_(\d+)",
    "Majority vote at the final turn": r"majority/turn_(\d+)",
}


def charts(run: Run) -> list[dict[str, Any]]:
    """What a run's report shows over its updates; what the run does not have is not there."""
    found = []
    for panel in PANELS:
        names = [(held, m[1], name) for held, name, m in _matching(run.metrics, panel.pattern)]
        steps = sorted({r["step"] for r in run.metrics if any(name in r for _, _, name in names)})
        series = []
        for held, key, name in sorted(names):
            one = _series(run, name, steps, panel.label(key), held)
            if panel.pattern.startswith("accuracy"):
                one.low, one.high = _intervals(run, one.values, steps, held)
            series.append(one)
        if series:
            found.append(Chart(panel.title, panel.about, steps, series, panel.share, panel.pattern.startswith(WHOLE)))
    return [_numbered(chart) for chart in found]


def compared(runs: list[Run]) -> list[dict[str, Any]]:
    """Charts that have a line for each run; policies' numbers are averaged over the policies of a run."""
    named = list(zip(unique_names(runs), runs, strict=True))
    found = []
    for title, pattern in COMPARED.items():
        about = "Share of answers, or votes, that are right."
        found.append(_compare(title, about, [(n, run, last_turn(run, pattern)) for n, run in named], True, True))
    for panel in PANELS:
        if panel.pattern.startswith("(.+)/") or panel.title in ("Tokens per second", "Memory"):
            about = f"{panel.about.replace(', by policy', '')} Mean over policies."
            lines = [(n, run, [key for _, key, _ in _matching(run.metrics, panel.pattern)]) for n, run in named]
            found.append(_compare(panel.title, about, lines, panel.share))
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
    title: str, about: str, lines: list[tuple[str, Run, list[str]]], share: bool = False, whole: bool = False
) -> Chart:
    steps = sorted({r["step"] for _, run, keys in lines for r in run.metrics if any(k in r for k in keys)})
    series = []
    for name, run, keys in lines:
        each = [_series(run, key, steps, "", False).values for key in keys]
        means = [_mean(column) for column in zip(*each, strict=True)]
        if any(value is not None for value in means):
            series.append(Series(name, means))
    return Chart(title, about, steps, series, share, whole)


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


def _intervals(run: Run, values: Numbers, steps: list[int], held_out: bool) -> tuple[Numbers, Numbers]:
    """95% Wilson intervals over the questions of each update."""
    if held_out:
        wanted = (run.config.get("evaluation") or {}).get("questions") or 0
        questions = dict.fromkeys(steps, min(wanted, (run.before or {}).get("questions", wanted)))
    else:
        episodes = {r["step"]: r["episode"] for r in run.metrics if "episode" in r}
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
