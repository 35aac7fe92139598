"""The page: the data of one or several runs, compressed into one HTML file that needs nothing else."""

import base64
import gzip
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from maporl.config.safe_yaml import dump_yaml
from maporl.credentials import without_secrets
from maporl.errors import RunError
from maporl.evaluation.metrics import SCORE, Difference, Evaluation, numbers_of, proves_nothing
from maporl.report import groups
from maporl.report.audit import audit_of, shown
from maporl.report.charts import charts, compared, finite, unique_names
from maporl.report.counts import counts_of
from maporl.report.dialogues import FLAGS, MOST, entries, graded, right_share
from maporl.report.exhibits import exhibits
from maporl.report.failures import failures
from maporl.report.findings import said
from maporl.report.language import CACHED, counted, listed, named, part_name, percent, task_of
from maporl.report.metric_panels import REWARD, ROWS
from maporl.report.read import Run, read_run
from maporl.report.result import first_screen
from maporl.report.story import amount, reward, setup, story, told
from maporl.report.tables import crossplay, tables
from maporl.text import all_printable, printable, visible
from trl_ext.files.atomic import replace_file

SCRIPTS = ("vendor/uplot.js", "vendor/preact.js", "page.js")
STYLES = ("vendor/uplot.css", "page.css")
GENERATOR = "maporl report"
logger = logging.getLogger(__name__)

REWARDS = {metric.name.removeprefix("reward/"): metric.meaning for metric in ROWS[REWARD] if metric.name.islower()}
"""What the names of the library's own rewards mean."""


