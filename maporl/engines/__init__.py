"""Engines answer for agents. ``ENGINES`` names them all. An engine's module is loaded when an agent uses it."""

from maporl.config.engines import ENGINES as ENGINES
