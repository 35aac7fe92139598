"""The ``maporl`` command: every command by name, in the order of its help page. Each is loaded when it is called."""

from collections import UserDict
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from maporl.cli.common import echo
from maporl.config.command_line import command, run_program
from maporl.config.imports import extension
from maporl.errors import ConfigError
from trl_ext.process.threads import wait_briefly

HELP = """Train teams of language models that talk to each other.

Begin with [bold]maporl train configs/ppo/quickstart.yaml[/bold], or a published method: [bold]maporl recipes try cory[/bold].
Everything a run writes is in its output_dir; [bold]report.html[/bold] in it opens by double click.
"""  # noqa: E501
EPILOG = """Exit status: 0 done, 1 it failed (the line after "error:" says why), 2 a configuration or the command's words are wrong, 130
Ctrl-C and 143 SIGTERM (the run is saved; a second Ctrl-C ends it at once if nothing would be lost, and SIGQUIT always). Colours are off where output is not a terminal or NO_COLOR is set. [bold]maporl --install-completion[/bold] completes commands
in your shell."""  # noqa: E501
COMMANDS = {
    "Train": {
        "train": "maporl.cli.train:train",
        "check": "maporl.cli.train:check",
        "tools": "maporl.cli.train:tools",
        "record": "maporl.cli.train:record",
        "sft": "maporl.loops.command:sft",
        "verifier": "maporl.verifier.command:app",
        "recipes": "maporl.cli.recipes:app",
    },
    "Look and play": {
        "eval": "maporl.cli.look:evaluate",
        "crossplay": "maporl.studies.crossplay.command:crossplay",
        "compare": "maporl.studies.comparing.command:compare",
        "sharing": "maporl.studies.sharing.command:sharing",
        "audit": "maporl.cli.look:audit",
        "report": "maporl.cli.look:report",
        "watch": "maporl.cli.look:watch",
        "dump": "maporl.cli.look:dump",
        "play": "maporl.cli.look:play",
    },
    "Share and set up": {
        "push": "maporl.cli.share:push",
        "export": "maporl.integrations.exporting.command:export",
        "plan": "maporl.studies.planning.command:plan",
        "jobs": "maporl.integrations.jobs:app",
        "doctor": "maporl.cli.share:doctor",
        "schema": "maporl.cli.share:schema",
        "api": "maporl.serving.command:api",
        "serve": "reward_server.cli:serve",
    },
}
"""Panel of the help page -> name -> ``MODULE:OBJECT``, a command or a :class:`typer.Typer` with commands of its own."""


class Commands(UserDict[str, Any]):
    """The commands by name, as typer makes them. Each is imported when it is read: because it, or its help, is asked
    for."""

    def __init__(self, others: Mapping[str, Any]) -> None:
        super().__init__({name: (panel, part) for panel, named in COMMANDS.items() for name, part in named.items()})
        self.data["loop"] = (None, COMMANDS["Train"]["train"])  # who looks for outer loops types this; train runs them
        self.data |= others

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], tuple):
            self.data[name] = _loaded(name, *self.data[name])
        return self.data[name]


def _loaded(name: str, panel: str | None, part: str) -> Any:
    """Return a command as typer makes it. One whose package is missing says so, in its help and when it is called."""
    made, options = typer.Typer(rich_markup_mode="rich"), dict[str, Any]()
    try:
        found = extension(part, f"maporl {name}")
    except ConfigError as error:
        found, any_words = _lacking(error), {"ignore_unknown_options": True, "allow_extra_args": True}
        options = {"help": str(error).replace("[", r"\["), "context_settings": any_words}
    if isinstance(found, typer.Typer):
        made.add_typer(found, name=name, rich_help_panel=panel)
    else:
        made.command(name, rich_help_panel=panel, hidden=panel is None, **options)(found)
    return typer.main.get_group(made).commands[name]


def _lacking(error: ConfigError) -> Any:
    @command
    def lacking() -> None:
        raise error

    return lacking


class _Group(TyperGroup):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.commands = Commands(self.commands)  # with those that a program has added to the app


app = typer.Typer(
    name="maporl",
    cls=_Group,
    help=HELP,
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from maporl import __version__

        echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options that stand before a command. The text of the help page is ``HELP``."""
    wait_briefly()  # before a command imports torch, which reads it once


def main() -> None:
    """Entry point of the ``maporl`` script and of ``python -m maporl``."""
    run_program(app)
