"""Dialogues that are played while earlier ones are trained on: pacing, threads that take turns, versions, and ages."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from notebook_runs import CopiedWeights, trainer_of

from maporl.errors import ConfigError
from maporl.rollout.interleaving import Interleaving
from maporl.training.ahead import Ahead, batches_to_begin
from maporl.training.dialogue_metrics import staleness_metrics
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.process.waits import Discarded


@pytest.mark.parametrize("number, in_progress, depth, last, expected", [
    (1, 0, 1, 9, [1, 2]),
    (1, 0, 3, 9, [1, 2, 3, 4]),
    (2, 3, 3, 9, [5]),
    (7, 3, 3, 9, []),
    (9, 1, 3, 9, []),
    (8, 0, 3, 9, [8, 9]),
])  # fmt: skip
def test_which_batches_are_begun(number, in_progress, depth, last, expected):
    assert list(batches_to_begin(number, in_progress, depth, last)) == expected


def test_one_thread_runs_at_a_time_and_others_go_on_while_it_waits():
    interleaving, log = Interleaving(), []
    both = threading.Barrier(2, timeout=20)

    def play(name):
        with interleaving.running():
            for _ in range(3):
                log.append(f"{name} in")
                time.sleep(0.002)
                log.append(f"{name} out")
                with interleaving.waiting():
                    both.wait()  # only if the other thread came here too

    threads = [threading.Thread(target=play, args=[name]) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(log) == 12
    assert all(log[i].replace("in", "out") == log[i + 1] for i in range(0, 12, 2)), log
    with interleaving.running(), interleaving.running():  # inside itself it does nothing
        assert interleaving.others == 0
    with interleaving.waiting():  # nor does it outside
        pass


def test_batches_are_taken_in_the_order_in_which_they_were_begun_and_may_be_given_up():
    interleaving = Interleaving()
    ahead, ends = Ahead(2, interleaving), [threading.Event() for _ in range(2)]

    def play(number):
        with interleaving.waiting():
            assert ends[number].wait(20)
        return number

    ahead.begin(lambda: play(0))
    ahead.begin(lambda: play(1))
    ends[1].set()
    time.sleep(0.01)
    ends[0].set()
    assert ahead.in_progress == 2
    assert [ahead.take(), ahead.take()] == [0, 1]
    ends[0].clear()
    ahead.begin(lambda: play(0))
    [future] = ahead._begun
    ahead.drop()
    assert ahead.in_progress == 0
    ends[0].set()
    with pytest.raises(Discarded):
        future.result(timeout=20)
    ahead.begin(lambda: play(1))
    assert ahead.take() == 1, "what is begun later is not given up"


def utterance(policy, version):
    return Utterance(0, policy, policy, 0, 0, [], "", version=version)


def test_ages_in_literal_numbers():
    first = Dialogue(Example("1", "", ""), [utterance("ann", 3), utterance("bob", 3), utterance("ann", 4)])
    second = Dialogue(Example("2", "", ""), [utterance("ann", 4), utterance("cy", None), utterance("bob", 2)])
    assert staleness_metrics([first, second], update=6) == {
        "async/across_updates": 1.0,
        "ann/policy/staleness": pytest.approx((2 + 1 + 1) / 3),
        "ann/policy/staleness_max": 2.0,
        "ann/policy/partner_lag": pytest.approx((2 + 3) / 2),
        "bob/policy/staleness": pytest.approx((2 + 3) / 2),
        "bob/policy/staleness_max": 3.0,
        "bob/policy/partner_lag": pytest.approx((2 + 1) / 2),
    }


class Between(CopiedWeights):
    """Answers in a thread, and takes new weights between two answers of a dialogue."""

    between = continuous = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.thread, self.versions = ThreadPoolExecutor(1), {}

    def submit(self, requests):
        def answer(request):
            [ready] = super(Between, self).submit([request])
            time.sleep(0.002)
            return replace(ready.result(), version=self.versions[request.policy])

        return [self.thread.submit(answer, request) for request in requests]

    def sync(self, policy, version):
        self.thread.submit(super().sync, policy, version)
        self.thread.submit(self.versions.__setitem__, policy, version)

    def release(self):
        pass


def between(tiny, folder, monkeypatch, **options):
    monkeypatch.setattr("notebook_runs.CopiedWeights", Between)
    return trainer_of(tiny, folder, True, total_episodes=40, dialogues_logged=8, **options)


@pytest.mark.slow
def test_several_batches_in_progress_keep_to_the_bound_and_to_the_order_of_questions(tiny, tmp_path, monkeypatch):
    exact = between(tiny, tmp_path / "0", monkeypatch)
    exact.train()
    ahead = between(tiny, tmp_path / "2", monkeypatch, async_depth=2, engine_tis_cap=2.0)
    ahead.train()
    played = [[d["example"]["id"] for d in trainer.run.read_dialogues()] for trainer in (exact, ahead)]
    assert played[0] == played[1] and len(played[0]) == 40
    for trainer, depth in ((exact, 0), (ahead, 2)):
        ages = [(r["step"] - 1 - u["version"]) for r in trainer.run.read_dialogues() for u in r["utterances"]]
        assert all(0 <= age <= depth for age in ages) and max(ages) == depth
    metrics = ahead.run.read_metrics()
    assert metrics[0]["ann/policy/staleness_max"] == 0
    assert all(r["ann/policy/staleness"] <= 2 and r["bob/policy/partner_lag"] <= 2 for r in metrics)
    assert {r["async/in_progress"] for r in metrics} == {2.0, 1.0, 0.0}
    assert max(r["async/across_updates"] for r in metrics) > 0, "dialogues go on over an update"
    assert "ann/policy/staleness" not in exact.run.read_metrics()[0]


def test_utterances_of_a_run_have_the_number_of_updates_of_their_weights(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, False, total_episodes=16)
    trainer.train()
    found = {(r["step"], u["agent"], u["version"]) for r in trainer.run.read_dialogues() for u in r["utterances"]}
    assert found == {(update, agent, update - 1) for update in (1, 2) for agent in ("ann", "bob")}


@pytest.mark.parametrize("sections, message", [
    ({"cluster": {"backend": "ray"}}, r"async_depth: 2 trains on dialogues of older weights; set ratio_to: sampler"),
    ({"cluster": {"backend": "ray", "on_update": "drain"}, "ppo": {"engine_tis_cap": 2.0}},
     r"async_depth: 2 needs engines that take new weights while dialogues go on, and with 'transformers' dialogues end"),
    ({"ppo": {"engine_tis_cap": 2.0}}, r"engine 'transformers' answers with those weights; use cluster.backend: ray"),
])  # fmt: skip
def test_what_async_depth_needs_is_looked_at_before_a_model_loads(tmp_path, monkeypatch, sections, message):
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", lambda name: "2.60.0")
    config = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}, "bob": {"tiny": {}}},
        "training": {"use_cpu": True, "async_depth": 2}, "evaluation": {"questions": 0}, **sections,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(config))


def test_a_run_that_fails_gives_up_what_it_plays_ahead(tiny, tmp_path, monkeypatch):
    trainer = between(tiny, tmp_path, monkeypatch, async_depth=2, engine_tis_cap=2.0)

    def fail(*args):
        raise RuntimeError("on purpose")

    trainer.learning.update = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    assert trainer._ahead.in_progress == 0
    for _ in range(400):
        if not trainer.player.interleaving.others:
            break
        time.sleep(0.01)
    assert trainer.player.interleaving.others == 0, "their threads have ended"
    assert torch.is_grad_enabled()
