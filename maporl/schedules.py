"""What learns at which update: turns one at a time, agents frozen for a span. No torch.

A schedule is asked before every update for a :class:`Plan`. What a plan leaves out is played as ever, but makes no
training rows, so it costs no forward pass in the update.
"""

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Plan:
    """Who and what learns in one update: ``turns`` (counted from 0; None: all) less ``never``, agents but ``frozen``."""

    turns: frozenset[int] | None = None
    never: frozenset[int] = frozenset()
    frozen: frozenset[str] = frozenset()

    def learns(self, agent: str, turn: int) -> bool:
        """Whether what ``agent`` said at ``turn`` is trained on."""
        return agent not in self.frozen and turn not in self.never and (self.turns is None or turn in self.turns)


@dataclass(frozen=True)
class Span:
    """``updates`` updates in which only ``turns`` (counted from 1) learn."""

    updates: int
    turns: list[int]


@dataclass(frozen=True)
class Freeze:
    """``agent`` does not learn from update ``first`` to update ``last``, both counted from 1 and included."""

    agent: str
    first: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """``opening`` spans once, then ``cycle`` over and over; without either, all turns learn all the time.

    ``preset="one_turn_at_a_time"`` fills in both as MAPoRL's published code had them, for the protocol's turns.

    ``train_first_turn=False``: what was said in the first turn is never trained on. Where the first turn has a policy of
    its own, that policy then stays the untrained model.
    """

    preset: Literal["all_turns", "one_turn_at_a_time"] = "all_turns"
    opening: list[Span] = field(default_factory=list)
    cycle: list[Span] = field(default_factory=list)
    freeze: list[Freeze] = field(default_factory=list)
    train_first_turn: bool = True

    def resolved(self, turns: int, agents: tuple[str, ...]) -> "Schedule":
        """Without a preset, and checked against a protocol of ``turns`` turns and the agents there are."""
        if self.preset == "one_turn_at_a_time":
            if self.opening or self.cycle:
                raise ValueError("schedule: preset and opening/cycle exclude each other; remove one")
            return replace(one_turn_at_a_time(turns), freeze=self.freeze)
        for span in [*self.opening, *self.cycle]:
            if span.updates < 1 or not span.turns or not all(1 <= turn <= turns for turn in span.turns):
                raise ValueError(
                    f"schedule: expected spans of at least 1 update and of turns from 1 to {turns}, got {span}"
                )
        for freeze in self.freeze:
            if freeze.agent not in agents or not 1 <= freeze.first <= freeze.last:
                raise ValueError(
                    f"schedule.freeze: expected an agent of {list(agents)} and 1 <= first <= last, got {freeze}"
                )
        if turns == 1 and not self.train_first_turn:
            raise ValueError("schedule.train_first_turn: there is only one turn, so nothing would be trained")
        return self

    def plan(self, update: int) -> Plan:
        """The plan of ``update``, counted from 1."""
        frozen = frozenset(f.agent for f in self.freeze if f.first <= update <= f.last)
        return Plan(self._turns(update), frozenset() if self.train_first_turn else frozenset([0]), frozen)

    def _turns(self, update: int) -> frozenset[int] | None:
        done = update - 1
        for span in self.opening:
            if done < span.updates:
                return _from_zero(span)
            done -= span.updates
        if not self.cycle:
            return None
        done %= sum(span.updates for span in self.cycle)
        for span in self.cycle:
            if done < span.updates:
                return _from_zero(span)
            done -= span.updates
        raise AssertionError("a remainder is smaller than what it was taken by")


def one_turn_at_a_time(turns: int, opening: int = 20, block: int = 40) -> Schedule:
    """MAPoRL's published schedule (spec: turn_based_training): turn 2 for ``opening`` updates, then blocks of ``block``
    updates on the last turn, the one before, ... down to turn 2, and again. The first turn is never trained.

    >>> [sorted(one_turn_at_a_time(3).plan(u).turns) for u in (1, 20, 21, 60, 61, 100, 101)]
    [[1], [1], [2], [2], [1], [1], [2]]
    """
    if turns < 2:
        raise ValueError(f"one turn at a time: needs at least 2 turns, because the first is never trained; got {turns}")
    later = [Span(block, [turn]) for turn in range(turns, 1, -1)]
    return Schedule(opening=[Span(opening, [2])], cycle=later, train_first_turn=False)


def _from_zero(span: Span) -> frozenset[int]:
    return frozenset(turn - 1 for turn in span.turns)
