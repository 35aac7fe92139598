"""Reading a configuration and checking it, before anything heavy is loaded. Imports no torch unless a check needs it."""

from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_values
from maporl.validation.checks import check


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read ``path``, apply ``a.b=c`` overrides (values are YAML), merge agent defaults, check, and return a Config.

    ``path`` may be the name of a recipe (``maporl recipes list``) or ``quickstart``. Three keys serve the file itself: ``extends`` names
    another file whose values this one overlays, ``agent_defaults`` is merged into every agent, and ``recipe`` says where a
    method comes from.

    Raises:
        ConfigError: the file cannot be read, or what it says cannot run.
    """
    return from_dict(read_values(path, overrides), str(path))


def from_dict(values: dict[str, Any], where: str = "configuration") -> Config:
    """A checked Config from plain values (see :func:`load`).

    Raises:
        ConfigError: what the values say cannot run.
    """
    config = parse_config(values, where)
    check(config, where)
    return config
