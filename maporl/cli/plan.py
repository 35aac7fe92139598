"""``maporl plan``: what a cluster would do with a configuration."""

import json
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Values, echo, load_config, quiet_libraries
from maporl.config.command_line import command


@command
def plan(
    *,
    cluster: Annotated[str, typer.Option("--cluster", metavar="2x8xH100", help="Machines, devices of each, device.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    devices: Annotated[
        Path | None, typer.Option("--devices", help="A YAML file with further devices.", show_default=False)
    ] = None,
    dialogues: Annotated[
        int | None, typer.Option("--dialogues", min=1, help="Dialogues of an update.", show_default=False)
    ] = None,
    question: Annotated[int, typer.Option("--question", min=1, help="Tokens of a question.")] = 200,
    answer: Annotated[
        int | None, typer.Option("--answer", min=1, help="Tokens of a mean answer.", show_default=False)
    ] = None,
    heard: Annotated[
        int | None,
        typer.Option("--heard", min=0, help="Tokens that are new before a later answer.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Estimate memory, seconds and the bottleneck of an update on a cluster, and recommend how to share its devices.

    Nothing is loaded or started, and maporl does not run on such a cluster by itself yet. Policies with all weights trained
    are planned for.
    """
    settings = load_config(values, config, set_)
    quiet_libraries()
    from maporl.planning.devices import read_cluster
    from maporl.planning.groups import groups_of
    from maporl.planning.placements import placements
    from maporl.planning.report import lines, record

    machines = read_cluster(cluster, devices)
    groups = groups_of(settings, dialogues, question, answer, heard)
    found = placements(groups, machines)
    if as_json:
        echo(json.dumps(record(groups, machines, found)))
        return
    for line in lines(groups, machines, found):
        echo(line)
