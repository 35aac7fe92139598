"""Groups of processes as threads of this process: what :class:`maporl.RayBackend` does, without Ray and in a moment.

What crosses between processes is pickled here too. Only what Ray itself does is missing: starting, ending and reaching
processes, which ``tests/system/test_ray.py`` tests.
"""

import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

from maporl.errors import refuse
from maporl.integrations.ray import ray_backend
from maporl.integrations.ray.engine_process import EngineProcess
from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.member import MemberDied
from maporl.run import ResolvedRun
from maporl.validation.preflight import backend_lines, check_backends
from trl_ext.learning.checkpoint import random_state, set_random_state

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
