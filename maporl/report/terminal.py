"""A run in a terminal: its story, its numbers over the updates, and the newest dialogue."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maporl.report.charts import Numbers, charts
from maporl.report.dialogues import entry
from maporl.report.findings import said
from maporl.report.groups import KINDS, Bar, bars, pace_of
from maporl.report.metric_panels import ROWS
from maporl.report.read import Run
from maporl.report.story import story

BLOCKS = "▁▂▃▄▅▆▇█"
HINT = "Ctrl-C ends this view; the run goes on."


def frame(run: Run, width: int) -> Group:
    """What ``maporl watch --tui`` shows of ``run`` on a terminal of ``width`` columns."""
    parts: list[Any] = [Text.assemble((f"{part['title']} ", "bold"), part["text"]) for part in story(run)]
    table = Table(box=None, padding=(0, 1), expand=False)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=max(12, width // 3))
    table.add_column("now", justify="right", no_wrap=True)
    table.add_column("over the updates", no_wrap=True)
    titles = {panel.title for panel in ROWS if panel.terminal}
    for chart in (chart for chart in charts(run) if chart["title"] in titles):
        lines = [(s, [v for v in s["values"] if v is not None]) for s in chart["series"]]
        lines = [(series, values) for series, values in lines if values]
        if len(lines) > 1:
            table.add_row(Text(chart["title"], style="bold"))
        for series, values in lines:
            name = series["name"] if len(lines) > 1 else chart["title"]
            now = f"{values[-1]:.1%}" if chart["share"] else f"{values[-1]:.4g}"
            table.add_row(Text(name), now, sparkline(values, max(8, width // 3), chart["share"]))
    if table.row_count:
        parts.append(table)
    if groups := bars(run)[1]:
        parts += [Text(), *_groups(groups, max(12, width - 24)), Text(said("pace", pace_of(groups)))]
    played = [(one.when, one) for one in run.dialogues if isinstance(one.when, int)]
    if played:
        when, newest = max(played, key=lambda p: p[0])
        parts.append(_dialogue(when, entry(newest)))
    return Group(*parts, Text(HINT, style="dim"))


def sparkline(values: Sequence[float | None] | Numbers, width: int, share: bool = False) -> str:
    """The numbers among ``values`` as at most ``width`` bars, each the mean of an equal part of them. Bars of a share
    go from 0 to 1, others from the smallest mean to the largest.

    >>> sparkline([0.0, 0.5, None, 1.0], 3, share=True)
    '▁▅█'
    """
    numbers = [v for v in values if v is not None]
    if not numbers:
        return ""
    width = min(width, len(numbers))
    cuts = [len(numbers) * i // width for i in range(width + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = (0.0, 1.0) if share else (min(means), max(means))
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((m - low) / span * len(BLOCKS)))] for m in means)


WORK = {"learning": ("L", "blue"), "sampling": ("S", "green"), "sending": ("W", "yellow"), "saving": ("C", "magenta"), "dead": ("X", "red"), "idle": (".", "dim")}  # fmt: skip  # noqa: E501
"""A letter and a colour for each kind of work."""


def _groups(parts: list[Bar], width: int) -> list[Text]:
    """A legend, and a line for each bar: equal parts of the last updates' time, each with the work in its middle."""
    lines = [Text("  ".join(f"{WORK[what][0]} {what}" for what in KINDS), style="dim")]
    for bar in parts:
        spent = [(what, update[what]) for update in bar.updates for what in KINDS]
        step = sum(seconds for _, seconds in spent) / width
        line = Text(f"{bar.group}, {bar.part}"[:20].ljust(22))
        end, cell = 0.0, 0
        for what, seconds in spent:
            end += seconds
            while cell < width and (cell + 0.5) * step < end:
                line.append(*WORK[what])
                cell += 1
        lines.append(line)
    return lines


def _dialogue(when: int, shown: dict[str, Any]) -> Panel:
    label = f"   (right: {_cut(shown['label'])})" if shown["label"] else ""
    note = f"   ({shown['outcome']})" if shown["game"] else label
    lines = Text(f"{_cut(shown['question'])}{note}\n", style="bold")
    words = ("won", "did not win") if shown["game"] else ("right", "wrong")
    for u in shown["said"]:
        mark, style = {True: (words[0], "green"), False: (words[1], "red"), None: ("", "")}[u["correct"]]
        lines.append(f"{u['agent']}, turn {u['turn']}: {_cut(u['text'])} ")
        lines.append(f"{mark}\n", style=style)
    lines.rstrip()
    return Panel(lines, title=f"a dialogue of update {when}", title_align="left")


def _cut(text: str) -> str:
    """``text`` on one line, cut to what three lines of an ordinary terminal hold."""
    text = " ".join(text.split())
    return text if len(text) <= 240 else text[:237] + "..."
