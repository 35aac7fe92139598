"""Groups of processes whose members are threads, with engines and learners that only count."""

import queue
import threading
import time
from concurrent.futures import Future

import pytest

from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.engine_process import OtherVersion
from maporl.integrations.ray.group import LearnerGroup
from maporl.integrations.ray.member import GroupSpec, MemberDied, NoPlace
from maporl.integrations.ray.section import FailuresSection
from maporl.validation.load import from_dict
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import Draw, TokenRequest


class Thread:
    """A member whose calls run one after the other in a thread. ``end`` ends it as a process ends."""

    def __init__(self, name, part):
        self.name, self.part, self.dead, self.calls = name, part, threading.Event(), queue.SimpleQueue()
        self.place = name
        self.waiting = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while not self.dead.is_set():
            method, arguments, answer = self.calls.get()
            try:
                found = getattr(self.part, method)(*arguments)
                if not answer.done() and not self.dead.is_set():
                    answer.set_result(found)
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)

    def call(self, method, *arguments, kept=False):
        answer = Future()
        self.waiting.append(answer)
        if self.dead.is_set():
            answer.set_exception(MemberDied(f"{self.name}: gone"))
        else:
            self.calls.put((method, arguments, answer))
        return answer

    def stacks(self):
        return f"stacks of {self.name}"

    def end(self):
        self.dead.set()
        for answer in self.waiting:
            if not answer.done():
                answer.set_exception(MemberDied(f"{self.name}: the process has ended"))


class Engine:
    """Answers with a token that says which version answered, after ``seconds`` for a call and for each row."""

    def __init__(self, seconds=(0.0, 0.0)):
        self.seconds, self.versions, self.rows = seconds, {"ann": 0}, []

    def build(self):
        pass

    def load(self, policy, version, weights):
        assert weights == f"weights {version}"
        self.versions[policy] = version
        return 1000

    def sample(self, rows, versions):
        for name, version in versions.items():
            if self.versions.get(name) != version:
                raise OtherVersion(f"{name}: {version} against {self.versions.get(name)}")
        self.rows.append(len(rows))
        time.sleep(self.seconds[0] + self.seconds[1] * len(rows))
        return {n: Sampled([row.prompt_ids[0], self.versions[row.policy]]) for n, row in rows.items()}

    def release(self):
        pass


def spec(replicas=2, rows=None, devices=2, vllm=()):
    of_run = {"args": None, "objectives": {}, "stops": {}, "seed": 0, "past": {}, "vllm": dict.fromkeys(vllm)}
    return GroupSpec("ann", None, ("ann",), ("ann",), 1, (), 1, devices, "replicated", replicas, rows, **of_run)


def row(number, calls=None):
    return TokenRequest("ann", [number], Draw(4), ("key", number if calls is None else calls))


class Learner:
    """Counts updates. Every process must do the same, and waits for the others as in a collective."""

    def __init__(self, world, rank):
        self.world, self.rank, self.state, self.samples = world, rank, 0, None

    def meeting_place(self):
        return "here", 1

    def build(self, address, port):
        return 12

    def annotate(self, samples):
        self.samples = samples
        return samples

    def update(self, number):
        assert self.samples is not None
        self.world["updates"].append(self.rank)
        if self.rank == 1 and self.world["updates"].count(1) in self.world["deaths"]:
            self.world["members"][-1].end()
            time.sleep(0.05)
        if self.rank == 1 and self.world["updates"].count(1) in self.world["hangs"]:
            time.sleep(5)
        self.state += number
        self.samples = None
        return self.state

    def snapshot(self):
        return self.state

    def restore(self, *parts):
        self.state = parts[0]


def config_of(agents=None, **sections):
    agents = agents or {"ann": {"tiny": {}}, "bob": {"tiny": {}}, "cy": {"tiny": {}, "policy": "bob"}}
    plain = {"output_dir": "runs/x", "task": {"name": "toy_sum"}, "protocol": {"name": "debate"}}
    return from_dict({**plain, "agents": agents, **sections})


@pytest.fixture(autouse=True)
def newest_ray(monkeypatch):
    """These tests need no Ray, so that its version is told to be one that works."""
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", lambda name: "2.60.0")


def _place(started, places):
    if len(started) == places:
        raise NoPlace("no machine has free devices for it")


def pool_of(folder, replicas=2, rows=None, seconds=(0.0, 0.0), places=None, **failures):
    """A pool that is built, and the engines that it starts, of which ``places`` find a place."""
    started = []

    def start(number, place):
        _place(started, places)
        started.append(Thread(f"ann engine {number}", Engine(seconds)))
        return started[-1]

    pool = EnginePool(spec(replicas, rows), start, FailuresSection(**failures), folder)
    pool.build()
    return pool, started


def learners_of(folder, deaths=(), hangs=(), places=None, **failures):
    """A group of learners that is built, and what they do, of which ``places`` find a place."""
    world = {"updates": [], "deaths": deaths, "hangs": hangs, "members": []}

    def start(rank):
        _place(world["members"], places)
        world["members"].append(Thread(f"ann learner {rank}", Learner(world, rank)))
        return world["members"][-1]

    group = LearnerGroup(spec(), start, FailuresSection(**failures), folder)
    group.build()
    return group, world
