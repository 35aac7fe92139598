"""Draw a claim's figures as SVG: every seed as a dot, means as bars, and the intervals of the paired differences."""

import math
import statistics
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

WIDTH, ROW, HEAD, FOOT = 760, 30, 46, 34
ARMS, DIFFERENCES = (170, 400), (500, 740)
"""Where the two halves of a panel begin and end, from left to right."""
STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.small{font-size:11px;fill:#777}.axis{stroke:#bbb}"
    ".seed{fill:#4477aa;fill-opacity:.55}.mean{stroke:#222;stroke-width:2.5}.range{stroke:#222;stroke-width:1.5}"
    ".zero{stroke:#cc3311;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.small{fill:#aaa}.mean,.range{stroke:#eee}.seed{fill:#88bbee}}"
)


def drawing(report: dict[str, Any]) -> str:
    """Return the SVG of a claim, with one panel for each measure that its expectation is about."""
    measures = list(dict.fromkeys(d["measure"] for d in report["differences"]))
    parts, top = [], 0
    for measure in measures:
        differences = [d for d in report["differences"] if d["measure"] == measure]
        parts += _panel(report, measure, differences, top)
        top += _height(report, differences)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" role="img">'
        f"<title>{escape(report['claim'])}</title><style>{STYLE}</style>"
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _height(report: dict[str, Any], differences: list[dict[str, Any]]) -> int:
    return HEAD + ROW * max(len(report["arms"]), len(differences)) + FOOT


def _panel(report: dict[str, Any], measure: str, differences: list[dict[str, Any]], top: int) -> list[str]:
    """Return a measure's panel: the seeds of each arm on the left, and the paired differences on the right."""
    seeds = report["seeds"].values()
    values = {arm: [figures[arm][measure] for figures in seeds] for arm in report["arms"]}
    bottom = top + _height(report, differences) - FOOT
    parts = [_text(10, top + 20, measure, "title"), _text(DIFFERENCES[0], top + 20, "difference", "title")]

    place, axis = _axis([v for own in values.values() for v in own], ARMS, bottom)
    parts += axis
    for row, (arm, own) in enumerate(values.items()):
        y = top + HEAD + ROW * row + ROW / 2
        parts += [_text(ARMS[0] - 14, y + 4, arm, "", "end"), *_dots(own, place, y)]
        parts.append(_line(place(statistics.fmean(own)), y - 9, place(statistics.fmean(own)), y + 9, "mean"))

    paired = [[a - b for a, b in zip(values[d["arm"]], values[d["against"]], strict=True)] for d in differences]
    ends = [end for d in differences for end in (d["low"], d["high"])]
    place, axis = _axis([0.0, *ends, *(value for own in paired for value in own)], DIFFERENCES, bottom)
    parts += [*axis, _line(place(0), top + HEAD - 6, place(0), bottom, "zero")]
    for row, (d, own) in enumerate(zip(differences, paired, strict=True)):
        y = top + HEAD + ROW * row + ROW / 2
        parts += [_text(DIFFERENCES[0], y - 9, f"{d['arm']} minus {d['against']}", "small"), *_dots(own, place, y + 4)]
        parts.append(_line(place(d["low"]), y + 4, place(d["high"]), y + 4, "range"))
        parts.append(_line(place(d["mean"]), y - 3, place(d["mean"]), y + 11, "mean"))
    return parts


def _axis(values: list[float], span: tuple[int, int], bottom: float) -> tuple[Callable[[float], float], list[str]]:
    """Return the function from a value to its place, and the axis with its numbers."""
    low, high = min(values), max(values)
    step = _step((high - low) or 1.0)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)

    def place(value: float) -> float:
        return span[0] + (value / step - first) / (last - first) * (span[1] - span[0])

    parts = [_line(span[0], bottom, span[1], bottom, "axis")]
    for n in range(first, last + 1):
        parts.append(_line(place(n * step), bottom, place(n * step), bottom + 4, "axis"))
        parts.append(_text(place(n * step), bottom + 17, f"{n * step:.4g}", "small", "middle"))
    return place, parts


def _step(width: float) -> float:
    """Return 1, 2 or 5 times a power of ten, of which three to eight fit into ``width``."""
    power = 10.0 ** math.floor(math.log10(width / 3))
    return next(k * power for k in (5, 2, 1) if width / (k * power) >= 3)


def _dots(values: list[float], place: Callable[[float], float], y: float) -> list[str]:
    return [f'<circle class="seed" cx="{place(v):.1f}" cy="{y:.1f}" r="4"/>' for v in values]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
