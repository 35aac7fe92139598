"""``maporl plan``: what a cluster would do with a configuration."""

import json
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Values, echo, load_config, quiet_libraries
from maporl.config.command_line import command
from maporl.errors import ConfigError


@command
def plan(
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="2x8xH100",
            help="Machines, devices of each, device. A run on a service (cluster.backend: tinker) needs none.",
            show_default=False,
        ),
    ] = None,
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
    write: Annotated[
        Path | None,
        typer.Option("--write", help="A new file for the configuration with its groups.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Estimate memory, seconds and the bottleneck of an update on a cluster, and recommend how to share its devices; or
    what an update costs on a service.

    Nothing is loaded or started. The section cluster that is printed runs with --backend ray and the
    configuration's training.async_depth. Learners and engines share devices in it only if all agents have engine vllm.
    """
    settings = load_config(values, config, set_)
    quiet_libraries()
    from maporl.studies.planning.devices import read_cluster
    from maporl.studies.planning.groups import groups_of
    from maporl.studies.planning.placements import placements
    from maporl.studies.planning.report import lines, record, runnable, section_lines, with_layout, write_layout

    groups = groups_of(settings, dialogues, question, answer, heard)
    if settings.grouped and settings.cluster.backend == "tinker":
        from maporl.integrations.tinker.prices import planned

        for line in planned(settings, groups):
            echo(line)
        return
    if cluster is None:
        raise ConfigError("--cluster: say which machines, such as --cluster 2x8xH100")
    machines = read_cluster(cluster, devices)
    choices = placements(groups, machines)
    runs = runnable(settings, groups, machines, choices)
    placed = None if runs is None else with_layout(settings, groups, runs)
    if write is not None and placed is None:
        raise ConfigError(
            "--write: learners and engines with devices of their own do not fit this cluster; name a larger one, or "
            "give agents engine: vllm, which can sleep on the devices of learners"
        )
    if write is not None and placed is not None:
        write_layout(placed, write)
    if as_json:
        echo(json.dumps(record(groups, machines, choices, runs)))
        return
    for line in lines(groups, machines, choices, runs):
        echo(line)
    if runs is not None and placed is not None:
        echo(f"# with --backend ray, {runs.sharing} and async_depth {runs.staleness}: {runs.period:.3g} s an update")
        for line in section_lines(placed, groups):
            echo(line)
