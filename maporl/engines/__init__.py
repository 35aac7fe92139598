"""Engines answer for agents. ``ENGINES`` names them all. An engine's module is loaded when an agent uses it."""

from maporl.config.engines import ENGINES as ENGINES
from maporl.config.engines import EngineEntry as EngineEntry
from maporl.engines.base import Engine as Engine
from maporl.engines.base import Reply as Reply
from maporl.engines.base import Request as Request
