"""Schedules: what learns in which update, and whose weights speak for an agent. No torch.

A schedule can train one turn or one agent at a time, freeze agents, exchange roles, use past opponents, train critics
first, and change the task in stages. Before every update the trainer asks it for a :class:`Plan`. Turns and agents that
do not learn are still played, but they make no training rows, so they cost no forward pass in the update.
"""

from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from typing import Any, Literal

from trl_ext.ppo.options import Natural, Positive, Share, option, options


@dataclass(frozen=True)
class Plan:
    """The agents and turns that learn in one update: ``turns`` without those in ``never``, and agents not ``frozen``.

    Turns count from 0, and None means all turns. With ``critic_only`` the policies keep their weights. ``weights_from``
    maps an agent to the agent whose weights speak for it, if these are not its own.
    """

    turns: frozenset[int] | None = None
    never: frozenset[int] = frozenset()
    frozen: frozenset[str] = frozenset()
    critic_only: bool = False
    weights_from: dict[str, str] = field(default_factory=dict)

    def learns(self, agent: str, turn: int) -> bool:
        """Return whether the update trains on what ``agent`` said in ``turn``."""
        return agent not in self.frozen and turn not in self.never and (self.turns is None or turn in self.turns)


@options(frozen=True)
class Span:
    """A number of updates in which only some turns learn."""

    updates: Positive = option(help="Number of updates.")
    turns: list[int] = option(help="The turns that learn in them, counted from 1.")


@options(frozen=True)
class Freeze:
    """An agent that does not learn for some updates."""

    agent: str = option(help="The agent that does not learn.")
    first: int = option(help="From this update on, counted from 1.")
    last: int | None = option(None, "To this update, included. null: it never learns again.")


@options(frozen=True)
class Swap:
    """Agents that exchange their weights (CORY).

    Only the assignment of weights to agents changes, so optimizers keep their state.
    """

    agents: list[str] = option(help="The weights of each of them move on to the next one. Two agents change places.")
    every: Positive = option(help="Number of updates between two exchanges.")


@options(frozen=True)
class RoundRobin:
    """Agents that learn one at a time."""

    every: Positive = option(help="Number of updates in which an agent learns.")
    agents: list[str] = option([], "The agents that take turns; empty: all.")


@options(frozen=True)
class OpponentPool:
    """An agent that sometimes speaks with past weights of an agent, which are not trained."""

    agent: str = option(help="The agent that sometimes speaks with past weights, which are not trained.")
    of: str = option(help="The agent whose past weights these are.")
    every: Positive = option(10, "Number of updates between two snapshots.")
    keep: Positive = option(30, "How many snapshots are kept, the last ones.")
    probability: Share = option(0.5, "Probability of past weights in an update.")


@options(frozen=True)
class Stage:
    """A stage of a curriculum: from an update on, other options of the task."""

    update: int = option(help="The first update of the stage, from 2 on.")
    task: dict[str, Any] = option(help="The options that replace those of the task from then on.")


@options(frozen=True)
class Growth:
    """Options of the protocol that change with the updates, as the number of turns does in ScalingInter (AgentGym-RL).

    All dialogues of an update are played with the same values. Evaluations are played as the section ``protocol`` says.

    >>> growth = Growth({"turns": [6, 13, 20]}, every=100)
    >>> [growth.at(step + 1)["turns"] for step in (0, 99, 100, 199, 200, 500)]
    [6, 6, 13, 13, 20, 20]
    """

    options: dict[str, list[int]] = option(
        help="The values of each option, in order, e.g. {turns: [1, 2, 3]}. The last one stays. `options.limit` is "
        "`limit` among the protocol's `options`, such as those of a game.",
    )
    every: Positive = option(help="Number of updates for which a value holds.")

    @property
    def stages(self) -> int:
        """The number of updates, divided by ``every``, after which nothing changes any more."""
        return max(map(len, self.options.values()))

    def at(self, update: int) -> dict[str, int]:
        """Return the value of each option in ``update``, counted from 1."""
        stage = (update - 1) // self.every
        return {name: values[min(stage, len(values) - 1)] for name, values in self.options.items()}


