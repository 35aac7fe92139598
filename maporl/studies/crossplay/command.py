"""``maporl crossplay``: teams whose agents come from different runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import Overrides, echo, quiet_libraries, split_words
from maporl.config.command_line import command
from maporl.studies.crossplay.result import MOST_TEAMS


@command
def crossplay(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...|KEY=VALUE",
            help="Folders of runs, or teams on the hub, and values to override in all of them.",
        ),
    ],
    set_: Overrides = None,
    teams: Annotated[
        int, typer.Option("--teams", min=0, help="Play all teams up to this number, else replace one agent at a time.")
    ] = MOST_TEAMS,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for crossplay.json; by default the folder of every run.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Seat agents of different runs together: does a team listen, or has it learned its partner's habits?

    The matrix has the accuracy of the last turn on held-out questions. The diagonal has the teams that trained
    together.
    """
    names, overrides = split_words(runs)
    quiet_libraries()
    from maporl.cli.common import Screen
    from maporl.report.findings import said
    from maporl.studies.crossplay.entrants import read_entrants
    from maporl.studies.crossplay.play import play_crossplay, write_crossplay
    from maporl.studies.crossplay.table import crossplay_table

    entrants = read_entrants(names, [*(set_ or []), *overrides])
    play = play_crossplay(entrants, teams)
    files = write_crossplay(play, entrants, output)
    if as_json:
        echo(json.dumps(play.to_json()))
        return
    console = Screen(markup=False, highlight=False)
    console.print(crossplay_table(play))
    for line in (said("cells", play), said("others", play), *map(str, files)):
        console.print(line, soft_wrap=True)
