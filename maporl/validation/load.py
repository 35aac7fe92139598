"""Read and check a configuration before anything heavy is loaded. Imports no torch unless a check needs it."""

from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_values
from maporl.config.imports import with_imports
from maporl.engines.choice import choose_engines
from maporl.validation.check import check
from trl_ext.errors import short_trace


@short_trace
def load(path: str | Path, overrides: list[str] | None = None, trains: bool = True) -> Config:
    """Read and check the configuration in ``path``.

    ``path`` may be the name of a recipe (``maporl recipes list``) or ``quickstart``. ``overrides`` are ``a.b=c`` with
    YAML values. Three keys of a file are not options: ``extends`` names another file, or a recipe, whose values this
    one overrides, ``agent_defaults`` is merged into every agent, and ``recipe`` says where a method comes from. Modules
    of the user's own that the configuration names are imported (:mod:`maporl.config.imports`). They are looked for in
    the file's folder. Agents whose engine is not named may get vLLM (:mod:`maporl.engines.choice`).

    Raises:
        ConfigError: the file cannot be read, or the configuration cannot run.
    """
    return from_dict(read_values(path, overrides), str(path), trains)


@short_trace
def from_dict(values: dict[str, Any], where: str = "configuration", trains: bool = True) -> Config:
    """Build and check a configuration from plain values (see :func:`load`).

    Messages begin with ``where``. ``trains`` says whether it is to be trained, so that somebody must learn.

    Raises:
        ConfigError: the configuration cannot run.
    """
    config = choose_engines(with_imports(parse_config(values, where), where), values)
    check(config, where, trains)
    return config
