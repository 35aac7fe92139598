"""The Protocol contract: who speaks when, and sees what.

A protocol is a frozen dataclass with a generator ``play(example, agents)`` that **yields a list of Ask, is sent the
list of Utterance that answers it, and returns the outcome**. It knows nothing of engines, tokens or batches: the
driver advances all dialogues together and groups whatever they ask into one call per policy.

A dialogue may be forked, by replaying its protocol on what was said: sent the same, a protocol asks the same again, and
what it draws at random it draws from ``example.id`` and ``example.meta["rollout"]``. It may set ``rewards[NAME]`` and
``answers`` of what it is sent.

A protocol may also have, as attributes or properties: ``turns``, answers of an agent at most (1 by default);
``mentioned()``, agents that its options name; ``roles``, whether it gives them; ``records``, further columns for
advantages (caller, game, seed, state); ``pays``, names of rewards that it sets itself; ``every_step_scored``, whether every
step ends with an answer (true by default); ``at_update(update)``, the protocol of that update; ``between_turns()``,
rewards that it needs to know before it goes on.
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


def check_template(name: str, text: str, allowed: set[str], needed: set[str] | None = None) -> None:
    """Raise ``ValueError`` unless ``text`` can be formatted with ``allowed`` alone, and says everything in ``needed``."""
    try:
        text.format(**dict.fromkeys(allowed, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"{name}: it may use {sorted(allowed)} in braces, but has {error}") from None
    for part in sorted(needed or ()):
        if text.format(**dict.fromkeys(allowed, "")) == text.format(**(dict.fromkeys(allowed, "") | {part: "?"})):
            raise ValueError(f"{name}: it must contain {{{part}}}, or nobody is told it; got {text!r:.80}")
