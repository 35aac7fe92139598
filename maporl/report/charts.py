"""The charts of a report as data: the panels of :mod:`maporl.report.metric_panels` with a run's numbers and their
intervals."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from maporl.evaluation.metrics import Share
from maporl.report.metric_panels import ROWS, Comparison, Line, Panel, lines_of
from maporl.report.read import Run

Numbers = list[float | None]


@dataclass
class Series:
    """A line: a number for each of the chart's updates, or None. ``low`` and ``high`` are a 95% interval.
    ``colour`` is a place in the page's palette; by default it follows from the order of the lines."""

    name: str
    values: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    held_out: bool = False
    colour: int | None = None


@dataclass
class Chart:
    """Lines over the same updates. ``about`` says in words what is drawn, ``part`` is the part of the page that has the
    chart. ``share``: numbers are shown in percent. ``whole``: the axis goes from 0 to 1. ``limit`` is a value of the
    configuration that bounds what is drawn, and its name.
    """

    title: str
    about: str
    steps: list[int]
    series: list[Series]
    share: bool = False
    whole: bool = False
    part: str = "learning"
    limit: tuple[float, str] | None = None
    id: str = ""


def charts(run: Run, learners: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The charts of one run, for the panels that it has numbers for.

    ``learners`` says by what each policy learned, as the run's audit has it. Where policies learned in different ways,
    their lines say which, and what depends on the loss has a chart for each.
    """
    run = _with_rewards(run)
    kinds = {name: f"{facts.get('objective')}, {facts.get('returns')}" for name, facts in (learners or {}).items()}
    kinds = kinds if len({*kinds.values()}) > 1 else {}
    played = any("game" in u.tags for one in run.dialogues[:1] for u in one.dialogue.utterances)
    game = played or run.section("protocol").get("name") == "game"
    names = _names(run)
    drawn = []
    apart = [(panel, *part) for panel in ROWS for part in _apart(panel, lines_of(panel, names), kinds)]
    for panel, of_kind, lines in apart:
        if panel.debate and (game or _voters(run) < panel.voters):
            continue
        steps = sorted({r["step"] for r in run.metrics if any(line.name in r for line in lines)})
        series = [_series(run, line, steps) for line in lines]
        if panel.from_dialogues:
            for one in series:
                if not one.held_out:
                    one.low, one.high = _intervals(run, one.values, steps)
            steps, series = _with_ends(run, steps, series)
        if panel.absent_if_zero and not any(value for one in series for value in one.values):
            continue
        if any(value is not None for one in series for value in one.values):
            title, about = panel.in_game if game and panel.in_game else (panel.title, panel.about)
            title += f" ({of_kind})" if of_kind else ""
            if any(one.held_out for one in series):
                about += " Each line says whether it is of training or of held-out questions."
            shown = {_policy(line) for line in lines}
            limit = _limit(run, panel, (facts for name, facts in (learners or {}).items() if name in shown))
            bound = (limit, panel.limit[1]) if panel.limit and limit else None
            drawn.append(Chart(title, about, steps, _merged(series), _is_share(panel), panel.whole, panel.part, bound))
    return [_numbered(chart) for chart in drawn]


def _apart(panel: Panel, lines: list[Line], kinds: Mapping[str, str]) -> list[tuple[str, list[Line]]]:
    """The lines of a panel with the ``kinds`` of their policies' algorithms, or those of each kind apart, with its
    name."""
    of: dict[str, list[Line]] = {}
    for line in lines:
        of.setdefault(kinds.get(_policy(line), ""), []).append(line)
    if panel.of_loss:
        return [*of.items()]
    kind_of = {line.name: kind for kind, some in of.items() for line in some}
    named = [replace(one, label=f"{one.label}, {kind}") if (kind := kind_of[one.name]) else one for one in lines]
    return [("", named)]


def _policy(line: Line) -> str:
    return line.name.removeprefix("eval_").partition("/")[0]


def _limit(run: Run, panel: Panel, learners: Iterable[Mapping[str, Any]]) -> float | None:
    """The limit of a panel, if all policies that it shows have the same: that of the team, or of their algorithms."""
    if panel.limit is None:
        return None
    section, key = panel.limit
    team = run.section(section).get(key)
    limits = {finite(facts.get("own", {}).get(key, team)) for facts in learners} or {finite(team)}
    return limits.pop() if len(limits) == 1 else None


def _with_rewards(run: Run) -> Run:
    """The run with the rewards of its evaluations among its metrics, which only those without labels have."""
    last = max((r["step"] for r in run.updates()), default=0)
    both = ((0, run.before), (last, run.after)) if last else ()
    ends = [
        {"step": step, **{f"eval_{name}": value for name, value in report.rewards.items()}}
        for step, report in both
        if report is not None
    ]
    return replace(run, metrics=[*run.metrics, *ends])


def _names(run: Run) -> set[str]:
    """The names of the run's metrics, without rewards that are only charged for.

    These are counts of words and the like, beside which scores and credits would all be flat lines at 0.
    """
    charges, sources = (run.section("reward").get(key) for key in ("charges", "sources"))
    charged: set[str] = set()
    if isinstance(charges, dict) and isinstance(sources, dict):
        # a function of a run that was made in Python has its place in front of its name here, and not in the metrics
        alone = [str(name) for name in charges if name not in sources]
        charged = {f"reward/{part}" for name in alone for part in (name, name.rpartition(":")[2])}
    return {name for record in run.metrics for name in record} - charged


def _is_share(panel: Panel) -> bool:
    return ROWS[panel][0].unit == "share"


def _voters(run: Run) -> int:
    """How many agents answer in the last turn: as an evaluation has counted them, else all agents."""
    report = run.after or run.before
    return len(report.turns[-1].agents) if report else len(run.agents())


def _with_ends(run: Run, steps: list[int], series: list[Series]) -> tuple[list[int], list[Series]]:
    """The steps and lines with the evaluations before and after training added as the ends of the held-out lines."""
    trained = [r["step"] for r in run.updates()]
    both = ((0, run.before), (max(trained, default=0), run.after))
    ends = [(step, report) for step, report in both if report is not None and trained and report.final().total]
    if not ends:
        return steps, series
    at = sorted({*steps, *(step for step, _ in ends)})
    for one in series:
        for name in ("values", "low", "high"):
            values = getattr(one, name)
            if values is not None:
                by_step = dict(zip(steps, values, strict=True))
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
    """The lines, of which those with equal numbers are one line that has all their names."""
    merged: list[Series] = []
    for one in series:
        same = next(
            (o for o in merged if o.values == one.values and o.held_out == one.held_out and o.low is None), None
        )
        if same is None or not any(one.values):
            merged.append(one)
        else:
            same.name += f" = {one.name}"
    return merged


def compared(runs: list[Run]) -> list[dict[str, Any]]:
    """Charts that have one line for each run. Numbers of policies are averaged over the policies of a run."""
    named = list(zip(unique_names([run.folder for run in runs]), runs, strict=True))
    drawn = []
    for panel in ROWS:
        if all(_voters(run) < panel.voters for run in runs):
            continue
        for comparison in panel.comparisons:
            lines = [(name, run, compared_names(run, panel, comparison)) for name, run in named]
            drawn.append(_compare(panel, comparison, lines))
    return [_numbered(chart) for chart in drawn if chart.series]


def compared_names(run: Run, panel: Panel, comparison: Comparison) -> list[str]:
    """The metrics of a run whose mean is its line in a comparison; none where the run has none of them."""
    lines = lines_of(panel, _names(run))
    if comparison.last_turn:
        return [line.name for line in lines if line.held_out == comparison.held_out][-1:]
    return [line.name for line in lines if comparison.only in ("", line.name)]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """A name for each run: the name of its folder, with as many parent folders as it takes to tell the runs apart."""
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # one run, given twice


def _compare(panel: Panel, comparison: Comparison, lines: list[tuple[str, Run, list[str]]]) -> Chart:
    steps = sorted({r["step"] for _, run, names in lines for r in run.metrics if any(name in r for name in names)})
    series = []
    for number, (label, run, names) in enumerate(lines):
        each = [_values(run, name, steps) for name in names]
        means = [_mean(column) for column in zip(*each, strict=True)]
        if any(value is not None for value in means):
            series.append(Series(label, means, colour=number))
    over = " Mean over policies." if ROWS[panel][0].name.startswith("POLICY/") else ""
    title, about = comparison.title or panel.title, comparison.about or panel.about + over
    return Chart(title, about, steps, series, _is_share(panel), panel.whole, panel.part)


def _mean(values: tuple[float | None, ...]) -> float | None:
    numbers = [v for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _series(run: Run, line: Line, steps: list[int]) -> Series:
    label = line.label + (", held out" if line.held_out else "")
    return Series(label, _values(run, line.name, steps), held_out=line.held_out)


def _values(run: Run, name: str, steps: list[int]) -> Numbers:
    by_step = {r["step"]: finite(r[name]) for r in run.metrics if name in r}
    return [by_step.get(step) for step in steps]


def finite(value: Any) -> float | None:
    """``value`` with six digits; None for NaN, infinities, and anything that is not a number, which JSON cannot
    hold."""
    try:
        return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def questions_by_step(run: Run) -> dict[int, int]:
    """How many questions were asked in each update, where the records tell."""
    episodes = {r["step"]: r["episode"] for r in run.metrics if finite(r.get("episode")) is not None}
    return {s: int(episodes[s] - episodes.get(s - 1, 0)) for s in episodes if s - 1 in episodes or s == 1}


def _intervals(run: Run, values: Numbers, steps: list[int]) -> tuple[Numbers, Numbers]:
    """95% Wilson intervals over the questions of each update."""
    questions = questions_by_step(run)
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
