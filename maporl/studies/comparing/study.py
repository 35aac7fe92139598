"""Train configurations over the same seeds, and compare what they end with.

A run of each configuration (an arm) and seed is trained in a process of its own. Differences are paired by seed.
"""

import dataclasses
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maporl.config.parse import lasting, parse_config, read_values, to_yaml
from maporl.config.schema import Config
from maporl.errors import ConfigError, RunError
from maporl.evaluation.metrics import proves_nothing
from maporl.report.read import Run, read_run
from maporl.text import markdown_table
from maporl.training.args import changes
from maporl.training.run_record import AFTER, CONFIG
from maporl.validation.load import from_dict
from trl_ext.files.atomic import replace_file
from trl_ext.process.waits import until

EVALUATIONS = 8
"""How often a run is evaluated, if its configuration does not say."""
MEASURES = ("first turn", "final turn", "peak", "fall")
"""What is compared, in percent of right answers: those of the first and of the last turn after training, the most of
the last turn in any evaluation, and how much less it was in the end."""
SCORE = "score"
"""The mean score of an utterance in the evaluation after training, which is compared too."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a 95% interval of the mean of so many differences. Beyond, the normal number is taken."""


@dataclass(frozen=True)
class Measured:
    """The results of a run: its :data:`MEASURES`, and each role's share of the gradients of the shared policy."""

    measures: dict[str, float]
    shares: dict[str, float]


