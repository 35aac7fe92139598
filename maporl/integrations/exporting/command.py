"""``maporl export``: the policies of a checkpoint as plain folders, or a team for another server."""

from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import echo, load_libraries
from maporl.config.command_line import command
from maporl.errors import ConfigError
from maporl.integrations.exporting.template import Engine
from trl_ext.files.atomic import new_folder

NOTES = (
    "Not here: the team's dialogues, votes and tools. `maporl api` serves those of a run",
    "Not here: critics, optimizers and rewards, which only training needs",
    "A text that spells a control token of the chat template is read as that token; maporl reads it as text",
)
ROUNDED = "The weights are sums of a base and an adapter, rounded to {}: what an adapter adds may be rounded away"


@command
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A checkpoint-N folder; with --for also a run or a team on the hub.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the policies go; must be new.")],
    engine: Annotated[
        Engine | None, typer.Option("--for", help="What will serve the agents by their names.", show_default=False)
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="With --for: whole models in place of adapters.")] = False,
) -> None:
    """Write a checkpoint's policies as plain model and adapter folders, which from_pretrained and vLLM load.

    With --for, write what another server needs to answer as the agents do: models, chat templates with their system
    prompts, sampling, and how to start it.
    """
    if merge and engine is None:
        raise ConfigError("--merge: goes with --for; without it adapters stay adapters")
    load_libraries()
    from maporl.integrations.exporting.plain import export as write_plain
    from maporl.integrations.exporting.plain import must_be_new

    if engine is None:
        for path in write_plain(Path(run), folder):
            echo(str(path))
        return
    must_be_new(folder)
    for line in export_for(run, folder, engine, merge):
        echo(line)


def export_for(run: str, folder: Path, engine: Engine, merge: bool = False) -> list[str]:
    """Write a team into a new ``folder`` for another server, and return what was written and what to know of it.

    Raises:
        UserError: the team does not exist, or ``engine`` cannot serve it. Nothing is written then.
    """
    from maporl.integrations.exporting.folders import Folders
    from maporl.integrations.exporting.models import models_of
    from maporl.integrations.exporting.serving import write_texts

    config, models, notes = models_of(run, engine, merge)
    with new_folder(folder) as partial:
        folders = Folders(config, models, partial, engine, merge)
        for model in models:
            folders.write(model)
        halves = {folders.dtype(model) for model in models if model.is_adapter and merge} - {"float32"}
        notes += [ROUNDED.format(dtype) for dtype in sorted(halves)]
        write_texts(folders, [*NOTES, *notes])
    return [*(str(folder / model.name) for model in models), *notes, f"how to go on: {folder / 'README.md'}"]
