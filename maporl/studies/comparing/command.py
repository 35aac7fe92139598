"""``maporl compare``: train configurations over the same seeds, and compare them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import Overrides, echo, load_config, load_libraries, split_words
from maporl.config.command_line import command
from maporl.config.schema import Config
from maporl.errors import ConfigError


@command
def compare(
    values: Annotated[list[str], typer.Argument(help="YAML files or names of recipes, and KEY=VALUE for all of them.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs; what it has stays.")],
    set_: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds to train with, from that of the first on.")] = 5,
) -> None:
    """Train two configurations or more over the same seeds, and compare what they end with.

    Writes a run for each configuration and seed, and compare.md and compare.json, with the differences of the first one
    minus each other, their intervals, and whether they show anything. Called again, it goes on where it ended.
    """
    words, changes = split_words(values)
    files, changed = [Path(word) for word in words], [*(set_ or []), *changes]
    arms = {name: load_config(None, file, changed) for name, file in zip(_names(files), files, strict=True)}
    if not arms:
        raise ConfigError("compare: expected two configurations or more, got none")
    load_libraries()
    first = next(iter(arms.values())).seed
    compare_all(arms, output, range(first, first + seeds), "compare")


def compare_all(configs: Mapping[str, Config], output: Path, seeds: Sequence[int], name: str) -> None:
    """Train all configurations with all ``seeds``, say what each run ended with, and write and print the comparison.

    Raises:
        ConfigError: the configurations cannot be compared.
        RunError: a run failed, or its folder has one of another configuration.
    """
    from maporl.studies.comparing.study import Measured, arms, page, train_all, write

    found: dict[tuple[str, int], Measured] = {}
    for arm, seed, one in train_all(arms(configs, output, seeds, name)):
        found[arm, seed] = one
        told = ", ".join(f"{measure} {value:.3g}" for measure, value in one.measures.items())
        echo(f"{arm}, seed {seed}: {told}")
    files = write(output, found, name)
    echo(page(found), newline=False)
    for file in files:
        echo(file)


def _names(files: Sequence[Path]) -> list[str]:
    """Return the names of arms: those of the files, with that of their folders where two files have one name."""
    stems = [file.stem for file in files]
    return [
        stem if stems.count(stem) == 1 else f"{file.parent.name}-{stem}"
        for stem, file in zip(stems, files, strict=True)
    ]
