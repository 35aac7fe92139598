"""Opens, uses, forks and closes the environments of dialogues, and carries out calls of tools. Imports no torch."""

import atexit
import hashlib
import inspect
import math
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from maporl.config.call_options import CallLimits
from maporl.config.imports import told, unknown
from maporl.config.schema import EnvironmentSection
from maporl.environments.base import Environment, Tool, Toolbox, as_result
from maporl.environments.workers import Job, Outcome, Workers
from maporl.errors import ConfigError
from maporl.text import printable, well_formed
from maporl.types import Act, Dialogue, Example, Message, Result

DEFAULT_SECONDS = CallLimits().seconds
"""The most seconds of a call that a protocol makes for an agent without tools of its own."""
LARGEST = 2**20
"""Most characters of a result that are looked at."""


_worlds: "weakref.WeakSet[World]" = weakref.WeakSet()


@atexit.register
def _close_worlds() -> None:
    """Close what is still open when the interpreter ends."""
    for world in list(_worlds):
        world.close()


class EnvironmentFailure(ConfigError):
    """An environment's own code failed: its construction, reset, fork or reward."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment of a run.

    Args:
        name: its name.
        make: makes an instance, without arguments.
        agents: the agents that act in it or watch it, in order.
        options: its limits, and what happens if it does not answer in time. ``use``, ``options`` and ``agents`` of
            the section are not read here.
        part: the class or the function with which ``make`` makes one.
    """

    name: str
    make: Callable[[], Environment]
    agents: tuple[str, ...]
    options: EnvironmentSection
    part: Any = None


@dataclass
class _Room:
    """One opened environment. ``log`` has (step, agent, tool, arguments, text) of each call."""

    spec: EnvironmentSpec
    world: Environment
    seed: int
    row: dict[str, Any]
    said: dict[str, str]
    tools: dict[str, dict[str, Tool]] = field(default_factory=dict)
    log: list[tuple[int, str, str, dict[str, Any], str]] = field(default_factory=list)
    lost: bool = False
    closed: bool = False

    def tool(self, agent: str, name: str) -> Tool:
        if agent not in self.tools:
            self.tools[agent] = {tool.name: tool for tool in self.world.tools(agent)}
        return self.tools[agent][name]


