"""Forks of a dialogue's environments, by a copy or by a checked replay. Imports no torch."""

from functools import partial

from maporl.environments.rooms import EnvironmentFailure, Room, Rooms, guarded, shown
from maporl.environments.workers import Job
from maporl.environments.world import World
from maporl.types import Act, Example


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
