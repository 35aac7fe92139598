"""The folder of a team: a run's, or one that was pushed. It has a ``config.yaml``, and a folder for each policy."""

from pathlib import Path

from maporl.errors import one_line
from maporl.storage.run_folder import FINAL, has_final


def weights_of(folder: Path) -> Path:
    """Return the folder with the policies' folders: ``final`` in a run, and ``folder`` itself in a pushed team."""
    return folder / FINAL if has_final(folder) else folder


def first_line(error: BaseException) -> str:
    """Return a library's error message, which may have many lines, as one line of at most 200 characters."""
    return one_line(error, 200)
