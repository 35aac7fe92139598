"""Coroutines that block, stop or leave their loop, or do not let themselves be cancelled: the others run on."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maporl import event_loop
from maporl.environments import workers
from maporl.environments.workers import Job, TooManyLeft, Workers
from maporl.event_loop import CONNECTIONS, OWN_CODE, Loop
from maporl.integrations.trl import TRLEnvironment

RELEASED = threading.Event()


@pytest.fixture(autouse=True)
def released():
    RELEASED.clear()
    yield
    RELEASED.set()  # so that no thread of a test stays blocked


async def good():
    await asyncio.sleep(0.001)
    return "good"


async def blocks():
    RELEASED.wait(30)


async def exits():
    raise SystemExit(3)


async def interrupts():
    raise KeyboardInterrupt


async def swallows():
    while not RELEASED.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)


async def stops():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(60)


async def begins_one_that_exits():
    asyncio.get_running_loop().create_task(exits())
    await asyncio.sleep(60)


async def is_late():
    raise TimeoutError("the shop is closed")


def run(crew, code, seconds=20.0):
    ((outcome,),) = crew.run([[Job(code, seconds, getattr(code, "__name__", "tool"))]])
    return outcome


@pytest.mark.parametrize(("bad", "late", "error"), [
    (exits, False, SystemExit),
    (interrupts, False, KeyboardInterrupt),
    (is_late, False, TimeoutError),
    (swallows, True, None),
    (stops, True, None),
    (begins_one_that_exits, True, None),
    (blocks, True, None),
])  # fmt: skip
def test_later_coroutines_are_awaited(bad, late, error):
    crew = Workers()
    first = run(crew, bad, 0.3 if late else 20.0)
    assert (first.late, type(first.error)) == (late, type(None) if error is None else error)
    for _ in range(3):
        outcome = run(crew, good)
        assert (outcome.value, outcome.late, outcome.error) == ("good", False, None)
    assert crew.left == (bad is blocks)


def test_one_that_waits_to_begin_begins_in_another_loop():
    loop, begun, blocked = Loop("test loop"), [], threading.Event()

    async def block():
        blocked.set()
        await blocks()

    async def counted():
        begun.append(threading.get_ident())
        return await good()

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(loop.wait, block(), 20)
        assert blocked.wait(20)
        assert list(pool.map(lambda _: loop.wait(counted(), 20), range(4))) == ["good"] * 4
        RELEASED.set()
        assert first.result(20) is None
    assert len(begun) == 4, "no coroutine is begun twice"


def test_a_loop_that_comes_back_finishes_what_runs_in_it_and_ends():
    loop = Loop("the loop that comes back")
    waiting = []

    async def later():
        await asyncio.sleep(0)
        while not RELEASED.is_set():
            await asyncio.sleep(0.01)
        return "late but whole"

    thread = threading.Thread(target=lambda: waiting.append(loop.wait(later())))
    thread.start()
    loop.wait(good())
    with pytest.raises(TimeoutError):
        loop.wait(blocks(), 0.2)
    assert loop.left == 1 and loop.wait(good()) == "good"
    RELEASED.set()
    thread.join(20)
    assert waiting == ["late but whole"] and loop.left == 0
    deadline = time.monotonic() + 20
    while (
        sum(one.name == "the loop that comes back" for one in threading.enumerate()) > 1 and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert sum(one.name == "the loop that comes back" for one in threading.enumerate()) == 1


def test_many_blocked_loops_stop_the_run(monkeypatch):
    monkeypatch.setattr(workers, "MOST_LEFT", 2)
    crew = Workers()
    assert run(crew, blocks, 0.2).late
    with pytest.raises(
        TooManyLeft, match=r"2 calls took longer than they may and cannot be ended, the last one 0\.2 s"
    ):
        run(crew, blocks, 0.2)


class Shop:
    """As TRL takes it."""

    def reset(self, **row):
        self.calls = 0

    async def block(self) -> str:
        """Block the loop."""
        await blocks()
        return ""

    async def leave(self) -> str:
        """Leave."""
        raise SystemExit("gone")

    async def look(self) -> str:
        """Look."""
        return await good()


def test_a_class_of_trls_that_blocks_its_loop_does_not_block_connections():
    world, crew = TRLEnvironment(Shop()), Workers()
    tools = {tool.name: tool.run for tool in world.tools("ann")}
    world.reset(0, {})
    assert run(crew, tools["look"]).value == "good"
    assert str(run(crew, tools["leave"]).error) == "gone"
    assert run(crew, tools["block"], 0.3).late
    assert event_loop.wait(good(), 20, CONNECTIONS) == "good"
    assert run(crew, tools["look"]).value == "good"
    assert event_loop.wait(good(), 20, OWN_CODE) == "good"


def test_threads_of_tools_end_when_their_world_closes():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "maporl tool"}

    before, workers = threads(), Workers()
    rows = [[Job(lambda: 1, 5.0, "one")] for _ in range(3)]
    assert [[outcome.value for outcome in row] for row in workers.run(rows)] == [[1], [1], [1]]
    begun = threads() - before
    workers.close()
    for thread in begun:
        thread.join(5)
    assert len(begun) == 3 and not begun & threads()
    assert workers.run(rows)[2][0].value == 1, "others are started when they are needed"
    workers.close()


def test_threads_end_with_the_workers_that_nobody_has_any_longer():
    before = set(threading.enumerate())
    made = workers.Workers()
    made.run([[workers.Job(lambda: 1, 5.0, "one")] for _ in range(4)])
    started = set(threading.enumerate()) - before
    assert len(started) == 4 and all(thread.name == "maporl tool" for thread in started)
    del made
    for thread in started:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in started)
