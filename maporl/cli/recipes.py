"""``maporl recipes list | show | try``: the published methods that come as configurations."""

import tempfile
from typing import Annotated

import typer

from maporl.cli.common import echo, quiet_libraries
from maporl.config.command_line import command

app = typer.Typer(
    help="Published methods as configurations: what there is, where it comes from, a quick try.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A recipe; see: maporl recipes list")]
SHOWN = ("/loss/policy_avg", "/grad_norm")
"""Metrics that ``maporl recipes try`` prints, of every policy."""


@app.command("list")
@command
def list_() -> None:
    """All recipes, with the paper and what of it was read."""
    from rich.table import Table

    from maporl.cli.screen import Screen
    from maporl.config.recipes import card_of, recipe_files

    table = Table("recipe", "method", "evidence")
    for name in recipe_files():
        card = card_of(name)
        table.add_row(name, card.title, card.evidence)
    Screen().print(table)


@app.command()
@command
def show(name: Name) -> None:
    """A recipe: its citation, what is exact and what differs from the paper, and the file itself."""
    from maporl.config.recipes import card_of, recipe_file

    card, file = card_of(name), recipe_file(name)
    for key in ("title", "paper", "url", "evidence", "exact", "differs"):
        echo(f"{key + ':':10}{getattr(card, key)}")
    for option, reason in card.inert.items():
        echo(f"{'inert:':10}{option}: {reason}")
    for test in card.checked_by:
        echo(f"{'checked:':10}{test}")
    echo(f"{'file:':10}{file}\n")
    body = file.read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(body) if i > 1 and line and not line.startswith((" ", "recipe:")))
    echo("\n".join(body[start:]), newline=False)


@app.command("try")
@command
def try_(name: Name) -> None:
    """Three updates with tiny random models: that it runs, and what it logs. Nothing is kept."""
    quiet_libraries()
    from maporl.config.recipes import tiny_version
    from maporl.runs.train import train
    from maporl.storage.run_folder import RunFolder
    from maporl.validation.load import from_dict
    from maporl.validation.preflight import check_run

    with tempfile.TemporaryDirectory() as folder:
        config = from_dict(tiny_version(name, f"{folder}/{name}"), name)
        for line in check_run(config):
            echo(line)
        train(config, resume=False, quiet=True)
        for metrics in RunFolder(config.output_dir).read_metrics():
            shown = {key: value for key, value in metrics.items() if f"/{key}".endswith(SHOWN)}
            if shown:
                numbers = ", ".join(f"{key} {value:.3g}" for key, value in sorted(shown.items()))
                echo(f"update {metrics['step']}: {numbers}")
