"""Configurations: their schema, their YAML files, and the recipes that come with maporl. Imports no torch."""

from maporl.config.imports import unknown
from maporl.config.parse import (
    build_named,
    json_schema,
    parse_config,
    read_values,
    read_yaml,
    to_yaml,
    validated,
)
from maporl.config.schema import Config

__all__ = [
    "Config",
    "build_named",
    "json_schema",
    "parse_config",
    "read_values",
    "read_yaml",
    "to_yaml",
    "unknown",
    "validated",
]