def arms(
    configs: Mapping[str, Config], output: Path, seeds: Sequence[int], where: str = "compare"
) -> dict[tuple[str, int], Config]:
    """Return the configuration of each arm and seed, with a folder of its own in ``output``.

    Runs of one seed ask the same held-out questions where the arms have one task, and tiny models of one section begin
    with the same weights.

    Raises:
        ConfigError: there are fewer than two arms, one evaluates nothing, or one is wrong.
    """
    if len(configs) < 2:
        raise ConfigError(f"{where}: expected two configurations or more, got {list(configs)}")
    made = {}
    for arm, config in configs.items():
        if not config.evaluation.questions:
            raise ConfigError(f"{where}: {arm}: evaluation.questions is 0, so that there is nothing to compare")
        every = config.training.eval_steps or max(1, config.updates // EVALUATIONS)
        for seed in seeds:
            changed = dataclasses.replace(
                config,
                seed=seed,
                output_dir=str(output / f"{arm}-{seed}"),
                training=dataclasses.replace(config.training, eval_steps=every),
            )
            made[arm, seed] = from_dict(dataclasses.asdict(changed), f"{where}: {arm}")
    return made


def train_all(runs: Mapping[tuple[str, int], Config]) -> Iterator[tuple[str, int, Measured]]:
    """Train each of ``runs`` in a process of its own, unless its folder has a finished run, and yield what it measured.

    A run that was cut off is resumed, or begun again if it has no checkpoint.

    Raises:
        RunError: a run failed, and its own message is above; or a folder has a finished run of another configuration.
    """
    for config in runs.values():
        _must_be_of(config)
    for (arm, seed), config in runs.items():
        folder = Path(config.output_dir)
        if not (folder / AFTER).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            file = folder.with_suffix(".yaml")
            file.write_text(to_yaml(config), encoding="utf-8")
            resumes = ["--resume"] if folder.exists() else []
            if status := _run([sys.executable, "-m", "maporl", "train", str(file), "--quiet", *resumes]):
                raise RunError(f"{folder}: this run failed with status {status}; mend it, and call this again")
        yield arm, seed, measured(read_run(folder))


def _must_be_of(config: Config) -> None:
    """Check that the finished run in a run's folder, if it has one, is of this configuration.

    Raises:
        RunError: it is of another one.
    """
    folder = Path(config.output_dir)
    if not (folder / AFTER).exists():
        return
    saved = parse_config(read_values(folder / CONFIG), str(folder / CONFIG))
    was, now = (lasting(dataclasses.asdict(one)) for one in (saved, config))
    if changed := changes(was, now, ("output_dir", "pythonpath")):
        told = f"{folder}: has a run of another configuration ({changed[0]})"
        raise RunError(f"{told}; choose another folder with --output")


def _run(command: list[str]) -> int:
    """Return the exit status of a command. A signal to this process ends it in good order: a run saves first."""
    process = subprocess.Popen(command)

    def ended(seconds: float) -> list[int]:
        with suppress(subprocess.TimeoutExpired):
            return [process.wait(seconds)]
        return []

    try:
        return until(ended)[0]
    except BaseException:
        process.terminate()
        until(ended)
        raise


def measured(run: Run) -> Measured:
    """Return what a finished run ended with.

    Raises:
        RunError: it has no evaluation after training.
    """
    if run.after is None:
        raise RunError(f"{run.folder}: it has no evaluation; set evaluation.questions above 0")
    values = {SCORE: run.after.rewards["reward/score"]} if "reward/score" in run.after.rewards else {}
    if run.after.turns and not run.after.unlabelled:
        last = f"eval_accuracy/turn_{len(run.after.turns)}"
        final = 100 * run.after.turns[-1].team.value
        peak = max([final, *(100 * float(line[last]) for line in run.metrics if last in line)])
        rights = (100 * run.after.turns[0].team.value, final, peak, peak - final)
        values = dict(zip(MEASURES, rights, strict=True)) | values
    shares: dict[str, list[float]] = {}
    for line in run.updates():
        for key, value in line.items():
            if key.startswith("shared/role/") and key.endswith("/grad_share"):
                shares.setdefault(key.split("/")[2], []).append(float(value))
    return Measured(values, {role: statistics.mean(own) for role, own in shares.items()})


def compared(found: Mapping[tuple[str, int], Measured]) -> dict[str, dict[str, Any]]:
    """Return for each measure the mean of each arm, over the seeds that all have, and the first arm minus each other.

    A difference is the mean over seeds, with half of its 95% interval by Student's t, which is NaN for one seed.
    """
    first, *others = names = list(dict.fromkeys(arm for arm, _ in found))
    seeds = [seed for arm, seed in found if arm == first and all((other, seed) in found for other in others)]
    measures = [m for m in dict.fromkeys(m for one in found.values() for m in one.measures)
                if all(m in found[arm, seed].measures for arm in names for seed in seeds)]  # fmt: skip
    table: dict[str, dict[str, Any]] = {}
    for measure in measures if seeds else ():
        values = {arm: [found[arm, seed].measures[measure] for seed in seeds] for arm in names}
        table[measure] = {"means": {arm: statistics.mean(own) for arm, own in values.items()}, "differences": {}}
        for other in others:
            differences = [one - another for one, another in zip(values[first], values[other], strict=True)]
            half = math.nan
            if len(differences) > 1:
                t = T_975.get(len(differences), 1.96)
                half = t * statistics.stdev(differences) / math.sqrt(len(differences))
            table[measure]["differences"][other] = {"difference": statistics.mean(differences), "half": half}
    return table


def doubt(found: Mapping[tuple[str, int], Measured]) -> str:
    """Return why the comparison proves nothing (:func:`maporl.evaluation.metrics.proves_nothing`), or nothing."""
    right = [[value for name, value in one.measures.items() if name != "fall"] for one in found.values()]
    return proves_nothing(right, min(Counter(arm for arm, _ in found).values()))


def verdict(found: Mapping[tuple[str, int], Measured]) -> list[str]:
    """Return what is shown of the last turn, or else of the score: a sentence for each arm but the first."""
    if said := doubt(found):
        return [said]
    table, first = compared(found), next(arm for arm, _ in found)
    measure = next((name for name in ("final turn", SCORE) if name in table), "")
    told = []
    for other, row in table[measure]["differences"].items() if measure else ():
        low, high = row["difference"] - row["half"], row["difference"] + row["half"]
        shown = f"{measure}: {first} minus {other} is {_shown(measure, row['difference'], True)} "
        shown += f"({_shown(measure, low, True)} to {_shown(measure, high, True)})"
        told.append(f"{shown}, which shows {'no difference' if low <= 0 <= high else 'a difference'}.")
    return told


def _shown(measure: str, value: float, signed: bool = False) -> str:
    digits = 3 if measure == SCORE else 1
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def page(found: Mapping[tuple[str, int], Measured]) -> str:
    """Return the comparison as Markdown, with every run."""
    names = list(dict.fromkeys(arm for arm, _ in found))
    seeds = sorted({seed for _, seed in found})
    lines: list[str] = []
    for other in names[1:]:
        rows = []
        for name, row in compared(found).items():
            difference, half = row["differences"][other]["difference"], row["differences"][other]["half"]
            ends = [_shown(name, difference + sign * half, True) for sign in (-1, 1)]
            means = [_shown(name, row["means"][arm]) for arm in (names[0], other)]
            interval = "-" if math.isnan(half) else f"{ends[0]} to {ends[1]}"
            rows.append((name, *means, _shown(name, difference, True), interval))
        head = ("measure", names[0], other, f"{names[0]} minus {other}", "95% interval")
        lines += [*markdown_table(head, rows), ""]
    measures = dict.fromkeys(name for one in found.values() for name in one.measures)
    each = []
    for name, arm in ((name, arm) for name in measures for arm in names):
        runs = [found[arm, seed].measures if (arm, seed) in found else {} for seed in seeds]
        each.append((name, arm, *(_shown(name, own[name]) if name in own else "-" for own in runs)))
    lines += markdown_table(("measure", "arm", *(f"seed {seed}" for seed in seeds)), each)
    shares = {
        role: statistics.mean(one.shares[role] for one in found.values() if role in one.shares)
        for role in sorted({role for one in found.values() for role in one.shares})
    }
    if shares:
        told = ", ".join(f"{role} {share:.0%}" for role, share in shares.items())
        lines += ["", f"Share of each role in the gradients of the shared policy: {told}."]
    lines += ["", "Right answers are in percent.", "", *verdict(found)]
    return "\n".join(lines) + "\n"


def write(output: Path, found: Mapping[tuple[str, int], Measured], study: str = "compare") -> list[Path]:
    """Write ``STUDY.json`` and ``STUDY.md`` into ``output``, and return the files."""
    numbers = {
        "runs": {f"{arm}-{seed}": dataclasses.asdict(one) for (arm, seed), one in found.items()},
        "compared": compared(found),
        "proves_nothing": doubt(found),
        "verdict": verdict(found),
    }
    files = [output / f"{study}.json", output / f"{study}.md"]
    replace_file(files[0], json.dumps(numbers, indent=1) + "\n")
    replace_file(files[1], page(found))
    return files
