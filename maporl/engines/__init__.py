"""Engines answer for agents. ``ENGINES`` names them all. An engine's module is loaded when an agent uses it."""

from maporl.config.engines import ENGINES, EngineEntry
from maporl.engines.base import Engine, Reply, Request

__all__ = ["ENGINES", "Engine", "EngineEntry", "Reply", "Request"]
