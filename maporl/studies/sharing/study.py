"""Train a team with one policy for all its agents and with a policy for each, over several seeds, and compare them.

Whether agents of one base model should share a policy is the first question of a team. A shared policy learns from all
answers, and a role whose gradients are large can capture it; policies apart may learn more and fall further (arXiv
2605.24202). ``maporl sharing`` calls this.
"""

import dataclasses
import json
import math
import statistics
import subprocess
import sys
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

SHARED, APART = "shared", "apart"
EVALUATIONS, MEASUREMENTS = 8, 20
"""How often a run is evaluated and the gradients of its roles are measured, if its configuration does not say."""
MEASURES = ("first turn", "final turn", "peak", "fall")
"""What is compared, in percent of right answers: those of the first and of the last turn after training, the most of
the last turn in any evaluation, and how much less it was in the end."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a 95% interval of the mean of so many differences. Beyond, the normal number is taken."""


@dataclass(frozen=True)
class Measured:
    """What a run ended with: its :data:`MEASURES`, and each role's share of the gradients of the shared policy."""

    measures: dict[str, float]
    shares: dict[str, float]


def configurations(config: Config, output: Path, seeds: Sequence[int]) -> dict[tuple[str, int], Config]:
    """Return the configuration of each arm and seed.

    Raises:
        ConfigError: fewer than two agents learn, or they cannot share a policy.
    """
    learn = [name for name, agent in config.agents.items() if agent.trainable and agent.weights]
    if len(learn) < 2:
        raise ConfigError(f"sharing: expected two agents or more that learn, got {learn}; add agents")
    training = config.training
    every = training.eval_steps or max(1, config.updates // EVALUATIONS)
    measured = training.role_gradients or max(1, config.updates // MEASUREMENTS)
    made = {}
    for arm in (SHARED, APART):
        agents = {
            name: dataclasses.replace(agent, policy=(SHARED if arm == SHARED else None)) if name in learn else agent
            for name, agent in config.agents.items()
        }
        for seed in seeds:
            values = dataclasses.asdict(
                dataclasses.replace(
                    config,
                    agents=agents,
                    seed=seed,
                    output_dir=str(output / f"{arm}-{seed}"),
                    training=dataclasses.replace(training, eval_steps=every, role_gradients=measured),
                )
            )
            made[arm, seed] = from_dict(values, f"sharing: {arm}")
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
    if run.after is None or not run.after.turns:
        raise RunError(f"{run.folder}: it has no evaluation with labels; set evaluation.questions above 0")
    last = f"eval_accuracy/turn_{len(run.after.turns)}"
    final = 100 * run.after.turns[-1].team.value
    peak = max([final, *(100 * float(line[last]) for line in run.metrics if last in line)])
    shares: dict[str, list[float]] = {}
    for line in run.updates():
        for key, value in line.items():
            if key.startswith(f"{SHARED}/role/") and key.endswith("/grad_share"):
                shares.setdefault(key.split("/")[2], []).append(float(value))
    values = (100 * run.after.turns[0].team.value, final, peak, peak - final)
    return Measured(
        dict(zip(MEASURES, values, strict=True)), {role: statistics.mean(own) for role, own in shares.items()}
    )


def compared(found: Mapping[tuple[str, int], Measured]) -> dict[str, dict[str, Any]]:
    """Return for each measure the means of both arms, the mean of shared minus apart over seeds, and half of its 95%
    interval by Student's t, which is NaN for a single seed."""
    seeds = [seed for arm, seed in found if arm == SHARED and (APART, seed) in found]
    table: dict[str, dict[str, Any]] = {}
    for name in MEASURES:
        arms = {arm: [found[arm, seed].measures[name] for seed in seeds] for arm in (SHARED, APART)}
        differences = [one - other for one, other in zip(arms[SHARED], arms[APART], strict=True)]
        half = math.nan
        if len(differences) > 1:
            t = T_975.get(len(differences), 1.96)
            half = t * statistics.stdev(differences) / math.sqrt(len(differences))
        means = {arm: statistics.mean(values) for arm, values in arms.items()}
        table[name] = {**means, "difference": statistics.mean(differences), "half": half}
    return table


def doubt(found: Mapping[tuple[str, int], Measured]) -> str:
    """Return why the comparison proves nothing (:func:`maporl.evaluation.metrics.proves_nothing`), or nothing."""
    right = [[value for name, value in one.measures.items() if name != "fall"] for one in found.values()]
    return proves_nothing(right, min(sum(arm == each for arm, _ in found) for each in (SHARED, APART)))


def page(found: Mapping[tuple[str, int], Measured]) -> str:
    """Return the comparison as Markdown, with every run."""
    seeds = sorted({seed for _, seed in found})
    rows = []
    for name, row in compared(found).items():
        ends = [row["difference"] + sign * row["half"] for sign in (-1, 1)]
        interval = "-" if math.isnan(row["half"]) else f"{ends[0]:+.1f} to {ends[1]:+.1f}"
        rows.append((name, f"{row[SHARED]:.1f}", f"{row[APART]:.1f}", f"{row['difference']:+.1f}", interval))
    lines = markdown_table(("measure, %", "shared", "apart", "shared minus apart", "95% interval"), rows)
    each = [
        (name, arm, *(f"{found[arm, s].measures[name]:.1f}" if (arm, s) in found else "-" for s in seeds))
        for name in MEASURES
        for arm in (SHARED, APART)
    ]
    lines += ["", *markdown_table(("measure, %", "arm", *(f"seed {seed}" for seed in seeds)), each)]
    shares = {
        role: statistics.mean(
            one.shares[role] for (arm, _), one in found.items() if arm == SHARED and role in one.shares
        )
        for role in sorted({role for one in found.values() for role in one.shares})
    }
    if shares:
        told = ", ".join(f"{role} {share:.0%}" for role, share in shares.items())
        lines += ["", f"Share of each role in the gradients of the shared policy: {told}."]
    lines += ["", said] if (said := doubt(found)) else []
    return "\n".join(lines) + "\n"


def write(output: Path, found: Mapping[tuple[str, int], Measured]) -> list[Path]:
    """Write ``sharing.json`` and ``sharing.md`` into ``output``, and return the files."""
    numbers = {
        "runs": {f"{arm}-{seed}": dataclasses.asdict(one) for (arm, seed), one in found.items()},
        "compared": compared(found),
        "proves_nothing": doubt(found),
    }
    files = [output / "sharing.json", output / "sharing.md"]
    replace_file(files[0], json.dumps(numbers, indent=1) + "\n")
    replace_file(files[1], page(found))
    return files
