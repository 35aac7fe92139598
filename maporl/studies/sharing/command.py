"""``maporl sharing``: one policy for all agents of a team, or a policy for each."""

from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Values, echo, load_config, load_libraries
from maporl.config.command_line import command


@command
def sharing(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs; what it has stays.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds to train with, from that of the run on.")] = 5,
) -> None:
    """Train a team with one shared policy and with a policy for each agent, and compare them over seeds.

    Writes a run for each seed and arm, and sharing.md and sharing.json. Called again, it goes on where it ended.
    """
    settings = load_config(values, config, set_)
    load_libraries()
    from maporl.studies.sharing.study import Measured, configurations, page, train_all, write

    first = settings.seed
    runs = configurations(settings, output, range(first, first + seeds))
    found: dict[tuple[str, int], Measured] = {}
    for arm, seed, one in train_all(runs):
        found[arm, seed] = one
        told = ", ".join(f"{name} {value:.1f}" for name, value in one.measures.items())
        echo(f"{arm}, seed {seed}: {told}")
    files = write(output, found)
    echo(page(found), newline=False)
    for file in files:
        echo(file)
