"""The second wave of credit: what GDPO, Lite PPO, GiGPO, Turn-PPO and ReMA train on, through the trainer's own
steps."""

import math
import random
from collections import defaultdict

import pytest
import torch
from datasets import Dataset
from notebook_runs import CHATS, agent, grpo_trainer_of
from played_games import perfect
from recipe_runs import loss_and_gradients, rollout_of
from scripted_training import played, recipe_values, rows, scripted_trainer
from trl import GRPOConfig, GRPOTrainer

from maporl.advantages import TurnBatch, estimate
from maporl.advantages.estimator import estimate_all
from maporl.config.schema import AdvantageConfig, AdvantageTerm
from maporl.errors import ConfigError
from maporl.validation.load import from_dict, load

FOUR = {"branching": {"group": 4}, "task": {"largest": 4}, "ppo": {"response_length": 10}}


def groups(batch):
    """By question, the advantages of its rows in order."""
    found = defaultdict(list)
    for row in rows(batch):
        found[row.dialogue.prompt].append((row.dialogue.rollout, row.advantage))
    return {prompt: [advantage for _, advantage in sorted(own)] for prompt, own in found.items()}


def by_rollout(right):
    """A script by which rollout r of the q-th question is right where ``right[q][r]``."""
    order: list[str] = []

    def script(request):
        if request.example.id not in order:
            order.append(request.example.id)
        own = right[order.index(request.example.id) % len(right)]
        return request.example.answer if own[rollout_of(request)] else "x"

    return script


# -- Lite PPO ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ([[1, 0, 0, 0], [1, 1, 1, 0]], [[1.4031, -0.4677, -0.4677, -0.4677], [0.4677, 0.4677, 0.4677, -1.4031]]),
        ([[1, 1, 1, 1], [1, 0, 0, 0]], [[0, 0, 0, 0], [1.4491, -0.4830, -0.4830, -0.4830]]),
    ],
)
def test_lite_ppo_divides_by_the_spread_of_the_batch(tmp_path, right, expected):
    values = recipe_values("lite_ppo", tmp_path, training={"per_device_train_batch_size": 2}, **FOUR)
    found = groups(played(scripted_trainer(values, by_rollout(right))))
    assert sorted(found.values()) == [pytest.approx(own, abs=1e-4) for own in sorted(expected)]


# -- GDPO --------------------------------------------------------------------------------------------------------------


APART = {
    "returns": "utterance", "baseline": "mean", "scale": "std", "key": ("prompt",), "eps": 1e-4,
    "multi_objective_aggregation": "normalize_then_sum",
}  # fmt: skip


def test_gdpo_compares_each_reward_alone(tmp_path):
    """The lengths 2, 8, 1, 9 of ten tokens have brevity .8 .2 .9 .1, and the first answer of four is right."""

    def script(request):
        length = (8, 1, 2, 9)[rollout_of(request)] - 1
        return request.example.answer.rjust(length, "0") if rollout_of(request) == 0 else "x" * length

    values = recipe_values("gdpo", tmp_path, **FOUR)
    values["reward"]["brevity"] = {"tokens": 10}
    found = groups(played(scripted_trainer(values, script)))
    # each question has the same four rewards, so whitening the batch is whitening this question, four times
    alone = [1.4997 - 0.7347, -0.4999 + 0.9796, -0.4999 + 0.7347, -0.4999 - 0.9796]
    spread = math.sqrt(sum(a * a for a in alone) * len(found) / (4 * len(found) - 1)) + 1e-4
    assert len(found) == 4
    for own in found.values():
        assert own == pytest.approx([a / spread for a in alone], abs=2e-3)


