"""The configurations that come with maporl: recipes and others, by name. Imports no torch."""

from pathlib import Path


def _folder(installed: str, in_checkout: str) -> Path:
    """Where files are: installed within the package, or in the checkout."""
    here = Path(__file__).parents[1]
    return here / installed if (here / installed).is_dir() else here.parent / in_checkout


def recipe_folder() -> Path:
    """Where the recipes are."""
    return _folder("recipe_files", "configs/ppo/recipes")


def recipe_files() -> dict[str, Path]:
    """Every recipe's file by its name."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml")) if path.stem != "common"}


def configuration_files() -> dict[str, Path]:
    """The other configurations that come with the package, by name: quickstart, smollm2_times, ..."""
    files = sorted(_folder("configurations", "configs/ppo").glob("*.yaml"))
    return {path.stem: path for path in files if path.stem not in ("base", "maporl_common")}
