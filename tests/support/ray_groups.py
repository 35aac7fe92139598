"""Groups of processes whose members are threads of this process.

Some have engines and learners that only count. Others are what :class:`maporl.RayBackend` starts, without Ray and in a
moment: what crosses between processes is pickled here too. Only what Ray itself does is missing: starting, ending and
reaching processes, which ``tests/system/test_ray.py`` tests.
"""

import os
import pickle
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from maporl.errors import refuse
from maporl.integrations.ray import ray_backend
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.engine_process import EngineProcess, OtherVersion
from maporl.integrations.ray.group import LearnerGroup
from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.member import GroupSpec, MemberDied, NoPlace
from maporl.integrations.ray.section import FailuresSection
from maporl.run import ResolvedRun
from maporl.validation.load import from_dict
from maporl.validation.preflight import backend_lines, check_backends
from trl_ext.learning.checkpoint import random_state, set_random_state
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


_TURN = threading.RLock()
"""Threads share torch's random state and the environment, so that one works at a time."""


class Member:
    """A part of a group that answers calls one after the other, in a thread of its own."""

    def __init__(self, name, part, place):
        self.name, self.part, self.place, self.ended = name, part, place, False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def call(self, method, *arguments, kept=False):
        if self.ended:
            gone = Future()
            gone.set_exception(MemberDied(f"{self.name}: the process has ended"))
            return gone
        sent = pickle.dumps(arguments)

        def work():
            with _TURN:
                state = random_state()  # a process has one of its own
                try:
                    return pickle.loads(pickle.dumps(getattr(self.part, method)(*pickle.loads(sent))))
                finally:
                    set_random_state(state)

        return self.thread.submit(work)

    def answers(self, seconds):
        return not self.ended

    def stacks(self):
        return ""

    def end(self):
        self.ended = True
        self.thread.shutdown(wait=False)


class Cluster:
    """What :class:`maporl.integrations.ray.ray_cluster.Cluster` is to a backend."""

    running = 0
    """How many clusters have been started, and not ended."""

    started_here = True

    def __init__(self, address=None, memory=0, places=0, variables=(), reads_hub=()):
        type(self).running += 1
        self.started = []

    def reserve(self, plan, section, use_cpu):
        return SimpleNamespace(plan=plan, give_back=lambda: None)

    def start(self, name, part, spec, number, places, place):
        spec = pickle.loads(pickle.dumps(spec))
        own = LearnerProcess(spec, number, "127.0.0.1") if part == "learner" else EngineProcess(spec)
        member = Member(name, own, place)
        self.started.append(member)
        return member

    def end(self):
        type(self).running -= 1


def use(monkeypatch):
    """Let every :class:`maporl.RayBackend` use threads, also where Ray is not installed."""
    monkeypatch.setattr(ray_backend, "Cluster", Cluster)
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", lambda name: "2.60.0")
    monkeypatch.setattr(Cluster, "running", 0)
    for name in ("ACCELERATE_USE_CPU", "DS_ACCELERATOR"):  # what a process sets for itself is undone after the test
        monkeypatch.setenv(name, os.environ.get(name, "true" if name.startswith("ACC") else "cpu"))


OWN = ("kv_cache/", "group/")
"""Metrics that only one of the backends has."""


def assert_equal(end, other):
    """The same to the bit: weights and optimizers of the checkpoint and of the end, metrics, and dialogues."""
    (weights, records, dialogues), (expected, calm, spoken) = end, other
    assert weights.keys() == expected.keys() and len(weights) > 4 and dialogues == spoken
    for name, tensors in expected.items():
        assert all(value.equal(weights[name][key]) for key, value in tensors.items()), name
    kept = [[{k: v for k, v in r.items() if not k.startswith(OWN)} for r in part] for part in (records, calm)]
    assert kept[0] == kept[1]


def check_cluster(run: ResolvedRun) -> list[str]:
    """Return what the groups of a run are, or raise what is wrong with them."""
    refuse(check_backends(run))
    return backend_lines(run)
