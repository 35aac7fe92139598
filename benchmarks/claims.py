"""Test what papers claim, each claim with one command, over five seeds or more.

    python benchmarks/claims.py run co_training             # every arm and seed that is not finished yet, then the
    table python benchmarks/claims.py run co_training --jobs 1 --seeds 0 1 2 3 4 python benchmarks/claims.py page
    # write docs/claims.md and its drawings from benchmarks/results/

A claim is data (``benchmarks/claims_data.py``): what is expected, written down before the run, a world, and the arms as
overrides of the world's configuration. All arms of a seed start from the same warm-started weights and answer the same
held-out questions. So arms are compared seed by seed. The interval on a difference is that of Student's t over the
seeds.

Runs stand in ``runs/claims`` (``--keep``). A finished run is not run again, and claims that have an arm in common share
it. The figures are written to ``benchmarks/results/NAME.json``.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from textwrap import fill
from typing import Any

from claims_data import CLAIMS, STILL, Claim, Comparison, Lesson
from claims_drawing import drawing
from claims_verifier import URLS_VARIABLE, make_verifier, served
from learning import T95, Run, train
from quickstart import about

from maporl.evaluation.metrics import proves_nothing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/claims.md"
DRAWINGS = ROOT / "docs/images/claims"
LEAST_SEEDS = 5
WIDTH = 138
PROVENANCE = ("commit", "machine", "date")
Asked = tuple[Path, dict[str, str]]
"""The folder of the runs that ask a verifier, and the environment variables that tell them where it is served."""
ABOUT = (
    "Each section tests one claim of a paper in a tiny world, over five seeds or more. The expectation was written "
    "down before the run, and what falls the other way stays here. A difference is taken seed by seed, between runs "
    "that start from the same weights and answer the same held-out questions. Its interval is that of Student's t "
    "over the seeds. Tiny worlds say nothing about the size of an effect with real models. In the drawings a dot is a "
    "seed, an upright bar is a mean, and a line is the interval of a difference."
)


def finished_run(world: str, seed: int, sets: list[str], root: Path, variables: dict[str, str] | None = None) -> Run:
    """Return the run of this configuration and seed. It is trained if ``root`` does not hold it yet.

    The folder's name has a digest of the resolved configuration, to which environment ``variables`` such as the port of
    a server do not belong. A run that was interrupted starts again.
    """
    from maporl.config.parse import to_yaml
    from maporl.validation.load import load

    resolved = to_yaml(load(ROOT / world, [*sets, f"seed={seed}", "output_dir=x"]))
    folder = root / f"{Path(world).stem}-{seed}-{hashlib.sha256(resolved.encode()).hexdigest()[:10]}"
    record = folder / "about.json"
    if not record.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        here = about()
        done = train(world, seed, sets, folder, variables)
        record.write_text(json.dumps(here | {"seconds": round(done.seconds)}))
    return Run(folder, json.loads(record.read_text())["seconds"])


def warm_start(world: str, seed: int, root: Path) -> Run:
    """Return the run that warm-starts a world's team and trains nothing more."""
    return finished_run(world, seed, [*STILL, "evaluation.questions=0"], root)


def warm_started(world: str, seed: int, root: Path) -> list[str]:
    """Return the overrides that load a world's warm-started weights, which all arms of a seed start from."""
    from maporl.validation.load import load

    start = warm_start(world, seed, root).folder / "initial"
    agents = load(ROOT / world, []).agents
    loaded = [(f"agents.{n}.tiny=null", f"agents.{n}.model={start / (a.policy or n)}") for n, a in agents.items()]
    return ["warm_start.steps=0", *(line for pair in loaded for line in pair)]


def lesson_folder(lesson: Lesson, seed: int, root: Path) -> Path:
    """Return the folder of a lesson's run."""
    if lesson.sets is None:
        return warm_start(lesson.world, seed, root).folder
    return finished_run(lesson.world, seed, [*warm_started(lesson.world, seed, root), *lesson.sets], root).folder


def measure_seed(claim: Claim, seed: int, root: Path) -> dict[str, dict[str, Any]]:
    """Return each arm's figures for one seed, with the commit, machine and date of its run."""
    asked: dict[str, Asked] = {}
    with ExitStack() as servers:
        for number, (arm, lore) in enumerate(claim.verifiers.items()):
            folder = warm_start(claim.world, seed, root).folder / f"verifiers/{number}"
            start = warm_started(claim.world, seed, root)
            verifier = make_verifier(ROOT / claim.world, seed, start, folder, lore)
            asked[arm] = folder / "runs", {URLS_VARIABLE: servers.enter_context(served(verifier))}
        return measure_arms(claim, seed, root, asked)


