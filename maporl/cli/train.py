"""``maporl train``, ``maporl check`` and ``maporl record``: training a team, and what is done before."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Quiet, Values, echo, load_config, load_libraries, load_team_config
from maporl.config.command_line import command
from maporl.config.schema import Config

Backend = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="local|ray|tinker", help="Where to train and sample; short for --set cluster.backend=."
    ),
]


@command
def train(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help=(
                "Go on with the run in output_dir: from its newest checkpoint, or in a loop with the first missing "
                "part."
            ),
        ),
    ] = False,
    updates: Annotated[
        int | None,
        typer.Option(
            "--updates",
            min=1,
            help="How many updates; with --resume, more than the run had make it longer.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and parameter counts only.")
    ] = False,
    quiet: Quiet = False,
    backend: Backend = None,
) -> None:
    """Train a team by PPO, or in rounds if the configuration has loop.stages. Writes everything into output_dir, and
    never overwrites a run."""
    set_ = set_ if updates is None else [*(set_ or ()), f"updates={updates}"]
    settings = load_config(values, config, _with_backend(set_, backend))
    if dry_run:
        return _dry_run(settings)
    load_libraries()
    from maporl.cli.common import Screen
    from maporl.evaluation.tables import audit_table, evaluation_table, flip_lines, learned
    from maporl.report.audit import AUDIT, audit_of, read_audit
    from maporl.report.read import read_run
    from maporl.runs.train import train as train_run
    from maporl.validation.preflight import check_run
    from trl_ext.process import distributed
    from trl_ext.process.threads import choose, use

    console, folder = Screen(markup=False, highlight=False), Path(settings.output_dir)
    checked = check_run(settings)
    # after the check, which builds accelerate's state: that sets a number of its own with MPI
    use(choose(settings.tiny))
    for line in checked if distributed.is_main() else ():
        console.print(line, soft_wrap=True)
    before, after = train_run(settings, resume, quiet)
    distributed.shutdown()
    if not distributed.is_main():
        return None
    if after is not None:
        console.print(evaluation_table(after, before, ("before", "after")))
        for line in flip_lines(after):
            console.print(line, soft_wrap=True)
    for path in (folder / "metrics.jsonl", folder / "dialogues.jsonl", folder / "final"):
        console.print(str(path), soft_wrap=True)
    if after is not None:
        console.print(learned(before, after), soft_wrap=True)
    file = folder / AUDIT
    done = read_audit(file) if file.exists() else audit_of(read_run(folder))  # a loop has none of its own
    console.print(audit_table(done))
    console.print(*done.lines(), sep="\n", soft_wrap=True)
    if (folder / "report.html").exists():
        console.print(f"open {folder / 'report.html'}", soft_wrap=True)
    return None


@command
def check(values: Values = None, config: ConfigFile = None, set_: Overrides = None, backend: Backend = None) -> None:
    """Check a configuration, or the folder of a run, its data, its tokenizers and its servers, and say what the run
    does, without loading a model."""
    overrides = _with_backend(set_, backend)
    folder = next((value for value in values or () if os.path.isdir(value)), None)
    if folder is None:
        settings = load_config(values, config, overrides)
    else:
        settings, _ = load_team_config(values, None, overrides, None)
    load_libraries()
    from maporl.training.run_record import rest_of
    from maporl.validation.preflight import check_run

    for line in check_run(settings):
        echo(line)
    output = Path(settings.output_dir)
    if folder is None and output.is_dir() and rest_of(output):
        echo(f"warning: {output} is not empty: `maporl train` goes on with its run by --resume, and begins none in it")
    echo("ok")


@command
def tools(
    *,
    agent: Annotated[str, typer.Option("--agent", metavar="NAME", help="The agent.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Show what an agent may call: its tools, its first prompt and what follows a call, without loading a model."""
    settings = load_config(values, config, set_)
    load_libraries()
    from maporl.runs.shown_tools import shown_tools

    for line in shown_tools(settings, agent):
        echo(line)


def record(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the record; what it has stays.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    questions: Annotated[int, typer.Option("--questions", "-n", min=1, help="Questions to play.")] = 64,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Dialogues on each question.")] = 1,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A checkpoint-N or final folder.", show_default=False)
    ] = None,
) -> None:
    """Record graded dialogues of a team without training, such as one behind an API, for maporl sft --dialogues."""
    settings = load_config(values, config, set_, trains=False)
    load_libraries()
    from statistics import fmean

    from maporl.runs.record import record as recorded
    from trl_ext.process.threads import choose, use

    use(choose(settings.tiny))
    scores: list[float] = []
    played = unanswered = 0
    for dialogues in recorded(settings, output, questions, samples, checkpoint):
        played += len(dialogues)
        unanswered += sum(not dialogue.answers() for dialogue in dialogues)
        scores += [u.rewards["score"] for dialogue in dialogues for u in dialogue.answers()]
        mean = f"mean score {fmean(scores):.3f}" if scores else "no answers"
        echo(f"{played} dialogues, {mean}" + (f", {unanswered} without an answer" if unanswered else ""))
    echo(output / "dialogues.jsonl")


def _with_backend(set_: list[str] | None, backend: str | None) -> list[str] | None:
    return set_ if backend is None else [*(set_ or ()), f"cluster.backend={backend}"]


def _dry_run(settings: Config) -> None:
    load_libraries()
    from maporl.config.safe_yaml import dump_yaml
    from maporl.credentials import without_secrets
    from maporl.team.team import Team

    echo(dump_yaml(without_secrets(asdict(settings))), newline=False)
    for policy, (everything, learning) in Team.from_config(settings, weights=False).count_parameters().items():
        echo(f"# policy {policy}: {everything:,} parameters, {learning:,} trained")
