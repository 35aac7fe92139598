"""Schedules, past opponents, forks and agents behind an API, with trainers of tiny models."""

import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from tiny_runs import TINY_SECTION, one_update, scheduled_config

from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.runs.build import build_trainer
from maporl.tiny import build_tiny_model, build_tiny_tokenizer


def weights(trainer, policy):
    return {k: v.clone() for k, v in trainer.team.policies[policy].model.state_dict().items()}


def moved(trainer, policy, before):
    return any(not torch.equal(v, before[k]) for k, v in trainer.team.policies[policy].model.state_dict().items())


def test_roles_are_exchanged_and_optimizers_keep_their_state(tmp_path):
    trainer = build_trainer(
        scheduled_config(tmp_path, schedule={"swap": {"agents": ["ann", "bob"], "every": 2}}), quiet=True
    )
    spoken = []
    for _ in range(5):
        answers, _, _ = one_update(trainer)
        spoken.append([u.policy for u in answers[0].utterances])
    assert spoken == [["ann", "bob"]] * 2 + [["bob", "ann"]] * 2 + [["ann", "bob"]]
    steps = [float(s["step"]) for s in trainer.learners["ann"].optimizer.state.values()]
    assert steps and set(steps) == {5.0}


def test_agents_learn_one_at_a_time(tmp_path):
    trainer = build_trainer(scheduled_config(tmp_path, schedule={"round_robin": {"every": 1}}), quiet=True)
    for learning in ("ann", "bob", "ann"):
        before = {name: weights(trainer, name) for name in ("ann", "bob")}
        _, rows, _ = one_update(trainer)
        assert set(rows) == {learning}
        assert {name for name in before if moved(trainer, name, before[name])} == {learning}


@pytest.mark.parametrize("lora", [False, True])
def test_a_past_opponent_speaks_with_old_weights_that_nobody_trains(tmp_path, lora):
    agents = {"ann": {"policy": "shared"}, "bob": {"policy": "shared"}}
    defaults = {"tiny": TINY_SECTION, **({"lora": {"r": 2}} if lora else {})}
    pool = {"agent": "bob", "of": "ann", "every": 1, "keep": 2, "probability": 1.0}
    settings = scheduled_config(tmp_path, agents=agents, agent_defaults=defaults, schedule={"opponent_pool": pool})
    trainer = build_trainer(settings, quiet=True)
    answers, rows, _ = one_update(trainer)
    assert {u.policy for d in answers for u in d.utterances} == {"shared"}  # without a snapshot yet
    trainer.past_policies.take_snapshot()
    one_update(trainer)
    old = trainer.past_policies.snapshots[0]
    now = {k: v.clone() for k, v in run_weights(trainer.past_policies.policy).items()}
    answers, rows, _ = one_update(trainer)
    assert {u.agent: u.policy for d in answers for u in d.utterances} == {"ann": "shared", "bob": "shared-past"}
    assert set(rows) == {"shared"} and len(rows["shared"]) == 4
    policy = trainer.past_policies.past
    past = run_weights(policy)
    assert all(torch.equal(past[k], old[k]) for k in old) and any(not torch.equal(past[k], now[k]) for k in now)
    for _ in range(2):
        trainer.past_policies.take_snapshot()
    assert len(trainer.past_policies.snapshots) == 2
    (tmp_path / "saved").mkdir()
    trainer.past_policies.save(tmp_path / "saved")
    kept = trainer.past_policies.snapshots
    trainer.past_policies.snapshots = []
    trainer.past_policies.load(tmp_path / "saved")
    assert all(torch.equal(a[k], b[k]) for a, b in zip(kept, trainer.past_policies.snapshots, strict=True) for k in a)


