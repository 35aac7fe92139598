"""The contract of a protocol: who speaks when, and sees what. Imports no torch."""

from collections.abc import Generator
from typing import Any

from maporl.errors import ConfigError
from maporl.types import Ask, Example, Utterance

Play = Generator[list[Ask], list[Utterance], Any]
"""Yields what it wants said next, is sent what was said, returns the dialogue's outcome."""


class Protocol:
    """Derive from it a frozen dataclass of options, and give it a generator :meth:`play`.

    ``play(example, agents)`` **yields a list of Ask, is sent the list of Utterance that answers it, and returns the outcome**. It
    knows nothing of engines, tokens or batches: the driver advances all dialogues together and groups whatever they ask into one
    call per policy.

    A dialogue may be forked, by replaying its protocol on what was said. Therefore a protocol that is sent the same must ask the
    same again, and what it draws at random it draws from ``example.id`` and ``example.meta["rollout"]``. It may set
    ``rewards[NAME]`` and ``answers`` of what it is sent.

    The attributes below say what callers must know; a subclass overrides those that differ.
    """

    turns: int = 1
    """Answers of an agent at most."""
    opening: str = "{question}"
    """How a question is put to an agent that has heard nothing yet."""
    players: int | None = None
    """How many agents play; None: any number."""
    least_players: int = 1
    """How many agents there must be at least."""
    roles: bool = False
    """Whether it gives the agents roles."""
    records: frozenset[str] = frozenset()
    """Further columns that advantages may be grouped by: caller, game, seed, state."""
    pays: frozenset[str] = frozenset()
    """Names of the rewards that it sets itself."""
    every_step_scored: bool = True
    """Whether every step ends with an answer, so that branches can be compared after it."""
    score_between_turns: bool = False
    """Whether it must know an answer's score, the weighted sum of all sources, before it goes on."""

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play one example with the agents named in order."""
        raise NotImplementedError(f"{type(self).__name__}: a protocol defines play(example, agents), a generator")

    @property
    def label(self) -> str:
        """What people call it."""
        return type(self).__name__.lower()

    def mentioned(self) -> set[str]:
        """Agents that its options name; they must play."""
        return set()

    def helpers(self) -> tuple[str, ...]:
        """Agents that play though they are not listed among the players: a summariser."""
        return ()

    def between_turns(self) -> frozenset[str]:
        """Names of the reward sources whose values it must know before it goes on."""
        return frozenset()

    def at_update(self, update: int) -> "Protocol":
        """The protocol as it is played in ``update``, counted from 1."""
        return self

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that these agents can play it.

        Raises:
            ValueError: there are too few or too many of them; names the agents and what to do.
        """
        if self.players is not None and len(players) != self.players:
            raise ValueError(
                f"{self.label} has {self.players} players but agents are {list(players)}; list that many in protocol.agents"
            )
        if len(players) < self.least_players:
            raise ValueError(
                f"{self.label} needs {NUMBERS[self.least_players]} agents, got {list(players)}; add one under agents:"
            )


def must_be_protocol(part: Any, where: str) -> Protocol:
    """``part`` itself, where it is a :class:`Protocol`.

    Raises:
        ConfigError: it is something else; ``where`` says what was asked for.
    """
    if not isinstance(part, Protocol):
        raise ConfigError(
            f"{where}: expected a maporl.Protocol, got {type(part).__name__}; derive it: class {type(part).__name__}(Protocol)"
        )
    return part


NUMBERS = {1: "one", 2: "two", 3: "three"}


def check_template(name: str, text: str, allowed: set[str], needed: set[str] | None = None) -> None:
    """Raise ``ValueError`` unless ``text`` can be formatted with ``allowed`` alone, and says everything in ``needed``."""
    try:
        text.format(**dict.fromkeys(allowed, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"{name}: it may use {sorted(allowed)} in braces, but has {error}") from None
    for part in sorted(needed or ()):
        if text.format(**dict.fromkeys(allowed, "")) == text.format(**(dict.fromkeys(allowed, "") | {part: "?"})):
            raise ValueError(f"{name}: it must contain {{{part}}}, or nobody is told it; got {text!r:.80}")
