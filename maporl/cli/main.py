"""The ``maporl`` command: every command by name, in the order of its help page."""

from collections.abc import Callable
from typing import Annotated

import typer

from maporl.cli import crossplay, look, plan, recipes, share, sharing, train, verifier
from maporl.cli.common import echo
from maporl.config.command_line import run_program
from reward_server.cli import serve
from trl_ext.process.threads import wait_briefly

HELP = """Train teams of language models that talk to each other.

Begin with [bold]maporl train configs/ppo/quickstart.yaml[/bold], or a published method: [bold]maporl recipes try cory[/bold].
Everything a run writes is in its output_dir; [bold]report.html[/bold] in it opens by double click.
"""  # noqa: E501
EPILOG = """Exit status: 0 done, 1 it failed (the line after "error:" says why), 2 a configuration or the command's words are wrong, 130
Ctrl-C and 143 SIGTERM (the run is saved; a second Ctrl-C ends it at once if nothing would be lost, and SIGQUIT always). Colours are off where output is not a terminal or NO_COLOR is set. [bold]maporl --install-completion[/bold] completes commands
in your shell."""  # noqa: E501
COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Train": {
        "train": train.train,
        "check": train.check,
        "tools": train.tools,
        "record": train.record,
        "sft": train.sft,
        "verifier": verifier.app,
        "recipes": recipes.app,
    },
    "Look and play": {
        "eval": look.evaluate,
        "crossplay": crossplay.crossplay,
        "sharing": sharing.sharing,
        "audit": look.audit,
        "report": look.report,
        "watch": look.watch,
        "dump": look.dump,
        "play": look.play,
    },
    "Share and set up": {
        "push": share.push,
        "export": share.export,
        "plan": plan.plan,
        "doctor": share.doctor,
        "schema": share.schema,
        "serve": serve,
    },
}
"""Panel of the help page -> name -> command, or a :class:`typer.Typer` with commands of its own."""

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
for panel, named in COMMANDS.items():
    for name, command in named.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)
app.command("loop", hidden=True)(train.train)  # who looks for outer loops types this; train runs them


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
