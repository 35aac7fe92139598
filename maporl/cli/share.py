"""``maporl push``, ``doctor`` and ``schema``: sharing a team, and setting up a machine and an editor."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import echo, quiet_environment, quiet_libraries
from maporl.config.command_line import command
from maporl.config.imports import extension


@command
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a run that has ended.")],
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private, where it is new.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be pushed; nothing leaves this machine.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="MARK", help="What stopped a push and is not a secret.", show_default=False),
    ] = None,
) -> None:
    """Put a team on the hub: policies, heads, configuration, report, and a card with its results."""
    quiet_libraries()
    pushed = extension("maporl.integrations.hub.push:push", "maporl push")(run, name, private, dry_run, allow or ())
    for path, size in pushed.files:
        echo(f"{size / 1e6:10.2f} MB  {path}" if size >= 1e5 else f"{size / 1e3:10.1f} kB  {path}")
    for note in pushed.notes:
        echo(note)
    echo(f"{'would go to' if dry_run else 'pushed to'} {pushed.address}")


@command
def doctor(
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="HOST:PORT",
            help="Ask each machine of this Ray cluster too (or: auto).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print versions and devices, and what is missing for which feature, with the command that installs it."""
    quiet_environment()  # not quiet_libraries: transformers may be broken, and this command is there to say so
    from rich.table import Table
    from rich.text import Text

    from maporl.cli.common import Screen
    from maporl.runs.doctor import examine

    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(overflow="fold")
    findings = examine()
    if cluster is not None:
        findings += extension("maporl.integrations.ray.doctor:examine_cluster", "maporl doctor --cluster")(cluster)
    colours = {"fine": "green", "missing": "yellow", "broken": "red"}
    for finding in findings:
        table.add_row(Text(finding.state, colours[finding.state]), Text(finding.what), Text(finding.detail))
    # a program that reads this gets each finding on one line, however long its command is
    (Screen() if sys.stdout.isatty() else Screen(width=10_000)).print(table)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@command
def schema() -> None:
    """Print the JSON schema of configurations, with which editors complete and check keys and the options of parts.

    With VS Code's YAML extension and others: maporl schema > schema.json

    and on a configuration's first line: # yaml-language-server: $schema=schema.json
    """
    from maporl.validation.editor_schema import editor_schema

    echo(json.dumps(editor_schema(), indent=1))
