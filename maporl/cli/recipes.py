"""``maporl recipes list | find | show | try``: the published methods that come as configurations."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from maporl.cli.common import echo, load_libraries
from maporl.config.command_line import command

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="Published methods as configurations: what there is, where it comes from, a quick try.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="A recipe; see: maporl recipes list")]
NameOrFile = Annotated[str, typer.Argument(metavar="NAME", help="A recipe, or a configuration's YAML file.")]
SHOWN = re.compile(r"reward/[^/]+|.*/(loss/policy_avg|grad_norm)|.*/stage_\d+/(rows|loss)")
"""Metrics that ``maporl recipes try`` prints: the mean rewards, and of every policy its loss and its gradient or rows.
"""


By = Annotated[
    Literal["need", "credit", "loop", "protocol"],
    typer.Option(
        help=(
            "Order by what you have (need), what answers are compared with (credit), how policies take turns to learn "
            "(loop), or who speaks when (protocol)"
        )
    ),
]


@app.command("list")
@command
def list_(by: By = "need") -> None:
    """All recipes by what you have, with what each is preferred for, and the cost of an update in updates of plain
    PPO."""
    from maporl.cli.common import Screen
    from maporl.config.recipes import NEEDS, by_axis, families

    screen = Screen(markup=False, highlight=False)
    for choice, names in (families() if by == "need" else by_axis(by)).items():
        start = f"; start with {names[0]}" if by == "need" else ""
        screen.print(f"{NEEDS[choice][0] if by == 'need' else choice}{start}", style="bold")
        screen.print(_table(names), "")


@app.command()
@command
def find(
    words: Annotated[
        list[str], typer.Argument(metavar="WORDS", help='What it is about, such as "planner coder tests".')
    ],
    most: Annotated[int, typer.Option("--most", min=1, help="How many to show.")] = 8,
) -> None:
    """Find recipes by words of their names, titles, agents and notes, best first."""
    from maporl.cli.common import Screen
    from maporl.config.recipes import find as search

    found = search(" ".join(words))[:most]
    screen = Screen(markup=False, highlight=False)
    screen.print(_table([one.name for one in found], [", ".join(one.words) for one in found]))
    screen.print(f"maporl recipes show {found[0].name}   prints its card and its file")
    screen.print(f"maporl recipes try {found[0].name}   runs it with tiny models")


def _table(names: Sequence[str], words: Sequence[str] | None = None) -> "Table":
    """Return a table of recipes for 80 columns, with the ``words`` that each has if they were looked for."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from maporl.config.recipes import card_of

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("prefer it when", ratio=1)
    table.add_column("recipe", no_wrap=True)
    for column in ("status", "cost") if words is None else ("has",):
        table.add_column(column)
    for number, name in enumerate(names):
        card = card_of(name)
        table.add_row(card.prefer, name, *((card.status, card.cost_in_words) if words is None else (words[number],)))
    return table


@app.command()
@command
def show(name: Name) -> None:
    """A recipe: its citation, what is exact and what differs from the paper, its file, and what that file extends."""
    from maporl.config.parse import extended_files
    from maporl.config.recipes import card_of, recipe_file

    card, file = card_of(name), recipe_file(name)
    for key in ("title", "paper", "url", "evidence", "status", "prefer", "cost_in_words", "exact", "differs"):
        echo(f"{key.partition('_')[0] + ':':10}{getattr(card, key)}")
    if card.corrected:
        echo(f"corrected: {card.corrected}")
    for option, reason in card.inert.items():
        echo(f"{'inert:':10}{option}: {reason}")
    for test in card.checked_by:
        echo(f"{'checked:':10}{test}")
    echo(f"{'file:':10}{file}\n")
    body = file.read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(body) if i > 1 and line and not line.startswith((" ", "recipe:")))
    echo("\n".join(body[start:]).rstrip())
    for part in extended_files(file):
        lines = [line for line in part.read_text(encoding="utf-8").split("\n") if not line.startswith("#")]
        echo(f"\nUnless the file above says otherwise, {part}:\n")
        echo("\n".join(lines).strip())


@app.command("try")
@command
def try_(
    name: NameOrFile,
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to override.")] = None,
) -> None:
    """Three updates, or two rounds, with tiny random models: that it runs, what it logs, and its page.

    It goes to a new temporary folder.
    """
    load_libraries()
    from maporl.config.imports import extension
    from maporl.config.parse import apply_overrides
    from maporl.report.page import write_report
    from maporl.runs.train import train
    from maporl.storage.run_folder import RunFolder
    from maporl.validation.load import from_dict
    from maporl.validation.preflight import check_run
    from trl_ext.process.threads import choose, use

    values = extension("maporl.methods.tiny_versions:tiny_version", "maporl recipes try")(name, "")
    folder = tempfile.mkdtemp(prefix=f"maporl-{Path(name).stem}-")  # not before the name is known to be a recipe's
    values["output_dir"] = f"{folder}/{Path(name).stem}"
    config = from_dict(apply_overrides(values, changes or []), name)
    for line in check_run(config):
        echo(line)
    use(choose(config.tiny))
    train(config, resume=False, quiet=True)
    for metrics in RunFolder(config.output_dir).read_metrics():
        shown = sorted(
            (key for key in metrics if SHOWN.fullmatch(key)), key=lambda key: (not key.startswith("reward/"), key)
        )
        if shown:
            echo(
                f"{'round' if config.stages else 'update'} {metrics['step']}: "
                f"{', '.join(f'{key} {metrics[key]:.3g}' for key in shown)}"
            )
    echo(write_report([Path(config.output_dir)]))
