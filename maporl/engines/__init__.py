"""Engines answer for agents. ``ENGINES`` names them all. An engine's module is loaded when an agent uses it."""

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.registry import ENGINES, EngineEntry

__all__ = ["ENGINES", "Engine", "EngineEntry", "Reply", "Request"]
