"""Configurations: their schema, their YAML files, and the recipes that come with maporl. Imports no torch."""

from maporl.config.imports import unknown as unknown
from maporl.config.parse import build_named as build_named
from maporl.config.parse import json_schema as json_schema
from maporl.config.parse import parse_config as parse_config
from maporl.config.parse import read_values as read_values
from maporl.config.parse import read_yaml as read_yaml
from maporl.config.parse import to_yaml as to_yaml
from maporl.config.parse import validated as validated
from maporl.config.schema import Config as Config