def test_engines_take_over_a_past_opponent_once_in_an_update_although_questions_are_resampled(tmp_path):
    """Processes resample different numbers of times, and taking over weights waits for all of them."""
    pool = {"agent": "bob", "of": "ann", "every": 1, "probability": 1.0}
    settings = scheduled_config(tmp_path, schedule={"opponent_pool": pool}, branching={"group": 2, "resample": 3})
    trainer = build_trainer(settings, quiet=True)
    trainer.past_policies.take_snapshot()
    engine, told, played = trainer.engines["transformers"], [], []
    sync, play = engine.sync, trainer.collector._play
    engine.sync = lambda policy: (told.append(policy), sync(policy))
    trainer.collector._play = lambda *arguments: (played.append(arguments), play(*arguments))[1]
    trainer.player.scorer.credit = lambda dialogues, task, update: [
        u.rewards.update(credit=0.0) for d in dialogues for u in d.utterances
    ]
    trainer.collect(trainer.next_batch())
    assert len(played) == 4, "the questions, and three times others"
    assert told == ["ann-past"]


def run_weights(policy):
    from peft import get_peft_model_state_dict

    if policy.adapter is not None:
        return get_peft_model_state_dict(policy.model, adapter_name=policy.adapter)
    return dict(policy.model.named_parameters())


