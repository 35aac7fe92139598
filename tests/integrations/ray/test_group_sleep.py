"""Engines of a group that sleep while it trains (``sharing: sleep``).

vLLM's sleep mode needs a GPU. So vLLM is played here by a sampler that says when it is awake; groups are threads.
"""

import json

import pytest
import ray_groups
from notebook_runs import ALPHABET, DEBATE, HELD_OUT, READABLE, TASK, args

from maporl import Agent, MultiAgentPPOTrainer, RayBackend, Team
from maporl.integrations.ray import engine_process
from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.section import ClusterSection, GroupSection
from maporl.integrations.vllm.section import ColocateSection, VLLMSection
from maporl.schedules import OpponentPool, Schedule
from trl_ext.sampling.own_weights import OwnWeights

SECTION = VLLMSection(colocate=ColocateSection())


class Vllm:
    """What :class:`maporl.integrations.ray.engine_process.VLLMRows` does, by transformers.

    It takes memory from the first call on.
    """

    awake = 0
    seen: list[str] = []

    def __init__(self, policies, sections, options, folder):
        self.sampler, self.takes_memory = OwnWeights(policies, 8), False
        type(self).seen += [f"sleep {s.colocate.sleep}, {s.colocate.gpu_memory_utilization}" for s in sections.values()]

    def _wake(self):
        type(self).awake += not self.takes_memory
        self.takes_memory = True

    def sample(self, rows):
        self._wake()
        return dict(zip(rows, self.sampler.sample(list(rows.values())), strict=True))

    def finish(self):
        pass

    def sync(self, policy, version):
        self._wake()
        self.sampler.release()

    def release(self):
        type(self).awake -= self.takes_memory
        self.takes_memory = False
        self.sampler.release()


def trainer_of(folder, tiny, engine="vllm", schedule=None, **group):
    sizes = {"hidden_size": 32, "layers": 1, "alphabet": ALPHABET}
    team = Team([Agent(name, *tiny(seed=seed, **sizes), engine=engine) for seed, name in enumerate(("ann", "bob"))])
    groups = {name: GroupSection([name], **group) for name in ("ann", "bob")}
    return MultiAgentPPOTrainer(
        args(folder, 3), team, TASK, DEBATE, HELD_OUT, READABLE, schedule=schedule, backend=RayBackend(ClusterSection("ray", groups=groups), quiet=True),
        engine_options={"ann": SECTION, "bob": SECTION} if engine == "vllm" else None,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    ray_groups.use(monkeypatch)
    monkeypatch.setattr(engine_process, "VLLMRows", Vllm)
    monkeypatch.setattr(Vllm, "awake", 0)
    monkeypatch.setattr(Vllm, "seen", [])


def test_engines_sleep_while_their_group_trains(tiny, tmp_path, monkeypatch):
    found = []
    for method in ("annotate", "update"):
        real = getattr(LearnerProcess, method)

        def work(self, *arguments, real=real, method=method):
            found.append((method, Vllm.awake))
            return real(self, *arguments)

        monkeypatch.setattr(LearnerProcess, method, work)
    trainer = trainer_of(tmp_path / "run", tiny, sharing="sleep")
    plan = trainer.home.places.plan
    assert [len(plan.blocks), plan.said()] == [2, "ann to train and sample 1, bob to train and sample 1"]
    assert plan.places["ann", "learner"] == plan.places["ann", "engine"] != plan.places["bob", "engine"]
    trainer.train()
    assert found.count(("annotate", 0)) == found.count(("update", 0)) == 6 and len(found) == 12
    assert Vllm.seen == ["sleep True, None"] * 2
    records = trainer.run.read_metrics()
    assert len(records) == 3 and all(record["ann/policy/engine_gap"] < 1e-4 for record in records)


def test_a_vllm_on_a_device_of_its_own_takes_most_of_it_and_does_not_sleep(tiny, tmp_path):
    trainer = trainer_of(tmp_path / "run", tiny)
    assert len(trainer.home.places.plan.blocks) == 4 and Vllm.seen == ["sleep False, 0.85"] * 2
    trainer.home.end()


def test_past_opponents_have_weights_of_their_own_in_the_vllm_of_their_group(tiny, tmp_path):
    pool = OpponentPool("bob", "ann", every=1, keep=2, probability=1.0)
    trainer = trainer_of(tmp_path / "run", tiny, schedule=Schedule(opponent_pool=pool))
    assert len(Vllm.seen) == 3, "ann, what ann was, and bob"
    trainer.train()
    dialogues = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    spoke = [(d["step"], u["policy"]) for d in dialogues for u in d["utterances"] if u["agent"] == "bob"]
    assert {policy for step, policy in spoke if step > 1} == {"ann-past"}
    assert all(record["ann/policy/engine_gap"] < 1e-4 for record in trainer.run.read_metrics())