@dataclass
class Rooms:
    """The environments of one dialogue, by name. ``heard`` has the agents that have been told how each one began."""

    example: Example
    key: tuple
    prompt: list[Message]
    open: dict[str, _Room] = field(default_factory=dict)
    heard: set[tuple[str, str]] = field(default_factory=set)

    def news(self, agent: str) -> str:
        """Return what ``agent`` is told before its next turn: how its environments began, and what is new there."""
        parts = []
        for name, room in self.open.items():
            if agent not in room.spec.agents:
                continue
            if (name, agent) not in self.heard:
                self.heard.add((name, agent))
                parts.append(room.said.get(agent, ""))
            if told_now := room.world.observe(agent):
                parts.append(told_now)
        return "".join(parts)

    def state(self) -> str | None:
        """Return the name of the situation, from the environments that name it."""
        names = [state for room in self.open.values() if (state := room.world.state()) is not None]
        return "; ".join(names) or None

    @property
    def lost(self) -> list[str]:
        """The names of the environments that did not answer in time."""
        return [name for name, room in self.open.items() if room.lost]


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
        self._open: list[Rooms] = []
        self._locks: dict[type, threading.Lock] = {}
        self._offered: dict[str, dict[str, list[Tool]]] = {}
        _worlds.add(self)

    # -- what agents are offered --------------------------------------------------------------------------------------

    def offered(self, environment: str, agent: str) -> list[Tool]:
        """Return the tools that an environment gives ``agent``, of an instance that is never reset.

        Raises:
            EnvironmentFailure: it cannot be made, or its tools cannot be read.
        """
        known = self._offered.setdefault(environment, {})
        if not known:
            spec = self.environments[environment]
            example = _guarded(spec.make, f"environment {environment!r} cannot be made")
            try:
                for name in spec.agents:
                    made = _guarded(partial(_tools_of, example, name), f"environment {environment!r}: tools({name!r})")
                    known[name] = made
            finally:
                example.close()
        return known.get(agent, [])

    def forks(self, environment: str) -> str:
        """Return how an environment can be forked: "copy", "replay" or "no"."""
        spec = self.environments[environment]
        made = _guarded(spec.make, f"environment {environment!r} cannot be made")
        made.close()
        return made.forks

    def rewards(self) -> frozenset[str]:
        """Return the names of the rewards that environments and tools may pay."""
        return frozenset([*self.environments, *self.tools])

    def must_have(self, act: Act) -> None:
        """Check that the run has the tool of a protocol's act.

        Raises:
            ConfigError: it does not.
        """
        known: list[str] = list(self.tools)
        if act.place is not None:
            if act.place not in self.environments:
                raise ConfigError(f"the protocol acts in an environment: {unknown(act.place, self.environments)}")
            known = [tool.name for tool in self.offered(act.place, act.agent)]
        if act.name not in known:
            raise ConfigError(f"the protocol calls a tool for agent {act.agent!r}: {unknown(act.name, known)}")

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
            [Job(partial(self._opened, spec, r), spec.options.open_seconds, f"environment {spec.name!r}")]
            for r in rooms
        ]
        outcomes = self.workers.run(jobs)
        for r, (outcome,) in zip(rooms, outcomes, strict=True):
            if outcome.value is not None:
                r.open[spec.name] = outcome.value
                self.counts[f"env/{spec.name}/opened"] += 1
        self._open += [r for r in rooms if r.open and not any(r is known for known in self._open)]
        for r, (outcome,) in zip(rooms, outcomes, strict=True):
            where = f"environment {spec.name!r}, question {r.example.id}, seed {_seed(r.key, spec.name)}"
            if outcome.late:
                raise EnvironmentFailure(
                    f"{where}: it was not ready after {spec.options.open_seconds:g} s; raise open_seconds, or lower at_once"
                )
            if outcome.error is not None:
                raise _failure(outcome.error, f"{where}: it cannot begin")

    def _opened(self, spec: EnvironmentSpec, rooms: Rooms) -> _Room:
        begun = time.monotonic()
        world = spec.make()
        seed = _seed(rooms.key, spec.name)
        example = rooms.example
        row = {**example.meta, "id": example.id, "question": example.question, "answer": example.answer}
        row["prompt"] = [dict(message) for message in rooms.prompt]
        try:
            said = self._alone(world, lambda: world.reset(seed, row))
            if time.monotonic() - begun > spec.options.open_seconds:  # nobody waits for it any more
                raise TimeoutError(f"it was ready after {time.monotonic() - begun:.1f} s")
        except BaseException:
            world.close()
            raise
        return _Room(spec, world, seed, row, _by_agent(said, spec))

    def finish(self, rooms: Rooms) -> dict[str, dict[str, float]]:
        """Return what the environments of a dialogue pay at its end, by environment and agent, and close them.

        Raises:
            EnvironmentFailure: a reward cannot be computed, or is not a finite number.
        """
        paid = {}
        try:
            for name, room in rooms.open.items():
                if not room.lost and not room.closed:
                    where = f"environment {name!r}, question {rooms.example.id}, seed {room.seed}: reward()"
                    value = _guarded(partial(self._alone, room.world, room.world.reward), where)
                    paid[name] = _payments(value, room.spec, where)
        finally:
            self.drop(rooms)
        return paid

    def drop(self, rooms: Rooms) -> None:
        """Close the environments of a dialogue that does not go on."""
        self._open = [r for r in self._open if r is not rooms]
        open_rooms = {name: room for name, room in rooms.open.items() if not room.closed}
        for room in open_rooms.values():
            room.closed = True
        jobs = [
            [Job(room.world.close, room.spec.options.close_seconds, f"environment {name!r}: close()")]
            for name, room in open_rooms.items()
        ]
        for name, (outcome,) in zip(open_rooms, self.workers.run(jobs), strict=True):
            self.counts[f"env/{name}/closed"] += 1
            if outcome.late or outcome.error is not None:
                self.counts[f"env/{name}/close_failed"] += 1
                why = "took too long" if outcome.late else told(outcome.error)  # type: ignore[arg-type]
                print(printable(f"environment {name!r}: close() failed: {why}"), file=sys.stderr)

    def drop_all(self) -> None:
        """Close the environments of all dialogues."""
        for rooms in list(self._open):
            self.drop(rooms)

    def close(self) -> None:
        """Close everything. The run is over."""
        self.drop_all()
        toolboxes, self.toolboxes = self.toolboxes, []
        for toolbox in toolboxes:
            toolbox.close()

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
                results[number] = self._result(*acts[number], outcome)
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
        if room.world.over():
            return Result("it is over", error="over", done=True)
        if len(room.log) >= room.spec.options.calls:
            return Result(f"at most {room.spec.options.calls} calls are allowed in it", error="limit")
        return None

    def _job(self, rooms: Rooms, step: int, act: Act, seconds: Mapping[str, float]) -> Job:
        if act.place is None:
            tool = self.tools[act.name]
            most = min(seconds.get(act.agent, DEFAULT_SECONDS), self.seconds.get(act.name, math.inf))
            return Job(lambda: tool.run(**act.arguments), most, f"tool {act.name}")
        room = rooms.open[act.place]
        most = min(seconds.get(act.agent, DEFAULT_SECONDS), room.spec.options.seconds)
        return Job(lambda: self._called(room, step, act), most, f"environment {act.place!r}: {act.name}")

    def _called(self, room: _Room, step: int, act: Act) -> Any:
        """Call a tool of an environment and log what it returned. Coroutines are awaited by the workers."""
        value = self._alone(room.world, lambda: room.tool(act.agent, act.name).run(**act.arguments))
        if inspect.isawaitable(value):

            async def awaited() -> Any:
                return self._logged(room, step, act, await value)

            return awaited()
        return self._logged(room, step, act, value)

    def _logged(self, room: _Room, step: int, act: Act, value: Any) -> Result:
        result = _readable(value)
        room.log.append((step, act.agent, act.name, act.arguments, result.text))
        return result

    def _result(self, rooms: Rooms, step: int, act: Act, outcome: Outcome) -> Result:
        """Return the outcome of a call as a result. An environment that did not answer in time is lost."""
        room = None if act.place is None else rooms.open[act.place]
        if outcome.late or not outcome.started:
            if room is None:
                self.counts["tools/timeouts"] += 1
                return Result(f"no answer within {outcome.seconds:g} s", error="timeout", seconds=outcome.seconds)
            self._lose(rooms, room, f"{act.name} did not answer within {outcome.seconds:g} s")
            return Result("it does not answer any more", error="lost", seconds=outcome.seconds)
        if outcome.error is not None:
            if isinstance(outcome.error, KeyboardInterrupt | MemoryError):
                raise outcome.error
            text = " ".join(f"{type(outcome.error).__name__}: {outcome.error}".split())[:300]
            if room is not None:
                room.log.append((step, act.agent, act.name, act.arguments, text))
            return Result(text, error="raised", seconds=outcome.seconds)
        result = _readable(outcome.value)
        if result.error == "lost" and room is not None:
            self._lose(rooms, room, f"{act.name}: {result.text}")
        return Result(
            result.text, result.value, result.error, result.reward, result.done, outcome.seconds, result.left_out
        )

    def _lose(self, rooms: Rooms, room: _Room, why: str) -> None:
        """Mark an environment as lost, or stop the run."""
        name = room.spec.name
        if room.lost:
            return
        room.lost = True
        self.counts[f"env/{name}/lost"] += 1
        if room.spec.options.on_lost == "stop":
            raise EnvironmentFailure(
                f"environment {name!r}, question {rooms.example.id}, seed {room.seed}: {why}; raise seconds, or set on_lost: drop"
            )

    # -- forking ------------------------------------------------------------------------------------------------------

    def fork(self, rooms: Rooms, steps: int, now: bool, heard: set[str]) -> Rooms:
        """Return a fork of a dialogue's environments, as they were after ``steps`` steps. ``now`` is the present.

        ``heard`` has the agents that had spoken by then.

        Raises:
            EnvironmentFailure: an environment cannot be forked there, or does not replay.
        """
        fork = Rooms(rooms.example, rooms.key, rooms.prompt, heard={(name, a) for name in rooms.open for a in heard})
        for name, room in rooms.open.items():
            log = [entry for entry in room.log if entry[0] < steps]
            if now and log and not room.closed and room.world.forks == "copy":
                copied = _guarded(room.world.fork, f"environment {name!r}: fork()")
                fork.open[name] = _Room(room.spec, copied, room.seed, room.row, room.said, log=log)
            else:
                fork.open[name] = self._replayed(room, fork, log)
            self.counts[f"env/{name}/opened"] += 1
        if fork.open:
            self._open.append(fork)
        return fork

    def _replayed(self, room: _Room, rooms: Rooms, log: list[tuple]) -> _Room:
        name = room.spec.name
        if log and room.world.forks == "no":
            raise EnvironmentFailure(
                f"environment {name!r}: it can be neither copied nor replayed, so a dialogue in it cannot be forked after its "
                "first call; use branching.how: independent or fork_first, or set forks: replay if reset(seed) decides everything"
            )
        again = self._opened(room.spec, rooms)
        try:
            self._repeat(again, log)
        except BaseException:
            again.world.close()
            raise
        return again

    def _repeat(self, room: _Room, log: list[tuple]) -> None:
        """Make the calls of ``log`` in a new environment, and check that they return the same."""
        name, rooms = room.spec.name, Rooms(Example("", "", ""), (), [])
        rooms.open[name] = room
        for number, (step, agent, tool, arguments, text) in enumerate(log):
            act = Act(agent, tool, arguments, 0, name)
            ((outcome,),) = self.workers.run(
                [[Job(partial(self._called, room, step, act), room.spec.options.seconds, name)]]
            )
            now = self._result(rooms, step, act, outcome).text
            if now != text:
                raise EnvironmentFailure(
                    f"environment {name!r} does not replay: call {number + 1}, {tool}({_shown(arguments)}), gave {now!r:.80} "
                    f"after {text!r:.80}; set forks: no, or make reset(seed) decide everything"
                )

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
                    f"environment {name!r}: it did not answer within {spec.options.seconds:g} s in {lost} of {len(dialogues)} "
                    f"dialogues; mend it, raise environments.{name}.seconds, or raise lost_at_most"
                )

    # -- counting -----------------------------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call of this, as metrics."""
        counts, self.counts = self.counts, Counter()
        return {name: float(count) for name, count in counts.items()}

    def _alone(self, world: Environment, run: Callable[[], Any]) -> Any:
        """Run code of an environment. Instances that share hidden state take turns, and leave global state as it was."""
        if world.concurrent:
            return run()
        lock = self._locks.setdefault(type(world), threading.Lock())
        with lock:
            kept, folder = random.getstate(), os.getcwd()
            try:
                return run()
            finally:
                random.setstate(kept)
                os.chdir(folder)