@options(frozen=True)
class Schedule:
    """Which agents and turns learn in which updates.

    The spans of ``opening`` run once, and then those of ``cycle`` repeat. ``preset="one_turn_at_a_time"`` sets both as
    in MAPoRL's published code, for the number of turns of the protocol.
    """

    preset: Literal["all_turns", "one_turn_at_a_time"] = option(
        "all_turns",
        "all_turns, or one_turn_at_a_time: MAPoRL's cycle of 20 updates on turn 2, then 40 on each turn from the "
        "last to the 2nd.",
    )
    opening: list[Span] = option([], "Spans that are run once at the start, e.g. [{updates: 20, turns: [2]}].")
    cycle: list[Span] = option(
        [],
        "Spans that are repeated after that. Without spans, all turns learn in every update.",
    )
    freeze: list[Freeze] = option(
        [],
        "Agents that do not learn for some updates, e.g. [{agent: ann, first: 1, last: 10}].",
    )
    train_first_turn: bool = option(
        True,
        "False: nothing that is said in the first turn is trained on. If it has a policy of its own, that stays "
        "the untrained model.",
    )
    swap: Swap | None = option(
        None,
        "Agents that exchange their weights, e.g. {agents: [pioneer, observer], every: 5}. Optimizers keep their "
        "state.",
    )
    round_robin: RoundRobin | None = option(
        None,
        "Agents that learn one at a time, e.g. {every: 10, agents: [ann, bob]}.",
    )
    critic_warmup: Natural = option(0, "Number of first updates in which only the critics learn.")
    opponent_pool: OpponentPool | None = option(
        None,
        "An agent that sometimes speaks with past weights, e.g. {agent: bob, of: ann}.",
    )
    curriculum: list[Stage] = option(
        [],
        "Other options of the task from a given update on, e.g. [{update: 100, task: {largest: 99}}].",
    )
    growth: Growth | None = option(
        None,
        "Options of the protocol that change every so many updates, e.g. {every: 100, options: {turns: [1, 2, "
        "3]}}. Evaluations are played as `protocol` says, so its own values must be the longest.",
    )

    def resolved(self, turns: int, agents: tuple[str, ...]) -> "Schedule":
        """Return the schedule without a preset, checked against a protocol of ``turns`` turns and against ``agents``.

        Raises:
            ValueError: the schedule names turns or agents that do not exist, or options exclude each other.
        """
        if self.preset == "one_turn_at_a_time":
            if self.opening or self.cycle:
                raise ValueError("schedule: preset and opening/cycle exclude each other; remove one")
            cycle = one_turn_at_a_time(turns)
            resolved = replace(
                self, preset="all_turns", opening=cycle.opening, cycle=cycle.cycle, train_first_turn=False
            )
            return resolved.resolved(turns, agents)
        for span in [*self.opening, *self.cycle]:
            if not span.turns or not all(1 <= turn <= turns for turn in span.turns):
                raise ValueError(f"schedule: expected spans of turns from 1 to {turns}, got {span}")
        for freeze in self.freeze:
            last = freeze.first if freeze.last is None else freeze.last
            if freeze.agent not in agents or not 1 <= freeze.first <= last:
                raise ValueError(f"schedule.freeze: expected {list(agents)} and 1 <= first <= last, got {freeze}")
        if turns == 1 and not self.train_first_turn:
            raise ValueError("schedule.train_first_turn: there is only one turn, so nothing would be trained")
        self._check_agents(agents)
        updates = [stage.update for stage in self.curriculum]
        if updates != sorted(set(updates)) or (updates and updates[0] < 2):
            raise ValueError(f"schedule.curriculum: expected rising updates from 2 on (1 is 'task'), got {updates}")
        growth = self.growth
        if growth is not None and not (growth.options and all(growth.options.values())):
            raise ValueError(f"schedule.growth: expected options with lists of values, got {growth}")
        if self.round_robin is not None and not self.round_robin.agents:
            return replace(self, round_robin=replace(self.round_robin, agents=list(agents)))
        return self

    def _check_agents(self, agents: tuple[str, ...]) -> None:
        swap, turn, pool = self.swap, self.round_robin, self.opponent_pool
        if swap is not None and (len(set(swap.agents)) < 2 or not set(swap.agents) <= set(agents)):
            raise ValueError(f"schedule.swap: expected at least two agents of {list(agents)}, got {swap}")
        if turn is not None and not set(turn.agents) <= set(agents):
            raise ValueError(f"schedule.round_robin: expected agents of {list(agents)}, got {turn}")
        if pool is not None and not {pool.agent, pool.of} <= set(agents):
            raise ValueError(f"schedule.opponent_pool: expected agent and of among {list(agents)}, got {pool}")
        if pool is not None and swap is not None and pool.agent in swap.agents:
            raise ValueError(f"schedule: {pool.agent!r} is in swap and in opponent_pool; remove it from one of them")

    def plan(self, update: int) -> Plan:
        """Return the plan of ``update``, counted from 1."""
        frozen = {f.agent for f in self.freeze if f.first <= update and (f.last is None or update <= f.last)}
        if self.round_robin is not None:
            turn = (update - 1) // self.round_robin.every % len(self.round_robin.agents)
            frozen |= set(self.round_robin.agents) - {self.round_robin.agents[turn]}
        weights_from = {}
        if self.swap is not None:
            shift = (update - 1) // self.swap.every % len(self.swap.agents)
            weights_from = dict(zip(self.swap.agents, self.swap.agents[shift:] + self.swap.agents[:shift], strict=True))
        never = frozenset() if self.train_first_turn else frozenset([0])
        return Plan(self._turns(update), never, frozenset(frozen), update <= self.critic_warmup, weights_from)

    def _turns(self, update: int) -> frozenset[int] | None:
        done = update - 1
        for span in chain(self.opening, cycle(self.cycle)):
            if done < span.updates:
                return frozenset(turn - 1 for turn in span.turns)
            done -= span.updates
        return None


def one_turn_at_a_time(turns: int, opening: int = 20, block: int = 40) -> Schedule:
    """Return MAPoRL's published schedule, which trains one turn at a time.

    It trains turn 2 for ``opening`` updates. Then it trains the last turn, the turn before it, and so on down to turn
    2, each for a block of ``block`` updates, and starts again from the last turn. The first turn is never trained.

    >>> [sorted(one_turn_at_a_time(3).plan(u).turns) for u in (1, 20, 21, 60, 61, 100, 101)]
    [[1], [1], [2], [2], [1], [1], [2]]

    Raises:
        ValueError: there are fewer than 2 turns.
    """
    if turns < 2:
        raise ValueError(f"one turn at a time: needs at least 2 turns, because the first is never trained; got {turns}")
    later = [Span(block, [turn]) for turn in range(turns, 1, -1)]
    return Schedule(opening=[Span(opening, [2])], cycle=later, train_first_turn=False)