def payload(runs: Sequence[Run], most: int = MOST) -> dict[str, Any]:
    """Everything that a page shows, as values that JSON can hold."""
    return {
        **about(runs),
        "dialogues": [e for number, run in enumerate(runs) for e in entries(run, number, most // len(runs))],
    }


def about(runs: Sequence[Run]) -> dict[str, Any]:
    """What a page shows besides the dialogues."""
    one = runs[0] if len(runs) == 1 else None
    names = unique_names([run.folder for run in runs])
    compared_runs = f"{names[0]} and {names[1]} compared" if len(runs) == 2 else f"{len(runs)} runs compared"
    return {
        "title": title_of(one) if one else compared_runs,
        "charts": charts(one, audit_of(one).built.get("learner")) if one else compared(list(runs)),
        "flags": FLAGS,
        "rewards": {name: told for name, told in REWARDS.items() if any(name in names for names in _rewards(runs))},
        "runs": [_about(run, name) for run, name in zip(runs, names, strict=True)],
        "comparison": None if one else comparison(runs, names),
        "recorded": sum(run.recorded for run in runs),
    }


def _of_one_task(runs: Sequence[Run]) -> bool:
    """Whether all runs are known to have the same task."""
    tasks = {json.dumps(run.section("task"), sort_keys=True, default=str) for run in runs}
    return len(tasks) == 1 and bool(runs[0].section("task"))


def _rewards(runs: Sequence[Run]) -> list[set[str]]:
    """The names of the rewards in each run's last dialogues."""
    return [
        {name for one in run.dialogues[-50:] for u in one.dialogue.utterances for name in u.rewards} for run in runs
    ]


def _about(run: Run, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "subject": subject(run),
        "finished": run.finished,
        "heading": _heading(run),
        "state": _state(run),
        "result": first_screen(run),
        "exhibits": exhibits(run),
        "setup": setup(run),
        "learns_from": [visible(text) for text in run.learns_from or filter(None, [reward(run)])],
        "how_drawn": said("drawn", counts_of(run)) if run.before or run.after else "",
        "tables": tables(run),
        "told": told(run),
        "story": story(run),
        "audit": shown(audit_of(run)),
        "failures": failures(run),
        "results": results(run),
        "flips": [] if counts_of(run).game else _flips(run),
        "groups": groups.section(run),
        "crossplay": crossplay(run.crossplay) if run.crossplay else None,
        "config": dump_yaml(without_secrets(run.config)) if run.config else "",
    }


def _heading(run: Run) -> str:
    """What stands above the first screen."""
    who = "team" if len(counts_of(run).agents) != 1 else "agent"
    return f"What the {who} learned" if run.after is not None else f"What the {who} has shown so far"


def _state(run: Run) -> str:
    """How far the run has come."""
    if run.section("loop").get("stages"):
        return said("rounds", run)
    unfinished = ", not finished" if not run.finished and run.config.get("updates") is not None else ""
    return f"{made}{unfinished}." if (made := amount(run)) else ""


def comparison(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Runs beside each other, a column for each: ``results`` are the rows that matter most, and ``setup`` those in
    which their configurations differ. ``verdict`` compares two runs question by question.
    """
    shared = _of_one_task(runs)
    columns = [_column(run) for run in runs]
    return {
        "names": list(names),
        "verdict": _against(runs[0], runs[1], names) if len(runs) == 2 and shared else "",
        "results": [{"key": key, "values": [column[key] for column in columns]} for key in columns[0]],
        "setup": differences(runs),
        "comparable": shared,
        "rewards": _sums(runs, names),
        "scores": any("score" in value for column in columns for value in column.values()),
    }


def _sums(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Say that the scores of runs are different sums of rewards, where they are."""
    sums = [reward(run) or "Its reward is not recorded." for run in runs]
    told = [f"{name}: {each}" for name, each in zip(names, sums, strict=True)] if len({*sums}) > 1 else []
    return visible(" ".join(["These scores are different sums and cannot be compared.", *told])) if told else ""


def _column(run: Run) -> dict[str, str]:
    """What a comparison shows of a run, by the name of the row."""

    def last(report: Evaluation | None) -> str:
        if report is None:
            return "\u2013"
        score = report.rewards.get(SCORE)
        told = [percent(report.final())] if report.final().total else []
        return ", ".join([*told, *([] if score is None else [f"score {score:.3f}"])]) or "\u2013"

    def gain(difference: Difference | None) -> str:
        return "\u2013" if difference is None else difference.brief()

    updates = run.updates()
    return {
        "right after training": last(run.after),
        "right before training": last(run.before),
        "points by training": gain(counts_of(run).gain),
        "points by talking": gain(counts_of(run).talking),
        "updates": str(updates[-1]["step"] if updates else 0),
        "task": part_name(run.section("task").get("name", "\u2013")),
        "protocol": part_name(run.section("protocol").get("name", "\u2013")),
    }


def _against(one: Run, other: Run, names: Sequence[str]) -> str:
    """How two runs differ on the held-out questions that both were asked after training, in a sentence."""
    first, second = (
        {(d.example.id, d.example.question): right_share(d) for r in run.of("after") if graded(d := r.dialogue)}
        for run in (one, other)
    )
    pairs = [(first[key], second[key]) for key in second if key in first]
    if not pairs:
        return ""
    difference = Difference.of(pairs)
    told = {
        1: f"{names[1]} is better than {names[0]}",
        -1: f"{names[1]} is worse than {names[0]}",
        0: f"it is not clear whether {names[1]} is better than {names[0]}",
    }[difference.sign]
    asked = counted(len(pairs), "held-out question")
    doubt = proves_nothing(zip(*pairs, strict=True), 1)
    return visible(f"On {asked}, {told}: {difference.points()}. {doubt}")


def results(run: Run) -> list[dict[str, Any]]:
    """Held-out accuracy by turn and speaker, before and after training. The majority vote is left out with fewer than
    three agents, where it says nothing new.
    """
    last = run.after or run.before
    if last is not None and last.unlabelled:
        return []
    rows = []
    for number, turn in enumerate(last.turns if last else ()):
        for who in (*turn.agents, "all agents", *(["majority vote"] if len(turn.agents) > 2 else [])):
            shares = [_share_of(report, number, who) for report in (run.before, run.after)]
            rows.append({"turn": number + 1, "who": who, "before": shares[0], "after": shares[1]})
    return rows


def _share_of(report: Evaluation | None, turn: int, who: str) -> dict[str, float | None] | None:
    if report is None or turn >= len(report.turns):
        return None
    accuracy = report.turns[turn]
    share = {**accuracy.agents, "all agents": accuracy.team, "majority vote": accuracy.majority}.get(who)
    if share is None:
        return None
    return {name: finite(number) for name, number in numbers_of(share).items()}


def _flips(run: Run) -> list[dict[str, Any]]:
    """How many answers changed from turn to turn, in each evaluation."""
    keys = ("stayed_right", "right_to_wrong", "wrong_to_right", "stayed_wrong")
    tables = []
    for title, report in (("held out, before training", run.before), ("held out, after training", run.after)):
        if report is not None and any(f.questions for f in report.flips):
            tables.append({"title": title, "turns": [{k: vars(f)[k] for k in keys} for f in report.flips]})
    return tables


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The keys whose values differ between the configurations of ``runs``, and each run's value.

    A null counts as an absent key.
    """
    flat = [_flat(without_secrets({k: v for k, v in run.config.items() if k != "output_dir"})) for run in runs]
    keys = sorted({key for one in flat for key in one}, key=_rank)
    absent = "\u2013"
    return [
        {"key": visible(key), "values": [one.get(key, absent) for one in flat]}
        for key in keys
        if len({one.get(key, absent) for one in flat}) > 1
    ]


FIRST = ("task", "protocol", "agents", "reward", "advantage", "branching", "ppo", "training")
"""The sections of a configuration whose differences are shown first, in this order."""


def _rank(key: str) -> tuple[int, str]:
    section = key.split(".")[0]
    return (FIRST.index(section) if section in FIRST else len(FIRST), key)


def _flat(content: Any, at: str = "") -> dict[str, str]:
    if isinstance(content, dict):
        return {
            k: v
            for name, value in content.items()
            for k, v in _flat(value, f"{at}.{name}" if at else str(name)).items()
        }
    return {} if content is None else {at: visible(named(json.dumps(content, ensure_ascii=False, default=str)))}


def render(content: dict[str, Any], live: bool = False) -> str:
    """The HTML page of a :func:`payload`. A ``live`` page does not hold the data; it asks the address ``data`` beside
    it for them again and again.
    """
    packed = b"" if live else gzip.compress(as_json(content), 4, mtime=0)
    scripts = [Markup(_asset(name)) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    connect = "'self'" if live else "'none'"
    return _template().render(
        title=printable(content["title"]),
        generator=GENERATOR,
        scripts=scripts,
        styles=[Markup(_asset(name)) for name in STYLES],
        policy=(
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src "
            f"{connect}; form-action 'none'; base-uri 'none'"
        ),
        data=base64.b64encode(packed).decode(),
        live=live,
        runs=all_printable(content["runs"]),
    )


def as_json(content: dict[str, Any]) -> bytes:
    """``content`` as strict JSON, in which :func:`finite` has left no NaN and no infinity, with all texts printable."""
    return json.dumps(all_printable(content), ensure_ascii=False, allow_nan=False).encode()


def write_report(folders: Sequence[str | Path], output: str | Path | None = None, most: int = MOST) -> Path:
    """Write the report of the runs in ``folders``, with a warning for records that cannot be read, and return its file:
    ``output``, or else ``report.html`` in the folder of a single run and ``comparison.html`` in the working directory
    for several.

    Raises:
        RunError: a folder is not a run, or the file cannot be written, or it exists and is not a report. Only an
            earlier report is ever overwritten.
    """
    runs = [read_run(folder) for folder in folders]
    for fault in (fault for run in runs for fault in run.damaged):
        logger.warning("%s", fault)
    if output is None:
        output = runs[0].folder / "report.html" if len(runs) == 1 else Path("comparison.html")
    output = Path(output)
    try:
        if output.is_dir():
            raise RunError(f"{output}: is a folder; give --output a file's name")
        if output.exists() and not _is_report(output):
            raise RunError(f"{output}: exists and is not a report; nothing was overwritten. Give another name")
        replace_file(output, render(payload(runs, most)))
    except OSError as error:
        raise RunError(f"{output}: cannot be written: {error.strerror}; give --output a file that can be") from None
    return output


def _is_report(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return f'content="{GENERATOR}"'.encode() in content.read(2000)


@cache
def _asset(name: str) -> str:
    return files("maporl.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def page_version() -> str:
    """A fingerprint of what draws the page: its template, its style and its script."""
    parts = [_asset(name).encode() for name in ("page.html", "page.css", "page.js")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@cache
def _template() -> Any:
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(_asset("page.html"))


MOST_NAMED = 3
"""With more agents than this, a title counts them."""
_NOBODYS = re.compile(
    r"(runs?|outputs?|out|results?|final|model|checkpoint|tmp\w*|temp\w*|\d[\d\W_tTzZ]*|[0-9a-f]{12,})([-_]?\d+)?",
    re.IGNORECASE,
)
"""Names of folders that nobody has chosen to tell one run from another."""


def title_of(run: Run) -> str:
    """The run's name: the one that a person gave its folder, or else what its team and its task say."""
    folder = run.folder.resolve()
    if cached := CACHED.fullmatch(str(folder)):
        return cached[1].replace("--", "/", 1)
    return folder.name if not _NOBODYS.fullmatch(folder.name) else subject(run) or folder.name


def subject(run: Run) -> str:
    """Who does what, such as "ann and bob on toy_sum". Empty where the run does not say it."""
    agents, game = counts_of(run).agents, counts_of(run).game
    who = listed(agents) if len(agents) <= MOST_NAMED else counted(len(agents), "agent")
    task = f"in the game {game}" if game else f"on {task_of(run)}" if task_of(run) else ""
    return visible(f"{who} {task}".strip()) if who else ""
