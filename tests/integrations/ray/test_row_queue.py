"""Which process gets which rows: literal cases, and random schedules in which nothing is lost, doubled or over the
limit."""

import random
from concurrent.futures import Future

import pytest

from maporl.integrations.ray.scheduling import Queued, RowQueue


def asked(count):
    return [Queued(number, Future()) for number in range(count)]


def queue(processes, waiting, rows=None, joining=False):
    own = RowQueue(rows, joining)
    for name in processes:
        own.add(name)
    own.waiting = asked(waiting)
    return own


def given(own):
    found = []
    while (one := own.next()) is not None:
        found.append((one[0], len(one[1]), one[2]))
    return found


@pytest.mark.parametrize("joining", [False, True])
def test_free_processes_share_what_waits(joining):
    own = queue("abc", 8, joining=joining)
    assert given(own) == [("a", 3, 3), ("b", 3, 3), ("c", 2, 2)] and own.all_busy and not own.waiting


def test_rows_join_those_that_run_so_that_processes_work_on_equally_many():
    own = queue("ab", 6, joining=True)
    first, second = own.next(), own.next()
    assert (first[0], len(first[1])) == ("a", 3) and (second[0], len(second[1])) == ("b", 3)
    own.answered("a", dict.fromkeys(first[1], "said"))
    own.waiting = asked(3)
    own.free("b")
    assert own.next() == ("b", {}, 3), "it goes on with its own, because the other one has nothing"
    own.free("a")
    process, new, running = own.next()
    assert (process, len(new), running, own.waiting) == ("a", 3, 3, [])


def test_a_process_without_anything_to_do_is_not_asked():
    own = queue("a", 1, joining=True)
    _, new, _ = own.next()
    own.answered("a", dict.fromkeys(new, "said"))
    own.free("a")
    assert own.next() is None and not own.all_busy


@pytest.mark.parametrize("joining", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_events_every_row_is_answered_once(seed, joining):
    """Processes answer some rows or all, die with what they have, and new ones come."""
    rng = random.Random(seed)
    limit = rng.choice([None, 3, 8])
    own, answers, busy, names = RowQueue(limit, joining), {}, {}, iter(range(10_000))
    left = asked(200)
    while len(answers) < 200:
        for _ in range(rng.randint(0, 2)):
            own.add(next(names)) if len(own._running) < 4 else None
        size = rng.randint(0, 20)
        own.waiting, left = own.waiting + left[:size], left[size:]
        while (one := own.next()) is not None:
            process, new, running = one
            busy[process] = busy.get(process, []) + list(new)
            assert running == len(busy[process]) and (limit is None or running <= limit)
        for process in rng.sample(list(busy), rng.randint(0, len(busy))):
            if rng.random() < 0.2:
                own.remove(process)
                assert own.answered(process, dict.fromkeys(busy.pop(process), "late")) == []
                own.free(process)
                continue
            done = [n for n in busy[process] if not joining or rng.random() < 0.5]
            for row, said in own.answered(process, {n: ("said", n) for n in done}):
                assert row.request not in answers
                answers[row.request] = said
            busy[process] = [n for n in busy[process] if n not in done]
            own.free(process)
            if not busy[process]:
                del busy[process]
    assert sorted(answers) == list(range(200)) and not own.waiting
