"""The Protocol contract: who speaks when, and sees what.

A protocol is a frozen dataclass with a generator ``play(example, agents)`` that **yields a list of Ask, is sent the
list of Utterance that answers it, and returns the outcome**. It knows nothing of engines, tokens or batches: the
driver advances all dialogues together and groups whatever they ask into one call per policy.
"""

from collections.abc import Generator
from typing import Any
from typing import Protocol as Interface

from maporl.types import Ask, Example, Utterance

Play = Generator[list[Ask], list[Utterance], Any]


class Protocol(Interface):
    """What a protocol offers."""

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play one example with the agents named in order."""
        ...