def test_forked_dialogues_continue_the_trunks_own_tokens(tmp_path):
    settings = scheduled_config(
        tmp_path, protocol={"name": "chain", "turns": 3, "later": "{others};{question}", "quote": "{text}"},
        branching={"how": "fork_random", "group": 3},
        advantage={"returns": "utterance", "baseline": "mean", "key": ["prompt", "agent", "turn"], "singleton": "zero"},
        ppo={"response_length": 3, "num_ppo_epochs": 1, "kl_coef": 0.0},
    )  # fmt: skip
    trainer = build_trainer(settings, quiet=True)
    assert trainer.args.critic == "head" and trainer.learners["ann"].critic.kind == "none"
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.dialogues
    assert len(answers) == 12
    for dialogue in answers:
        for agent in ("ann", "bob"):
            own = [u for u in dialogue.utterances if u.agent == agent]
            for earlier, later in itertools.pairwise(own):
                conversation = earlier.prompt_ids + earlier.response_ids
                assert later.prompt_ids[: len(conversation)] == conversation
    rows = trainer.advantage(batch).token_batches
    distinct = {
        (d.prompt, u.sample) if u.sample is not None else (d.prompt, d.rollout, u.id)
        for d in answers
        for u in d.utterances
    }
    assert sum(len(own) for own in rows.values()) == len(distinct) < 12 * 6
    for own in rows.values():
        per_row = [set(a[m].tolist()) for a, m in zip(own.advantages, own.sampled_mask, strict=True)]
        assert all(len(values) == 1 for values in per_row)  # one number for all tokens of an answer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """``transformers serve`` with a tiny model: a real OpenAI-compatible endpoint."""
    folder = tmp_path_factory.mktemp("served")
    section = TinySection(**TINY_SECTION)
    tokenizer = build_tiny_tokenizer(section)
    build_tiny_model(section, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [os.path.join(os.path.dirname(sys.executable), "transformers"), "serve", str(folder), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, process.stderr.read().decode()[-2000:]
                time.sleep(0.5)
        yield f"{url}/v1", str(folder)
    finally:
        process.terminate()
        process.wait(timeout=30)


def with_actor(folder, server, **api):
    agents = {"ann": {}, "actor": {"tiny": None, "engine": "openai", "api": {"model": server[1], "base_url": server[0], "max_tokens": 4, **api}}}  # fmt: skip
    protocol = {"name": "collaboration", "hint": "{question}", "with_hint": "{question};{words}"}
    return scheduled_config(folder, agents=agents, protocol=protocol, reward={"rules": ["last"]})


@pytest.mark.slow
def test_an_agent_behind_an_api_plays_is_cached_counted_and_never_trained(tmp_path, server, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    first = build_trainer(with_actor(tmp_path, server), quiet=True)
    answers, rows, _ = one_update(first)
    actor = [u for d in answers for u in d.utterances if u.agent == "actor"]
    assert len(actor) == 4 and all(u.text and not u.trainable for u in actor)
    assert set(rows) == {"ann"} and len(rows["ann"]) == 4
    counts = first.engines["openai"].metrics()
    assert counts["api/actor/requests"] == 4 and counts["api/actor/cached"] == 0
    assert counts["api/actor/completion_tokens"] > 0
    again = build_trainer(with_actor(tmp_path, server), quiet=True)
    repeated, _, _ = one_update(again)
    assert [u.text for d in repeated for u in d.utterances] == [u.text for d in answers for u in d.utterances]
    assert again.engines["openai"].metrics()["api/actor/requests"] == 0


def test_an_endpoint_that_does_not_answer_stops_the_run_and_is_named(tmp_path):
    nowhere = ("http://127.0.0.1:9/v1", "m")
    trainer = build_trainer(with_actor(tmp_path, nowhere, retries=0, cache=False, timeout=2), quiet=True)
    with pytest.raises(RuntimeError, match=r"agent 'actor', turn 1, dialogue .* from http://127\.0\.0\.1:9/v1"):
        one_update(trainer)


def test_a_missing_key_is_said_before_anything_is_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds no key"):
        build_trainer(with_actor(tmp_path, (None, "gpt")), quiet=True)


@pytest.mark.parametrize(("change", "message"), [
    ({"schedule": {"swap": {"agents": ["ann"], "every": 5}}}, "swap: expected at least two agents"),
    ({"schedule": {"swap": {"agents": ["ann", "bob"], "every": 5}}, "agents": {"ann": {}, "bob": {"tiny": {"layers": 2}}}}, "speak with the same weights but differ in tiny"),
    ({"schedule": {"round_robin": {"every": 1}}, "agents": {"ann": {}, "bob": {"trainable": False}}}, "agent 'bob' should be trained in its turn, but it is frozen"),
    ({"schedule": {"critic_warmup": 2}, "training": {"critic": "none"}}, "critic_warmup: a critic is missing"),
    ({"schedule": {"critic_warmup": 2}, "updates": 2}, "only the critics would learn in all 2 updates"),
    ({"schedule": {"opponent_pool": {"agent": "bob", "of": "cy"}}}, "opponent_pool: expected agent and of among"),
    ({"schedule": {"curriculum": [{"update": 1, "task": {}}]}}, "rising updates from 2 on"),
    ({"schedule": {"curriculum": [{"update": 2, "task": {"largst": 4}}]}}, "curriculum, update 2: task: unknown key 'largst'"),
    ({"agents": {"ann": {}, "bob": {"engine": "openai"}}}, "agents.bob.engine: openai needs agents.bob.api, for example api: {model: NAME}"),
])  # fmt: skip
def test_schedules_that_cannot_be_are_refused_before_a_model_loads(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        scheduled_config(tmp_path, **change)


@pytest.mark.slow
def test_running_means_and_past_opponents_survive_a_restart_bit_for_bit(tmp_path):
    def settings(name, updates):
        return scheduled_config(
            tmp_path / name, updates=updates, task={"name": "episodes"}, agents={"ann": {"policy": "s"}, "bob": {"policy": "s"}},
            protocol={"name": "game", "game": "kuhn_poker"}, reward={"sources": {"env": 1.0}, "rules": ["own"]},
            advantage={"returns": "reward_to_go", "baseline": "ema", "scale": "none", "key": ["game", "agent"]},
            schedule={"opponent_pool": {"agent": "bob", "of": "ann", "every": 1, "keep": 3, "probability": 0.7}},
            ppo={"response_length": 2, "num_ppo_epochs": 1, "temperature": 1.0},
            training={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-2,
                      "save_steps": 1, "lr_scheduler_type": "constant"},
        )  # fmt: skip

    whole = build_trainer(settings("whole", 6), quiet=True)
    whole.train()
    begun = build_trainer(settings("cut", 3), quiet=True)
    begun.train()
    gone_on = build_trainer(settings("cut", 6), quiet=True)
    gone_on.train(resume_from_checkpoint=True)
    assert gone_on.state.global_step == 6
    assert gone_on.advantages.state.means == whole.advantages.state.means and any(whole.advantages.state.means.values())
    assert all(torch.equal(v, weights(whole, "s")[k]) for k, v in weights(gone_on, "s").items())
    for a, b in zip(whole.past_policies.snapshots, gone_on.past_policies.snapshots, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
