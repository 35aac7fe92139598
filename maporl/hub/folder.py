"""The folder of a team: a run's, or one that was pushed. It has a ``config.yaml``, and a folder for each policy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maporl.errors import one_line
from maporl.storage.run_folder import FINAL, has_final
from trl_ext.files.paths import UnsafeName, within


def weights_of(folder: Path) -> Path:
    """Return the folder with the policies' folders: ``final`` in a run, and ``folder`` itself in a pushed team."""
    return folder / FINAL if has_final(folder) else folder


def own_places(section: Mapping[str, Any], output_dir: str, folder: Path) -> dict[str, str]:
    """Return the places in an agent's ``section`` that lie in the team's own ``folder``, as they are now.

    They begin with ``output_dir``, which was the folder when the configuration was written, or with ``./`` in a team
    that was pushed.
    """
    places = {}
    for key in ("model", "tokenizer", "adapter"):
        value = section.get(key)
        for start in (f"{output_dir}/", "./"):
            if isinstance(value, str) and value.startswith(start):
                try:
                    place = within(folder, value.removeprefix(start))
                except UnsafeName:  # it leads elsewhere, so it is not one of the folder's own places
                    continue
                if place.is_dir():
                    places[key] = str(place)
    return places


def first_line(error: BaseException) -> str:
    """Return a library's error message, which may have many lines, as one line of at most 200 characters."""
    return one_line(error, 200)
