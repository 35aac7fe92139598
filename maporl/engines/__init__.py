"""Engines: things that answer. ``ENGINES`` names them all; each is loaded when an agent uses it."""

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.registry import ENGINES, EngineEntry

__all__ = ["ENGINES", "Engine", "EngineEntry", "Reply", "Request"]
