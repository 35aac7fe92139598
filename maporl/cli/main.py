"""The command line: ``maporl train | check | eval | sft | report | watch | play | recipes | verifier | serve``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import Quiet, known_errors, load_config, load_team_config, quiet_environment, quiet_libraries
from maporl.cli.look import play, report, watch
from maporl.cli.recipes import app as recipes_app
from maporl.cli.verifier import app as verifier_app
from maporl.config.parse import to_yaml, unknown
from maporl.config.schema import Config
from maporl.errors import ConfigError
from reward_server.cli import serve

HELP = """Train teams of language models that talk to each other.

Begin with [bold]maporl train configs/ppo/quickstart.yaml[/bold], or a published method: [bold]maporl recipes try cory[/bold].
Everything a run writes is in its output_dir; [bold]report.html[/bold] in it opens by double click.
"""
EPILOG = """Exit status: 0 done, 1 it failed (the line after "error:" says why), 2 a configuration or the command's words are wrong, 130
Ctrl-C (once: the run is saved; twice: it ends at once). Colours are off where output is no terminal or NO_COLOR is set. [bold]maporl --install-completion[/bold] completes commands
in your shell."""
TRAIN, LOOK, SHARE = "Train", "Look and play", "Share and set up"

app = typer.Typer(
    name="maporl",
    help=HELP,
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(verifier_app, name="verifier", rich_help_panel=TRAIN)
app.add_typer(recipes_app, name="recipes", rich_help_panel=TRAIN)

Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG|KEY=VALUE",
        help="A YAML file or a recipe (eval: or a run's folder, or a team on the hub), and values to override.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="The YAML file, in place of CONFIG.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a value: --set training.learning_rate=1e-4", show_default=False
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from maporl import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What every command has; the help is above."""


@app.command(rich_help_panel=TRAIN)
def train(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in output_dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and parameter counts only.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a team. Writes everything into output_dir of the configuration and never overwrites a run."""
    with known_errors(quiet):
        settings = load_config(values, config, set_)
        if dry_run:
            return _dry_run(settings)
        quiet_libraries()
        from rich.console import Console

        from maporl.evaluation.tables import before_after, flip_lines
        from maporl.runs.train import train as train_run
        from maporl.validation.preflight import check_run
        from trl_ext import distributed
        from trl_ext.interruptions import Interrupted

        console, folder = Console(markup=False, highlight=False), Path(settings.output_dir)
        checked = check_run(settings)
        for line in checked if distributed.is_main() else ():
            console.print(line, soft_wrap=True)
        try:
            before, after = train_run(settings, resume, quiet)
        except Interrupted:
            _look(folder)
            raise
        distributed.shutdown()
        if not distributed.is_main():
            return None
        if after is not None:
            console.print(before_after(before, after))
            for line in flip_lines(after):
                console.print(line, soft_wrap=True)
        for path in [folder / "metrics.jsonl", folder / "dialogues.jsonl", folder / "final", *_look(folder)]:
            console.print(str(path), soft_wrap=True)
    return None


def _look(folder: Path) -> list[Path]:
    """Draw the run and write its report. The run is saved: what fails here is said, and nothing is lost."""
    from maporl.report.page import write_report
    from maporl.report.plots import plot_run
    from maporl.storage.run_folder import RunFolder
    from trl_ext import distributed

    if not distributed.is_main() or not (folder / "metrics.jsonl").exists():
        return []
    try:
        return [*plot_run(RunFolder(folder).read_metrics(), folder), write_report([folder])]
    except Exception as error:
        typer.echo(
            f"warning: no report was written ({type(error).__name__}: {error}); try: maporl report {folder}", err=True
        )
        return []


@app.command(rich_help_panel=TRAIN)
def check(values: Values = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Check a configuration, its data and its tokenizers, without loading a model."""
    with known_errors():
        settings = load_config(values, config, set_)
        quiet_libraries()
        from maporl.validation.preflight import check_run

        for line in check_run(settings):
            typer.echo(line)
        typer.echo("ok")


@app.command("eval", rich_help_panel=LOOK)
def evaluate(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A checkpoint-N or final folder.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="A suite of benchmarks in place of the task: math.", show_default=False),
    ] = None,
    suite_data: Annotated[
        Path | None, typer.Option("--suite-data", help="Its files (NAME/test*.jsonl), not the hub.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Dialogues on each question of a suite.", min=1)] = 1,
    limit: Annotated[
        int | None, typer.Option("--limit", help="First questions of each benchmark of a suite.", show_default=False)
    ] = None,
) -> None:
    """Evaluate a team on held-out questions, against each agent alone and voting over independent samples.

    With --suite: over benchmarks, avg@k, pass@k and maj@k, as one Markdown table.
    """
    with known_errors():
        settings, checkpoint = load_team_config(values, config, set_, checkpoint)
        quiet_libraries()
        if suite is not None:
            return _evaluate_suite(settings, checkpoint, suite, suite_data, samples, limit, as_json)
        from rich.console import Console

        from maporl.evaluation.tables import evaluation_table, flip_lines
        from maporl.runs.evaluate import evaluate as evaluate_run

        evaluation = evaluate_run(settings, checkpoint)
        if as_json:
            typer.echo(json.dumps(evaluation.to_json()))
            return
        console = Console(markup=False, highlight=False)
        console.print(evaluation_table(evaluation))
        for line in flip_lines(evaluation):
            console.print(line, soft_wrap=True)
    return None


