"""The command line: ``maporl train | check | eval | sft | verifier | serve``."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from maporl.config import Config, ConfigError, load, to_yaml
from maporl.verifier.cli import app as verifier_app
from reward_server.cli import serve

app = typer.Typer(
    name="maporl",
    help="Train teams of language models that talk to each other.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(verifier_app, name="verifier")
app.command()(serve)

Values = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG [KEY=VALUE]...", help="A YAML file, and further --set values.", show_default=False),
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


@app.command()
def train(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in output_dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and parameter counts only.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Train a team. Writes everything into output_dir of the configuration and never overwrites a run."""
    with _errors():
        settings = _load(values, config, set_)
        if dry_run:
            return _dry_run(settings)
        _quiet_libraries()
        from rich.console import Console

        from maporl import run, run_checks
        from maporl.plots import plot_run
        from maporl.run_folder import RunFolder
        from maporl.tables import before_after, flip_lines

        console = Console()
        for line in run_checks.check_run(settings):
            console.print(line, highlight=False, soft_wrap=True)
        before, after = run.train(settings, resume, quiet)
        folder = Path(settings.output_dir)
        plots = plot_run(RunFolder(folder).read_metrics(), folder)
        if after is not None:
            console.print(before_after(before, after))
            for line in flip_lines(after):
                console.print(line, highlight=False, soft_wrap=True)
        for path in [folder / "metrics.jsonl", folder / "dialogues.jsonl", *plots, folder / "final"]:
            console.print(str(path), highlight=False, soft_wrap=True)
    return None


@app.command()
def check(values: Values = None, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Check a configuration, its data and its tokenizers, without loading a model."""
    with _errors():
        settings = _load(values, config, set_)
        _quiet_libraries()
        from maporl.run_checks import check_run

        for line in check_run(settings):
            typer.echo(line)
        typer.echo("ok")


@app.command("eval")
def evaluate(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A checkpoint-N or final folder.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Evaluate a team on held-out questions, against each agent alone and voting over independent samples."""
    with _errors():
        settings = _load(values, config, set_)
        _quiet_libraries()
        from rich.console import Console

        from maporl import run
        from maporl.tables import evaluation_table, flip_lines

        evaluation = run.evaluate(settings, checkpoint)
        if as_json:
            typer.echo(json.dumps(evaluation.to_json()))
            return
        console = Console()
        console.print(evaluation_table(evaluation))
        for line in flip_lines(evaluation):
            console.print(line, highlight=False, soft_wrap=True)


@app.command()
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Train a team's policies by supervision, on the task's solutions or on the best of recorded debates."""
    with _errors():
        settings = _load(values, config, set_)
        _quiet_libraries()
        from transformers import set_seed

        from maporl import sft as supervised
        from maporl.agents import Team
        from maporl.protocols import opening_of
        from maporl.run_checks import tasks_of

        set_seed(settings.seed)
        if dialogues is not None:
            team, material = Team.from_config(settings), supervised.best_debates(dialogues, best)
        else:
            task, _ = tasks_of(settings)
            team = Team.from_config(settings)
            material = supervised.solutions(team, task, opening_of(settings.protocol), limit)
        losses = supervised.train_supervised(settings, team, material, output, epochs, learning_rate, batch_size, quiet)
        for policy, loss in losses.items():
            typer.echo(f"{policy}: {len(material)} dialogues, mean loss {loss:.3f}, saved in {output / policy}")


def main() -> None:
    """The ``maporl`` command."""
    app()


def _load(values: list[str] | None, config: Path | None, set_: list[str] | None) -> Config:
    files = [v for v in values or [] if "=" not in v]
    files += [str(config)] if config is not None else []
    if len(files) != 1:
        raise ConfigError(
            f"expected one configuration file, got {files or 'none'}; for example: maporl train configs/ppo/quickstart.yaml"
        )
    return load(files[0], [*(set_ or []), *(v for v in values or [] if "=" in v)])


def _dry_run(settings: Config) -> None:
    from maporl.agents import Team

    _quiet_libraries()
    typer.echo(to_yaml(settings), nl=False)
    for policy, (everything, learning) in Team.from_config(settings, weights=False).count_parameters().items():
        typer.echo(f"# policy {policy}: {everything:,} parameters, {learning:,} trained")


def _quiet_libraries() -> None:
    """Libraries' own progress bars and notices would bury ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import warnings

    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _errors:
    """Known errors become one line and an exit code: 2 for a configuration, 1 for a run; others keep their trace."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Literal[False]:
        if error is None or isinstance(error, (typer.Exit, SystemExit)):
            return False
        code = 2 if _is(error, "maporl.config", "ConfigError") or _is(error, "maporl.tasks.base", "TaskError") else 1
        known = code == 2 or any(
            _is(error, module, name)
            for module, name in (
                ("maporl.agents", "PromptTooLong"),
                ("maporl.run_folder", "RunExists"),
                ("maporl.rewards.sources", "RewardFailure"),
                ("maporl.verifier.data", "DataError"),
                ("maporl.verifier.model", "VerifierError"),
                ("trl_ext.checkpoint", "CheckpointError"),
                ("trl_ext.learner", "NonFiniteError"),
                ("trl_ext.scoring", "RewardError"),
            )
        )
        if known:
            typer.echo(f"error: {error}", err=True)
            sys.exit(code)
        return False


def _is(error: BaseException, module: str, name: str) -> bool:
    """Whether ``error`` is of that class; a module never loaded cannot have raised it."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(error, getattr(loaded, name))
