"""What groups count and measure, with processes as threads and a clock that the test moves."""

import pytest
from ray_groups import Engine, Learner, Thread, row, spec

from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import LearnerGroup
from maporl.integrations.ray.scheduling import DEAD, IDLE, SAMPLING, SENDING, Activity, shown
from maporl.integrations.ray.section import FailuresSection


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def move(self, seconds):
        self.now += seconds


def test_the_time_of_two_processes_is_divided_over_what_they_do():
    clock = Clock()
    activity = Activity(2, clock)
    clock.move(1)  # neither is there yet
    activity.start("a")
    activity.start("b")
    activity.begin("a", SAMPLING)
    clock.move(3)  # a samples
    activity.begin("a", SENDING)
    clock.move(2)  # what was begun last counts
    activity.end("a", SAMPLING)
    activity.end("a", SENDING)
    activity.gone("b")
    activity.begin("b", SAMPLING)  # it is gone
    clock.move(4)
    spent = activity.take()
    assert spent == {DEAD: (2 + 4) / 2, SAMPLING: 3 / 2, IDLE: (3 + 2 + 4) / 2, SENDING: 2 / 2}
    assert sum(spent.values()) == 10
    assert shown(spent, (SAMPLING, "saving")) == {SAMPLING: 1.5, "saving": 0.0, IDLE: 0.45}
    assert activity.take() == {DEAD: 0, IDLE: 0} and shown({DEAD: 0, IDLE: 0}, ()) == {IDLE: 0}
    clock.move(1)
    assert shown(activity.take(), (DEAD,)) == {DEAD: 0.5, IDLE: 0.5}


class TimedEngine(Engine):
    """Samples for 2 s a call, and takes over weights in 1 s."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def load(self, policy, version, weights):
        self.clock.move(1)
        return super().load(policy, version, weights)

    def sample(self, rows, versions):
        self.clock.move(2)
        return super().sample(rows, versions)


def test_what_processes_that_sample_do_is_counted_for_every_update(tmp_path):
    clock, started = Clock(), []

    def start(number, place=0):
        started.append(Thread(f"ann engine {number}", TimedEngine(clock)))
        return started[-1]

    pool = EnginePool(spec(replicas=1, rows=2), start, FailuresSection(), tmp_path, clock)
    pool.build()
    pool.take_counts()
    pool.load("ann", 1, "weights 1")
    assert [answer.result(5).ids for answer in pool.ask([row(n) for n in range(3)])] == [[0, 1], [1, 1], [2, 1]]
    clock.move(5)
    assert pool.take_counts() == {
        "seconds": 10.0, "engines/sampling": 4.0, "engines/sending": 1.0, "engines/dead": 0.0, "engines/idle": 0.5,
        "rows_per_call": 1.5, "tokens_per_second": 1.5, "waiting": 1.0, "sent_bytes": 1000.0, "replaced": 0.0,
    }  # fmt: skip
    empty = pool.take_counts()
    assert empty["engines/idle"] == empty["tokens_per_second"] == empty["sent_bytes"] == empty["waiting"] == 0


def test_an_engine_that_died_is_dead_until_a_new_one_has_the_weights(tmp_path):
    clock, started = Clock(), []

    def start(number, place=0):
        clock.move(7 * number)  # the first takes no time to start
        started.append(Thread(f"ann engine {number}", TimedEngine(clock)))
        return started[-1]

    pool = EnginePool(spec(replicas=1), start, FailuresSection(), tmp_path, clock)
    pool.build()
    pool.load("ann", 1, "weights 1")
    pool.release()  # after it has loaded them
    pool.take_counts()
    started[0].end()
    clock.move(2)  # nobody knows it yet
    assert pool.ask([row(0)])[0].result(5).ids == [0, 1]
    counts = pool.take_counts()
    assert counts["seconds"] == 2 + 7 + 1 + 2 and counts["engines/dead"] == 7 + 1 and counts["engines/sampling"] == 2
    assert counts["engines/idle"] == pytest.approx(2 / 12) and counts["replaced"] == 1 and counts["sent_bytes"] == 1000


class TimedLearner(Learner):
    def __init__(self, rank, clock):
        super().__init__({"updates": [], "deaths": (), "hangs": (), "members": []}, rank)
        self.clock = clock

    def build(self, address, port):
        self.clock.move(6)
        return super().build(address, port)

    def annotate(self, samples):
        self.clock.move(1)
        return super().annotate(samples)

    def update(self, number):
        self.clock.move(3)
        return super().update(number)

    def weights(self, policy):
        self.clock.move(0.5)
        return "weights"

    def begin_saving(self, folder):
        self.clock.move(1.5)

    def has_central(self):
        self.clock.move(0.25)
        return False


def test_what_processes_that_train_do_is_counted_for_every_update(tmp_path):
    clock, started = Clock(), []

    def start(rank):
        started.append(Thread(f"ann learner {rank}", TimedLearner(rank, clock)))
        return started[-1]

    group = LearnerGroup(spec(devices=1), start, FailuresSection(), tmp_path, clock)
    group.build()
    group.take_counts()
    group.annotate([("a",)])
    clock.move(1.75)
    group.update([(1,)])
    group.kept("weights", "ann")
    group.all("begin_saving", tmp_path)
    group.all("has_central")
    assert group.take_counts() == {
        "learner/learning": 4.0, "learner/sending": 0.5, "learner/saving": 1.5, "learner/dead": 0.0,
        "learner/idle": 0.25, "restarts": 0.0,
    }  # fmt: skip
    started[0].end()
    group.annotate([("b",)])
    assert group.take_counts() == {
        "learner/learning": 1.0, "learner/sending": 0.0, "learner/saving": 0.0, "learner/dead": 6.0,
        "learner/idle": 0.0, "restarts": 1.0,
    }  # fmt: skip