def _tools_of(environment: Environment, agent: str) -> list[Tool]:
    return list(environment.tools(agent))


def _seed(key: tuple, name: str) -> int:
    digest = hashlib.sha256(repr((*key, "environment", name)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _by_agent(said: Any, spec: EnvironmentSpec) -> dict[str, str]:
    """Return what an environment said at its beginning, by agent."""
    if said is None:
        return {}
    if isinstance(said, str):
        return dict.fromkeys(spec.agents, said)
    if isinstance(said, Mapping) and all(isinstance(text, str) for text in said.values()):
        unknown = [agent for agent in said if agent not in spec.agents]
        if not unknown:
            return dict(said)
        raise EnvironmentFailure(f"reset told {unknown[0]!r:.40} something, but its agents are {list(spec.agents)}")
    raise EnvironmentFailure(f"reset returned {said!r:.80}, expected a text, texts by agent, or None")


def _payments(value: Any, spec: EnvironmentSpec, where: str) -> dict[str, float]:
    """Return what an environment paid, by agent."""
    if value is None:
        return {}
    paid = dict(value) if isinstance(value, Mapping) else dict.fromkeys(spec.agents, value)
    for agent, amount in paid.items():
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if agent not in spec.agents or not number or not abs(amount) < float("inf"):
            raise EnvironmentFailure(
                f"{where} paid {amount!r:.40} to {agent!r:.40}; expected a finite number, or finite numbers for the agents "
                f"{list(spec.agents)}"
            )
    return {agent: float(amount) for agent, amount in paid.items()}


def _readable(value: Any) -> Result:
    """Return what a tool returned, with a text of bounded size without characters that no terminal should see."""
    result = as_result(value)
    text = well_formed(str(result.text)[:LARGEST])
    cleaned = "".join(c if c in "\n\t" or (ord(c) >= 32 and ord(c) != 127) else "\ufffd" for c in text)
    return Result(cleaned, result.value, result.error, result.reward, result.done, result.seconds, result.left_out)


def _guarded(run: Callable[[], Any], where: str) -> Any:
    try:
        return run()
    except Exception as error:
        raise _failure(error, where) from error


def _failure(error: BaseException, where: str) -> BaseException:
    """Return the error to raise for what an environment's own code raised."""
    if isinstance(error, EnvironmentFailure):
        return EnvironmentFailure(f"{where}: {error}")
    if isinstance(error, Exception):
        return EnvironmentFailure(f"{where}: {told(error)}")
    return error


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items())
