"""Engines: things that answer. The ``transformers`` engine is loaded on first use, because it needs torch."""

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.human import HumanEngine
from maporl.engines.scripted import ScriptedEngine

__all__ = ["Engine", "HumanEngine", "Reply", "Request", "ScriptedEngine"]
