"""The configurations that come with maporl, by name. Imports no torch."""

from pathlib import Path


def _folder(installed: str, in_checkout: str) -> Path:
    """Return a folder of files: the one inside the installed package, or else the one in the checkout."""
    here = Path(__file__).parents[1]
    return here / installed if (here / installed).is_dir() else here.parent / in_checkout


def recipe_folder() -> Path:
    """Return the folder with the recipes."""
    return _folder("recipe_files", "configs/ppo/recipes")


def recipe_files() -> dict[str, Path]:
    """Return the file of every recipe, by the recipe's name."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml")) if path.stem != "common"}


def configuration_files() -> dict[str, Path]:
    """Return the files of the other configurations, by name: quickstart, smollm2_times, ..."""
    files = sorted(_folder("configurations", "configs/ppo").glob("*.yaml"))
    return {path.stem: path for path in files if path.stem not in ("base", "maporl_common")}
