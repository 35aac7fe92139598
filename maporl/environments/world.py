"""Opens, uses, forks and closes the environments of dialogues, and carries out calls of tools. Imports no torch."""

import atexit
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from maporl.config.call_options import CallLimits
from maporl.config.imports import told, unknown
from maporl.environments.base import Environment, EnvironmentLost, Tool, Toolbox, may_pay
from maporl.environments.rooms import (
    EnvironmentFailure,
    EnvironmentSpec,
    Room,
    Rooms,
    call_payment,
    environment_seed,
    failure,
    guarded,
    payments,
    raised,
    read_by,
    readable,
    shown,
    texts_by_agent,
)
from maporl.environments.workers import Job, Outcome, Workers
from maporl.errors import ConfigError, Fault
from maporl.event_loop import awaited
from maporl.text import printable
from maporl.types import Act, Dialogue, Example, Result
from trl_ext.copies import own_copy
from trl_ext.process.messages import tell
from trl_ext.process.random_states import forked_generators

DEFAULT_SECONDS = CallLimits().seconds
"""The most seconds of a call that a protocol makes for an agent without tools of its own."""
_worlds: "weakref.WeakSet[World]" = weakref.WeakSet()


@atexit.register
def _close_worlds() -> None:
    """Close what is still open when the interpreter ends."""
    for world in list(_worlds):
        world.close()