def test_gdpo_equals_the_aggregation_of_trl(tmp_path):
    """A real GRPOTrainer with the same two rewards, one of which some completions lack, gives the same advantages."""
    scores = {
        "first": [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.25, 0.0],
        "second": [0.1, None, 0.7, 0.7, None, 2.0, 3.0, -1.0],
    }
    solo = agent("solo")

    def function(name):
        def given(completions, **kwargs):
            return scores[name][: len(completions)]

        given.__name__ = name
        return given

    arguments = GRPOConfig(
        output_dir=str(tmp_path / "trl"), num_generations=4, per_device_train_batch_size=8, max_completion_length=3,
        multi_objective_aggregation="normalize_then_sum", reward_weights=[2.0, 0.5], use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    prompts = [{"prompt": f"{n}"} for n in (1, 2) for _ in range(4)]
    theirs = GRPOTrainer(
        solo.model, reward_funcs=[function("first"), function("second")], args=arguments,
        train_dataset=Dataset.from_list(prompts), processing_class=solo.tokenizer,
    )  # fmt: skip
    with torch.no_grad():
        expected = theirs._generate_and_score_completions([dict(row) for row in prompts])["advantages"].tolist()

    ours = grpo_trainer_of(
        tmp_path / "ours", [function("first"), function("second")], CHATS, reward_weights=[2.0, 0.5],
        advantage=AdvantageConfig(**APART, post=("whiten",)),
    )  # fmt: skip
    batch = ours.advantage(ours.score(ours.collect(ours.next_batch())))
    found = groups(batch)
    assert [a for own in found.values() for a in own] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": {"rules": ["team_mean"]}}, "reward.rules other than own changes their sum"),
        ({"reward": {"rules": []}}, "reward.share: all changes their sum"),
        ({"reward": {"sources": {"label": 1.0}}}, "needs two rewards with a weight"),
        ({"ppo": {"kl_in": "reward", "kl_estimator": "k1"}}, "ppo.kl_coef with kl_in: reward changes their sum"),
        ({"ppo": {"missing_eos_penalty": 1.0}}, "ppo.missing_eos_penalty changes their sum"),
    ],
)
def test_what_would_change_the_sum_of_rewards_is_refused(tmp_path, change, words):
    values = recipe_values("gdpo", tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        from_dict(values)


# -- GiGPO -------------------------------------------------------------------------------------------------------------


def games(states, won=(0, 1)):
    """Four games of three steps, of which ``won`` end with 1. ``states`` names the situation of (game, step)."""
    places = [(k, t) for k in range(4) for t in range(3)]
    return TurnBatch(
        reward=[float(t == 2 and k in won) for k, t in places], prompt=[0] * 12, rollout=[k for k, _ in places],
        agent=["ann"] * 12, turn=[t for _, t in places], order=[t for _, t in places], tokens=[1] * 12,
        state=[states.get((k, t), f"{k}{t}") for k, t in places],
    )  # fmt: skip


def test_gigpo_adds_outcomes_and_steps():
    config = load("gigpo").advantage
    states = dict.fromkeys([(k, 0) for k in range(4)], "start") | {(0, 1): "x", (2, 1): "x"}
    found = estimate(games(states), config).tolist()
    assert found[0] == found[3] == pytest.approx(1.7320, abs=1e-3) and found[6] == pytest.approx(-1.7320, abs=1e-3)
    assert found[1] == pytest.approx(1.5731, abs=1e-3) and found[7] == pytest.approx(-1.5731, abs=1e-3)
    assert found[4] == found[2] == pytest.approx(0.8660, abs=1e-3)
    alone = estimate(games(states), AdvantageConfig(**{**vars(config), "plus": ()})).tolist()
    assert alone == pytest.approx([0.8660] * 6 + [-0.8660] * 6, abs=1e-3)


def test_a_loop_gains_where_it_is_met_the_second_time():
    """One state, met twice by one game and once by three others: the shorter way from it earns more."""
    key = ("prompt", "agent", "state")
    term = AdvantageTerm(returns="reward_to_go", baseline="mean", scale="std", gamma=0.95, key=key, singleton="zero")
    config = AdvantageConfig(returns="utterance", baseline="none", scale="none", key=("prompt",), plus=(term,))
    steps = {0: ["x", "a", "x", "b"], 1: ["x", "c", "d"], 2: ["x"], 3: ["x"]}
    rewards = {0: [0, 0, 0, 1], 1: [0, 0, 1], 2: [0], 3: [0]}
    places = [(k, t) for k in steps for t in range(len(steps[k]))]
    batch = TurnBatch(
        reward=[float(rewards[k][t]) for k, t in places], prompt=[0] * len(places), rollout=[k for k, _ in places],
        agent=["ann"] * len(places), turn=[t for _, t in places], order=[t for _, t in places],
        state=[f"{k}{t}" if steps[k][t] != "x" else "x" for k, t in places],
    )  # fmt: skip
    own = [a - r for a, r in zip(estimate(batch, config).tolist(), batch.reward, strict=True)]
    met = [a for a, (k, t) in zip(own, places, strict=True) if steps[k][t] == "x"]
    assert met == pytest.approx([0.6361, 0.8229, 0.7271, -1.0931, -1.0931], abs=1e-3)


def test_gigpo_favours_the_move_that_leads_on(tmp_path):
    """Real games: of two moves from the same place, the one that leads to the goal earns more."""
    values = recipe_values("gigpo", tmp_path, branching={"group": 8})
    values["protocol"]["options"] = {"size": 4, "limit": 6}
    rng = random.Random(3)
    batch = played(scripted_trainer(values, lambda r: perfect(r) if rng.random() < 0.6 else rng.choice("UDLR")))
    by_place = defaultdict(list)
    for row in rows(batch):
        by_place[row.dialogue.prompt, row.utterance.agent, row.utterance.tags["state"]].append(row)
    several = [met for met in by_place.values() if len(met) > 1]
    assert len(several) > 5

    def earned(row):
        own = [u for u in row.dialogue.utterances if u.agent == row.utterance.agent]
        return sum(u.rewards["env"] for u in own if u.order >= row.utterance.order)

    gains = [a.advantage - b.advantage for met in several for a in met for b in met if earned(a) > earned(b) + 1e-6]
    assert gains and sum(gain > 0 for gain in gains) > 0.9 * len(gains)


@pytest.mark.parametrize(
    ("advantage", "words"),
    [
        ({"plus": [{"baseline": "ema"}]}, r"advantage.plus.0: baseline ema keeps means"),
        ({"plus": [{"returns": "turn_gae", "baseline": "critic"}]}, "advantage.plus.0: returns turn_gae with baseline critic needs"),
        ({"plus": [{"returns": "utterance", "baseline": "critic"}]}, "plus.0: returns utterance with baseline critic needs"),
        ({"plus": [{"key": ["prompt", "stat"]}]}, r"plus.0.key.*'stat'"),
        ({"plus": [{"returns": "tree_mean"}]}, "tree_mean"),
        ({"plus": [], "returns": "turn_gae", "baseline": "critic", "multi_objective_aggregation": "normalize_then_sum"}, "compares the rewards of utterances"),
    ],
)  # fmt: skip
def test_what_cannot_be_added_is_refused(tmp_path, advantage, words):
    values = recipe_values("gigpo", tmp_path, advantage=advantage)
    with pytest.raises(ConfigError, match=words):
        from_dict(values)


# -- Turn-PPO ----------------------------------------------------------------------------------------------------------


def test_turn_ppo_runs_gae_over_turns():
    config = load("turn_ppo")
    batch = TurnBatch(
        reward=[0, 0, 1], value=[0.4, 0.5, 0.7], prompt=[0] * 3, rollout=[0] * 3, agent=["ann"] * 3, turn=[0, 1, 2],
        order=[0, 1, 2],
    )  # fmt: skip
    unscaled = AdvantageConfig(**{**vars(config.advantage), "scale": "none"})
    found = estimate_all(batch, unscaled)
    assert found.advantages.tolist() == pytest.approx([0.5051, 0.4603, 0.3], abs=1e-4)
    assert found.targets.tolist() == pytest.approx([0.9051, 0.9603, 1.0], abs=1e-4)
    assert config.training.value_learning_rate == pytest.approx(10 * config.training.learning_rate)


# -- ArCHer ------------------------------------------------------------------------------------------------------------


def test_archer_values_an_utterance_by_the_state_that_follows(tmp_path):
    """Reward plus 0.95 times the next value minus this one, and nothing else."""
    update = played(scripted_trainer(recipe_values("archer", tmp_path), perfect))
    found = defaultdict(list)
    for policy, tokens in update.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            columns = update.samples[policy][sample].columns
            first = int(tokens.sampled_mask[i].nonzero()[0])
            value, advantage = float(tokens.values[i, first]), float(tokens.advantages[i, first])
            key = (columns.values["prompt"], columns.values["rollout"], columns.values["agent"])
            found[key].append((columns.values["turn"], float(tokens.score[i]), value, advantage))
    assert len(found) > 4 and max(map(len, found.values())) > 1
    for turns in found.values():
        following = [value for _, _, value, _ in sorted(turns)[1:]] + [0.0]
        for (_, reward, value, advantage), later in zip(sorted(turns), following, strict=True):
            assert advantage == pytest.approx(reward + 0.95 * later - value, abs=1e-4)


# -- ReMA --------------------------------------------------------------------------------------------------------------


def test_rema_weighs_turns_and_then_dialogues():
    config = load("rema").advantage
    batch = TurnBatch(
        reward=[1, 1, 0, 1, 1], prompt=[0] * 5, rollout=[0, 0, 1, 2, 3], agent=["meta"] * 5, turn=[0, 1, 0, 0, 0],
        order=[0, 1, 0, 0, 0], tokens=[3, 2, 4, 4, 4],
    )  # fmt: skip
    found = estimate_all(batch, config)
    assert found.weights.tolist() == [0.5, 0.5, 1, 1, 1]
    assert found.advantages.tolist() == pytest.approx([0.5, 0.5, -1.5, 0.5, 0.5], abs=1e-4)


def test_rema_gives_each_turn_one_ratio(tmp_path):
    """Through the loss: each turn has a third of its dialogue, and each token of it one part of the turn."""
    values = recipe_values("rema", tmp_path, branching={"group": 4}, task={"largest": 4}, ppo={"num_mini_batches": 1})
    values["schedule"] = {}
    trainer = scripted_trainer(
        values, lambda r: r.example.answer if rollout_of(r) % 2 else "x" * (1 + r.turn + 2 * rollout_of(r))
    )
    batch = played(trainer)
    found = rows(batch)
    at = 0
    for tokens in batch.token_batches.values():
        _, gradients = loss_and_gradients(trainer, tokens)
        dialogues = len(tokens) / 3
        own = found[at : at + len(tokens)]
        at += len(tokens)
        lengths = set()
        for row, gradient in zip(own, gradients, strict=True):
            length = len(row.utterance.response_ids)
            lengths.add(length)
            assert row.weight == pytest.approx(1 / 3) and row.advantage != 0
            assert gradient.tolist() == pytest.approx([-row.advantage / 3 / dialogues / length] * length, rel=1e-4)
        assert len(lengths) > 2