def measure_arms(claim: Claim, seed: int, root: Path, asked: dict[str, Asked]) -> dict[str, dict[str, Any]]:
    """Return each arm's figures.

    An arm that asks a verifier has a folder for its runs and environment variables of its own in ``asked``.
    """
    start = warm_started(claim.world, seed, root)
    folders = {name: str(lesson_folder(lesson, seed, root)) for name, lesson in claim.lessons.items()}
    arms = {}
    for arm, sets in claim.arms.items():
        sets = [re.sub("<(.+)>", lambda found: folders[found[1]], line) for line in sets]
        place, variables = asked.get(arm, (root, {}))
        done = finished_run(claim.world, seed, [*start, *sets], place, variables)
        figures = {name: round(float(measure(done)), 4) for name, measure in claim.measures.items()}
        record = json.loads((done.folder / "about.json").read_text())
        arms[arm] = figures | {key: record[key] for key in PROVENANCE}
        print(f"seed {seed}, {arm}: {figures}", flush=True)
    return arms


def difference(report: dict[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Return the paired difference of two arms: its mean, its 95% t interval over the seeds, and a verdict.

    The verdict is "moves in the claimed direction" if the whole interval lies on the claimed side of 0, "moves in the
    other direction" if it lies on the other side, and "does not move by more than chance" if it contains 0. If all
    seeds of both arms have one value, it is "proves nothing".
    """
    name, arm, against, direction = comparison.measure, comparison.arm, comparison.against, comparison.direction
    seeds = [(seed[against][name], seed[arm][name]) for seed in report["seeds"].values()]
    own = [more - less for less, more in seeds]
    mean = statistics.fmean(own)
    half = T95[len(own)] * statistics.stdev(own) / math.sqrt(len(own))
    sign = 1 if mean - half > 0 else -1 if mean + half < 0 else 0
    verdicts = {
        direction: "moves in the claimed direction",
        -direction: "moves in the other direction",
        0: "does not move by more than chance",
    }
    return {
        "measure": name,
        "arm": arm,
        "against": against,
        "claimed": "more" if direction > 0 else "less",
        "mean": round(mean, 4),
        "low": round(mean - half, 4),
        "high": round(mean + half, 4),
        "verdict": "proves nothing" if proves_nothing(seeds, len(seeds)) else verdicts[sign],
    }


def measure(name: str, seeds: list[int], jobs: int, root: Path) -> dict[str, Any]:
    """Measure a claim and write ``benchmarks/results/NAME.json``."""
    claim = CLAIMS[name]
    with ThreadPoolExecutor(jobs) as pool:
        measured = list(pool.map(lambda seed: measure_seed(claim, seed, root), seeds))
    report: dict[str, Any] = {
        "claim": claim.title,
        "paper": claim.paper,
        "expectation": claim.expectation,
        "command": f"python benchmarks/claims.py run {name}",
        "world": claim.world,
        "arms": claim.arms,
        "seeds": {str(seed): arms for seed, arms in zip(seeds, measured, strict=True)},
    }
    report["differences"] = [difference(report, comparison) for comparison in claim.comparisons]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def tables(report: dict[str, Any]) -> str:
    """Return a claim's two Markdown tables: the differences with their verdicts, and every arm's figures by seed."""
    lines = ["| measure | arms | claimed | difference | 95% interval | verdict |", "|---|---|---|---|---|---|"]
    for d in report["differences"]:
        lines.append(
            f"| {d['measure']} | {d['arm']} minus {d['against']} | {d['claimed']} | {d['mean']:+.3g} | "
            f"{d['low']:+.3g} to {d['high']:+.3g} | **{d['verdict']}** |"
        )
    seeds = report["seeds"]
    lines += ["", "| measure | arm | mean | " + " | ".join(f"seed {seed}" for seed in seeds) + " |"]
    lines.append("|---" * (3 + len(seeds)) + "|")
    for name in next(iter(next(iter(seeds.values())).values())):
        for arm in report["arms"] if name not in PROVENANCE else ():
            own = [figures[arm][name] for figures in seeds.values()]
            cells = " | ".join(f"{value:.3g}" for value in own)
            lines.append(f"| {name} | {arm} | {statistics.fmean(own):.3g} | {cells} |")
    return "\n".join(lines)


def means(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the mean over the seeds of every measure of every arm."""
    seeds = list(report["seeds"].values())
    return {
        arm: {m: statistics.fmean(s[arm][m] for s in seeds) for m in figures if m not in PROVENANCE}
        for arm, figures in seeds[0].items()
    }


def total(reports: dict[str, dict[str, Any]]) -> str:
    """Return how many differences of all claims moved in the claimed direction, and how many did not."""
    verdicts = [d["verdict"] for report in reports.values() for d in report["differences"]]
    moved = verdicts.count("moves in the claimed direction")
    against = verdicts.count("moves in the other direction")
    return (
        f"Of {len(verdicts)} differences, {moved} move in the claimed direction, {against} in the other direction, and "
        f"{len(verdicts) - moved - against} by no more than chance. An interval of 95% misses the true difference one "
        f"time in twenty: among {len(verdicts)} intervals, {0.05 * len(verdicts):.1f} are wrong on average. Nothing "
        "here corrects for that."
    )


def section(name: str, report: dict[str, Any]) -> str:
    """Return a claim's section of the page. Its drawing is ``docs/images/claims/NAME.svg``."""
    runs = [figures for arms in report["seeds"].values() for figures in arms.values()]
    dates, commits, machines = (", ".join(sorted({run[key] for run in runs})) for key in ("date", "commit", "machine"))
    verdicts = [d["verdict"] for d in report["differences"]]
    borne_out = verdicts.count("moves in the claimed direction")
    remark = CLAIMS[name].remark
    said = "" if remark is None else " " + remark(means(report))
    return "\n\n".join(
        [
            f"## Claim: {report['claim']}",
            f"Paper: {report['paper']}.",
            fill("Expected before the run: " + report["expectation"], WIDTH),
            fill(f"Measured: {borne_out} of {len(verdicts)} differences move in the claimed direction.{said}", WIDTH),
            f"![{report['claim']}: every seed, and the paired differences](images/claims/{name}.svg)",
            tables(report),
            fill(
                f"`{report['command']}`, with `{report['world']}`. {len(runs)} runs, {dates}, at commit {commits}, on "
                f"{machines}.",
                WIDTH,
                break_on_hyphens=False,
            ),
        ]
    )


def page(reports: dict[str, dict[str, Any]]) -> str:
    """Return the page of all claims, in Markdown."""
    parts = [
        "# Claims",
        fill(total(reports), WIDTH),
        fill(ABOUT, WIDTH),
        "`python benchmarks/claims.py page` writes this page from `benchmarks/results/`.",
    ]
    parts += [section(name, reports[name]) for name in CLAIMS if name in reports]
    if missing := [
        f"- {CLAIMS[name].title}: `python benchmarks/claims.py run {name}`" for name in CLAIMS if name not in reports
    ]:
        parts.append("\n".join(["## Claims that have not been run", "", *missing]))
    return "\n\n".join(parts) + "\n"


def write_page(reports: dict[str, dict[str, Any]]) -> None:
    """Write the page, and a drawing for each claim on it."""
    PAGE.write_text(page(reports))
    DRAWINGS.mkdir(parents=True, exist_ok=True)
    for name, report in reports.items():
        (DRAWINGS / f"{name}.svg").write_text(drawing(report))


def read_results() -> dict[str, dict[str, Any]]:
    """Return the committed figures of every claim, by the claim's name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json")) if file.stem in CLAIMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run a claim")
    running.add_argument("name", choices=CLAIMS)
    running.add_argument("--seeds", type=int, nargs="+", default=list(range(LEAST_SEEDS)))
    running.add_argument("--jobs", type=int, default=2, help="trainings at a time, with one thread each")
    running.add_argument("--keep", type=Path, default=ROOT / "runs/claims", help="the folder of the runs")
    commands.add_parser("page", help="write docs/claims.md and its drawings")
    options = parser.parse_args()
    if options.command == "page":
        write_page(read_results())
        return
    different = len(set(options.seeds))
    if different != len(options.seeds) or not LEAST_SEEDS <= different <= max(T95):
        parser.error(f"--seeds: expected {LEAST_SEEDS} to {max(T95)} different seeds, got {options.seeds}")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    print(tables(measure(options.name, options.seeds, options.jobs, options.keep.resolve())))


if __name__ == "__main__":
    main()