@app.command(rich_help_panel=TRAIN)
def sft(
    output: Annotated[Path, typer.Option("--output", help="Folder for the trained policies; must be new.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    dialogues: Annotated[
        Path | None,
        typer.Option("--dialogues", help="Learn from these recorded debates instead of the task's solutions."),
    ] = None,
    best: Annotated[float, typer.Option("--best", help="Share of the debates to learn from, best first.")] = 0.1,
    limit: Annotated[int | None, typer.Option("--limit", help="Questions to learn from; default: all.")] = None,
    epochs: Annotated[float, typer.Option("--epochs")] = 1.0,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = 5e-5,
    batch_size: Annotated[int, typer.Option("--batch-size")] = 8,
    quiet: Quiet = False,
) -> None:
    """Train a team's policies by supervision, on the task's solutions or on the best of recorded debates."""
    with known_errors(quiet):
        settings = load_config(values, config, set_)
        quiet_libraries()
        from transformers import set_seed

        from maporl.protocols import build_protocol
        from maporl.team.team import Team
        from maporl.training import sft as supervised
        from maporl.validation.preflight import tasks_of

        set_seed(settings.seed)
        if dialogues is not None:
            team, material = Team.from_config(settings), supervised.best_debates(dialogues, best)
        else:
            task, _ = tasks_of(settings)
            team = Team.from_config(settings)
            material = supervised.solutions(
                team, task, build_protocol(settings.protocol, tuple(settings.agents)).opening, limit
            )
        losses = supervised.train_supervised(settings, team, material, output, epochs, learning_rate, batch_size, quiet)
        for policy, loss in losses.items():
            typer.echo(f"{policy}: {len(material)} dialogues, mean loss {loss:.3f}, saved in {output / policy}")


@app.command(rich_help_panel=SHARE)
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a run that has ended.")],
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private, where it is new.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be pushed; nothing leaves this machine.")
    ] = False,
) -> None:
    """Put a team on the hub: policies, heads, configuration, report, and a card with its results."""
    with known_errors():
        quiet_libraries()
        from maporl.runs import push as sharing

        pushed = sharing.push(run, name, private, dry_run)
        for path, size in pushed.files:
            typer.echo(f"{size / 1e6:10.2f} MB  {path}" if size >= 1e5 else f"{size / 1e3:10.1f} kB  {path}")
        for note in pushed.notes:
            typer.echo(note)
        typer.echo(f"{'would go to' if dry_run else 'pushed to'} {pushed.address}")


@app.command(rich_help_panel=SHARE)
def doctor() -> None:
    """Print versions and devices, and what is missing for which feature, with the command that installs it."""
    with known_errors():
        quiet_environment()  # what is broken is for it to say
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from maporl.runs.doctor import examine

        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column()
        table.add_column(overflow="fold")
        findings = examine()
        colours = {"fine": "green", "missing": "yellow", "broken": "red"}
        for finding in findings:
            table.add_row(Text(finding.state, colours[finding.state]), Text(finding.what), Text(finding.detail))
        (Console() if sys.stdout.isatty() else Console(width=200)).print(table)
        if any(finding.state == "broken" for finding in findings):
            raise typer.Exit(1)


@app.command(rich_help_panel=SHARE)
def schema() -> None:
    """Print the JSON schema of configurations, with which editors complete and check their keys.

    With VS Code's YAML extension and others: maporl schema > schema.json

    and on a configuration's first line: # yaml-language-server: $schema=schema.json
    """
    from maporl.config.parse import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


for command in (report, watch, play):
    app.command(rich_help_panel=LOOK)(command)
app.command(rich_help_panel=SHARE)(serve)


def main() -> None:
    """The ``maporl`` command."""
    app()


def _evaluate_suite(
    settings: Config,
    checkpoint: Path | None,
    suite: str,
    data: Path | None,
    samples: int,
    limit: int | None,
    as_json: bool,
) -> None:
    from maporl.evaluation.suite import markdown
    from maporl.runs.evaluate import evaluate_suite
    from maporl.tasks.mathematics import SUITES, suite_tasks

    if suite not in SUITES:
        raise ConfigError(f"--suite: {unknown(suite, SUITES)}")
    tasks = suite_tasks(suite, data, limit)
    temperature = settings.ppo.temperature if samples > 1 else settings.evaluation.temperature
    results = evaluate_suite(settings, checkpoint, tasks, samples, temperature)
    typer.echo(json.dumps([r.to_json() for r in results], indent=1) if as_json else markdown(results))


def _dry_run(settings: Config) -> None:
    from maporl.team.team import Team

    quiet_libraries()
    typer.echo(to_yaml(settings), nl=False)
    for policy, (everything, learning) in Team.from_config(settings, weights=False).count_parameters().items():
        typer.echo(f"# policy {policy}: {everything:,} parameters, {learning:,} trained")