class World:
    """The tools and environments of a run, in one process. It owns every environment that it opens.

    Args:
        tools: the plain tools by name.
        environments: the environments by name.
        toolboxes: what holds the processes of tools.
        seconds: the most seconds of a call of some of the ``tools``.
        groups: the tools of each section of the configuration, by the section's name.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool] | None = None,
        environments: Mapping[str, EnvironmentSpec] | None = None,
        toolboxes: Sequence[Toolbox] = (),
        seconds: Mapping[str, float] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ):
        self.tools, self.environments, self.toolboxes = dict(tools or {}), dict(environments or {}), list(toolboxes)
        self.workers = Workers()
        self.seconds, self.groups = dict(seconds or {}), dict(groups or {})
        self.counts: Counter[str] = Counter()
        """What happened since :meth:`take_counts`: calls, failures, environments opened, closed and lost."""
        self.keeps_until_scored = False
        """Whether environments stay open after their dialogue's end until :meth:`drop_scored`, because rewards read
        them."""
        self._open: list[Rooms] = []
        self._ended: dict[int, Rooms] = {}
        self._alone = _Alone()
        self.offers = Offers(self.tools, self.environments)
        _worlds.add(self)

    # -- opening and closing ------------------------------------------------------------------------------------------

    def begin(self, rooms: Sequence[Rooms]) -> None:
        """Open the environments of dialogues that have not begun, all at once.

        Raises:
            EnvironmentFailure: one cannot be made or reset, or took too long.
        """
        for name, spec in self.environments.items():
            waiting = [r for r in rooms if name not in r.open]
            for start in range(0, len(waiting), spec.options.at_once):
                self._open_batch(spec, waiting[start : start + spec.options.at_once])

    def _open_batch(self, spec: EnvironmentSpec, rooms: Sequence[Rooms]) -> None:
        jobs = [
            [Job(partial(self.open_room, spec, r), spec.options.open_seconds, f"environment {spec.name!r}")]
            for r in rooms
        ]
        outcomes = self.workers.run(jobs)
        for r, (outcome,) in zip(rooms, outcomes, strict=True):
            if outcome.value is not None:
                r.open[spec.name] = outcome.value
                self.counts[f"env/{spec.name}/opened"] += 1
        self._open += [r for r in rooms if r.open and not any(r is other for other in self._open)]
        for r, (outcome,) in zip(rooms, outcomes, strict=True):
            where = f"environment {spec.name!r}, question {r.example.id}, seed {environment_seed(r.key, spec.name)}"
            if outcome.late:
                raise EnvironmentFailure(f"{where}: it took over {spec.options.open_seconds:g} s; raise open_seconds")
            if outcome.error is not None:
                raise failure(outcome.error, f"{where}: it cannot begin")

    def open_room(self, spec: EnvironmentSpec, rooms: Rooms) -> Room:
        """Make an environment and begin it.

        Raises:
            TimeoutError: it was ready too late. What the environment itself raises is raised too.
        """
        begun = time.monotonic()
        world = spec.make()
        seed = environment_seed(rooms.key, spec.name)
        example = rooms.example
        row = {**example.meta, "id": example.id, "question": example.question, "answer": example.answer}
        row["prompt"] = [dict(message) for message in rooms.prompt]
        try:
            said = texts_by_agent(self._alone.run(world, lambda: world.reset(seed, row)), spec)
            if time.monotonic() - begun > spec.options.open_seconds:  # nobody waits for it any more
                raise TimeoutError(f"it was ready after {time.monotonic() - begun:.1f} s")
        except BaseException:
            world.close()
            raise
        return Room(spec, world, seed, row, said)

    def finish(self, rooms: Rooms) -> dict[str, dict[str, float]]:
        """Return what the environments of a dialogue pay at its end, by environment and agent, and close them.

        One that cannot answer any more pays nothing and is lost (:attr:`Rooms.lost`). If rewards read environments,
        they are closed after scoring (:meth:`drop_scored`).

        Raises:
            EnvironmentFailure: a reward cannot be computed, or is not a finite number.
        """
        paid = {}
        try:
            for name, room in rooms.open.items():
                if not room.lost and not room.closed:
                    where = f"{rooms.where(name)}: reward()"
                    value = guarded(partial(self._reward, rooms, room), where)
                    paid[name] = payments(value, room.spec, where)
        except BaseException:
            self.drop(rooms)
            raise
        if self.keeps_until_scored and rooms.open:
            self._open = [r for r in self._open if r is not rooms]
            self._ended[id(rooms.open)] = rooms
        else:
            self.drop(rooms)
        return paid

    def drop_scored(self, dialogues: Sequence[Dialogue]) -> None:
        """Close the environments of dialogues that have their rewards, if they stayed open for these."""
        for dialogue in dialogues:
            rooms = self._ended.pop(id(dialogue.environments), None)
            if rooms is not None:
                self.drop(rooms)

    def _reward(self, rooms: Rooms, room: Room) -> Any:
        try:
            return self._alone.run(room.world, room.world.reward)
        except EnvironmentLost as error:
            self._lose(rooms, room, f"reward(): {error}")
            return None

    def keep(self, rooms: Rooms) -> None:
        """Own the environments of a dialogue that was forked."""
        self._open.append(rooms)

    def drop(self, rooms: Rooms) -> None:
        """Close the environments of a dialogue that does not go on."""
        self._open = [r for r in self._open if r is not rooms]
        open_rooms = {name: room for name, room in rooms.open.items() if not room.closed}
        if not open_rooms:
            return
        for room in open_rooms.values():
            room.closed = True
        jobs = [
            [Job(room.world.close, room.spec.options.close_seconds, f"environment {name!r}: close()")]
            for name, room in open_rooms.items()
        ]
        for name, (outcome,) in zip(open_rooms, self.workers.run(jobs), strict=True):
            self.counts[f"env/{name}/closed"] += 1
            if outcome.late:
                open_rooms[name].world.abandon()
            if outcome.late or outcome.error is not None:
                self.counts[f"env/{name}/close_failed"] += 1
                why = "took too long" if outcome.late else told(outcome.error)  # type: ignore[arg-type]
                tell(printable(f"environment {name!r}: close() failed: {why}"))

    def drop_these(self, dialogues: Sequence[Rooms]) -> None:
        """Close the environments of those of ``dialogues`` that are in progress."""
        ids = {id(rooms) for rooms in dialogues}
        for rooms in [rooms for rooms in self._open if id(rooms) in ids]:
            self.drop(rooms)

    def drop_all(self) -> None:
        """Close the environments of all dialogues in progress."""
        self.drop_these(self._open)

    def close(self) -> None:
        """Close everything. The run is over."""
        self.drop_all()
        for rooms in list(self._ended.values()):
            self.drop(rooms)
        self._ended = {}
        toolboxes, self.toolboxes = self.toolboxes, []
        for toolbox in toolboxes:
            toolbox.close()
        self.workers.close()

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(self, acts: Sequence[tuple[Rooms, int, Act]], seconds: Mapping[str, float]) -> list[Result]:
        """Carry out acts of many dialogues, each with the number of its step. Return their results in order.

        Acts in one environment of a dialogue run one after the other, and all others at the same time. ``seconds`` is
        the most time of a call of each agent.

        Raises:
            TooManyLeft: too many calls took too long and cannot be ended.
        """
        results: list[Result | None] = [None] * len(acts)
        rows: dict[tuple, list[int]] = {}
        for number, (rooms, _, act) in enumerate(acts):
            refused = self._refused(rooms, act)
            if refused is not None:
                results[number] = refused
            elif act.place is not None:
                rows.setdefault((id(rooms), act.place), []).append(number)
            else:
                ordered = self.tools[act.name].ordered
                rows.setdefault((id(rooms), act.name) if ordered else (number,), []).append(number)
        jobs = [[self._job(*acts[number], seconds) for number in row] for row in rows.values()]
        for row, outcomes in zip(rows.values(), self.workers.run(jobs), strict=True):
            for number, outcome in zip(row, outcomes, strict=True):
                results[number] = self.result_of(*acts[number], outcome)
        for (_, _, act), result in zip(acts, results, strict=True):
            assert result is not None
            self.counts[f"tools/{act.name}/calls"] += 1
            self.counts[f"tools/{act.name}/failed"] += result.error is not None
        return [result for result in results if result is not None]

    def _refused(self, rooms: Rooms, act: Act) -> Result | None:
        if act.place is None:
            return None
        room = rooms.open[act.place]
        if room.lost:
            return Result("it does not answer any more", error="lost")
        if guarded(room.world.over, f"{rooms.where(act.place)}: over()"):
            return Result("it is over", error="over", done=True)
        if len(room.log) >= room.spec.options.calls:
            return Result(f"at most {room.spec.options.calls} calls are allowed in it", error="limit")
        return None

    def _job(self, rooms: Rooms, step: int, act: Act, seconds: Mapping[str, float]) -> Job:
        if act.place is None:
            tool = self.tools[act.name]
            most = min(seconds.get(act.agent, DEFAULT_SECONDS), self.seconds.get(act.name, math.inf))
            return Job(lambda: read_by(readable, tool.run(**own_copy(act.arguments))), most, f"tool {act.name}")
        room = rooms.open[act.place]
        most = min(seconds.get(act.agent, DEFAULT_SECONDS), room.spec.options.seconds)
        return Job(lambda: self.call(room, step, act), most, f"environment {act.place!r}: {act.name}")

    def call(self, room: Room, step: int, act: Act) -> Any:
        """Call a tool of an environment and log what it returned. Coroutines are awaited by the workers."""
        value = self._alone.run(room.world, lambda: room.tool(act.agent, act.name).run(**own_copy(act.arguments)))
        return read_by(partial(self._logged, room, step, act), value)

    def _logged(self, room: Room, step: int, act: Act, value: Any) -> Result:
        result = readable(value)
        room.log.append((step, act.agent, act.name, act.arguments, result.text))
        return result

    def result_of(self, rooms: Rooms, step: int, act: Act, outcome: Outcome) -> Result:
        """Return the outcome of a call as a result. An environment that did not answer in time is lost.

        Raises:
            EnvironmentFailure: the call was paid something else than a finite number.
            KeyboardInterrupt: the call raised it.
        """
        room = None if act.place is None else rooms.open[act.place]
        if outcome.late or not outcome.started:
            if room is None:
                self.counts["tools/timeouts"] += 1
                return Result(f"no answer within {outcome.seconds:g} s", error="timeout", seconds=outcome.seconds)
            self._lose(rooms, room, f"{act.name} did not answer within {outcome.seconds:g} s")
            return Result("it does not answer any more", error="lost", seconds=outcome.seconds)
        if outcome.error is not None:
            if isinstance(outcome.error, KeyboardInterrupt):
                raise outcome.error
            if isinstance(outcome.error, MemoryError) and room is not None:  # nobody knows what state it is in
                self._lose(rooms, room, f"{act.name} ran out of memory")
                return Result("it does not answer any more", error="lost", seconds=outcome.seconds)
            result = raised(outcome.error)
            if room is not None:
                room.log.append((step, act.agent, act.name, act.arguments, result.text))
            return replace(result, seconds=outcome.seconds)
        result = outcome.value
        if result.error == "lost" and room is not None:
            self._lose(rooms, room, f"{act.name}: {result.text}")
        return replace(result, reward=call_payment(rooms, act, result.reward), seconds=outcome.seconds)

    def _lose(self, rooms: Rooms, room: Room, why: str) -> None:
        """Mark an environment as lost, or stop the run."""
        if room.lost:
            return
        room.lost = True
        room.world.abandon()
        self.counts[f"env/{room.spec.name}/lost"] += 1
        if room.spec.options.on_lost == "stop":
            raise EnvironmentFailure(f"{rooms.where(room.spec.name)}: {why}; raise seconds, or set on_lost: drop")

    def renew(self) -> None:
        """Let toolboxes start again what has died. This is called before each update."""
        for toolbox in self.toolboxes:
            toolbox.renew()

    def check_lost(self, dialogues: Sequence[Dialogue]) -> None:
        """Check that not too many of an update's dialogues were lost.

        Raises:
            EnvironmentFailure: more were lost than ``lost_at_most`` of an environment allows.
        """
        for name, spec in self.environments.items():
            lost = sum(name in dialogue.lost for dialogue in dialogues)
            if lost > spec.options.lost_at_most * len(dialogues):
                raise EnvironmentFailure(
                    f"environment {name!r}: it did not answer within {spec.options.seconds:g} s in {lost} of "
                    f"{len(dialogues)} dialogues; mend it, raise environments.{name}.seconds, or raise lost_at_most"
                )

    # -- counting -----------------------------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call of this, as metrics."""
        counts, self.counts = self.counts, Counter()
        return {name: float(count) for name, count in counts.items()}

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave what happens inside out of the counts. Metrics of an update are then those of its own dialogues."""
        before = Counter(self.counts)
        try:
            yield
        finally:
            self.counts = before


class _Alone:
    """Runs code of environments. Instances of a class that share state of the process (random generators, the working
    folder) take turns, and leave it as it was."""

    def __init__(self) -> None:
        self._locks: dict[type, threading.Lock] = {}

    def run(self, world: Environment, code: Callable[[], Any]) -> Any:
        """Return what ``code`` of ``world`` returns. A coroutine is awaited here if its instances take turns."""
        if world.concurrent:
            return code()
        with self._locks.setdefault(type(world), threading.Lock()), forked_generators():
            folder = os.getcwd()
            try:
                return awaited(code())
            finally:
                os.chdir(folder)


class Offers:
    """The tools that agents may call, and the rewards that may occur.

    Args:
        tools: the plain tools by name.
        environments: the environments by name.
    """

    def __init__(self, tools: Mapping[str, Tool], environments: Mapping[str, EnvironmentSpec]):
        self.tools, self.environments = tools, environments
        self._known: dict[str, dict[str, list[Tool]]] = {}

    def tools_of(self, environment: str, agent: str) -> list[Tool]:
        """Return the tools that an environment gives ``agent``, of an instance that is never reset.

        Raises:
            EnvironmentFailure: it cannot be made, or its tools cannot be read.
        """
        by_agent = self._known.setdefault(environment, {})
        if not by_agent:
            spec = self.environments[environment]
            example = guarded(spec.make, f"environment {environment!r} cannot be made")
            try:
                for name in spec.agents:
                    made = guarded(partial(_tools_of, example, name), f"environment {environment!r}: tools({name!r})")
                    by_agent[name] = made
            finally:
                guarded(example.close, f"environment {environment!r}: close() of one that never began")
        return by_agent.get(agent, [])

    def forks(self, environment: str) -> str:
        """Return how an environment can be forked: "copy", "replay" or "no"."""
        spec = self.environments[environment]
        made = guarded(spec.make, f"environment {environment!r} cannot be made")
        guarded(made.close, f"environment {environment!r}: close() of one that never began")
        return made.forks

    def unpaid(self, weighed: Collection[str]) -> Iterator[Fault]:
        """Yield the environments and tools with names among the ``weighed`` rewards that pay nothing to anybody, so
        that their weights would change nothing.

        Raises:
            EnvironmentFailure: one of them cannot be made.
        """
        for name, tool in self.tools.items():
            if name in weighed and not may_pay(tool.run):
                what = f"the tool {name!r} pays nothing: it returns no maporl.Result"
                remedy = f"remove {name!r} from the rewards, or let the tool return Result(text, reward=...)"
                yield Fault(f"reward: {name}", what, remedy)
        for name, spec in self.environments.items():
            if name not in weighed or not spec.agents:
                continue
            made = guarded(spec.make, f"environment {name!r} cannot be made")
            try:
                pays = guarded(partial(made.can_pay, spec.agents), f"environment {name!r}: can_pay()")
            finally:
                guarded(made.close, f"environment {name!r}: close() of one that never began")
            if not pays:
                yield Fault(
                    f"reward: {name}",
                    f"the environment {name!r} ({type(made.instance).__name__}) pays nothing: it has no reward, and "
                    "its tools return none",
                    f"remove {name!r} from the rewards, or give its class reward() (get_reward() in a class for TRL), "
                    f"or set environments.{name}.reward to the attribute that has it",
                )

    def rewards(self) -> frozenset[str]:
        """Return the names of the rewards that environments and tools may pay."""
        return frozenset([*self.environments, *self.tools])

    def must_have(self, act: Act) -> None:
        """Check that the run has the tool of a protocol's act.

        Raises:
            ConfigError: it does not.
        """
        names: list[str] = list(self.tools)
        if act.place is not None:
            if act.place not in self.environments:
                raise ConfigError(f"the protocol acts in an environment: {unknown(act.place, self.environments)}")
            names = [tool.name for tool in self.tools_of(act.place, act.agent)]
        if act.name not in names:
            raise ConfigError(f"the protocol calls a tool for agent {act.agent!r}: {unknown(act.name, names)}")


def _tools_of(environment: Environment, agent: str) -> list[Tool]:
    return list(environment.tools(agent))


def fork_rooms(world: World, rooms: Rooms, steps: int, now: bool, heard: set[str]) -> Rooms:
    """Return a fork of a dialogue's environments, as they were after ``steps`` steps. ``now`` is the present.

    ``heard`` has the agents that had spoken by then.

    Raises:
        EnvironmentFailure: an environment cannot be forked there, or does not replay.
    """
    fork = Rooms(rooms.example, rooms.key, rooms.prompt, heard={(name, a) for name in rooms.open for a in heard})
    for name, room in rooms.open.items():
        log = [entry for entry in room.log if entry[0] < steps]
        if now and log and not room.closed and room.world.forks == "copy":
            copied = guarded(room.world.fork, f"environment {name!r}: fork()")
            fork.open[name] = Room(room.spec, copied, room.seed, room.row, room.said, log=log)
        else:
            fork.open[name] = _replayed(world, room, fork, log)
        world.counts[f"env/{name}/opened"] += 1
    if fork.open:
        world.keep(fork)
    return fork


def _replayed(world: World, room: Room, rooms: Rooms, log: list[tuple]) -> Room:
    name = room.spec.name
    if log and room.world.forks == "no":
        raise EnvironmentFailure(
            f"environment {name!r}: it can be neither copied nor replayed, so a dialogue in it cannot be forked after "
            "its first call; use branching.how: independent or fork_first, or set forks: replay if reset(seed) "
            "decides everything"
        )
    again = world.open_room(room.spec, rooms)
    try:
        _repeat(world, again, log)
    except BaseException:
        again.world.close()
        raise
    return again


def _repeat(world: World, room: Room, log: list[tuple]) -> None:
    """Make the calls of ``log`` in a new environment, and check that they return the same."""
    name, rooms = room.spec.name, Rooms(Example("", "", ""), (), [])
    rooms.open[name] = room
    for number, (step, agent, tool, arguments, text) in enumerate(log):
        act = Act(agent, tool, arguments, 0, name)
        ((outcome,),) = world.workers.run(
            [[Job(partial(world.call, room, step, act), room.spec.options.seconds, name)]]
        )
        now = world.result_of(rooms, step, act, outcome).text
        if now != text:
            raise EnvironmentFailure(
                f"environment {name!r} does not replay: call {number + 1}, {tool}({shown(arguments)}), gave "
                f"{now!r:.80} after {text!r:.80}; set forks: no, or make reset(seed) decide everything"
            )
