"""Rewards of single tokens, and the weights of reward sources, through the trainer's own steps."""

import json
import math
import random

import numpy as np
import pytest
import torch
from one_policy import QUESTIONS, classifier, config, trainer_of

from trl_ext import PPOv2Trainer
from trl_ext.learning.trained import NonFiniteError
from trl_ext.ppo.advantages import assign_advantages, token_rewards
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.ppo.options import PPOOptions
from trl_ext.trainer.scoring import RewardError, assign_scores, call_reward_functions


def completion(tokens, ended=True, **values):
    return Completion([1, 2], list(range(3, 3 + tokens)), ended, "one", **values)


def scored(trainer):
    return trainer.score(trainer.collect(trainer.next_batch()))


def test_scores_are_earned_at_their_tokens_and_the_kl_penalty_is_subtracted_everywhere():
    rows = build_token_batch([completion(3, score=6.0, token_scores=[1.0, 2.0, 3.0]), completion(2, score=20.0)], "cpu")
    rows.old_logprobs = torch.where(rows.sampled_mask, torch.tensor([[0.0, 0.0, 1.0, 2.0, 3.0]]), 0.0)
    assert token_rewards(rows, PPOOptions(kl_coef=0.5)).tolist() == [[0, 0, 0.5, 1, 1.5], [0, 0, -0.5, 19, 0]]
    assert token_rewards(rows, PPOOptions(kl_coef=0.0)).tolist() == [[0, 0, 1, 2, 3], [0, 0, 0, 20, 0]]
    assert rows.score.tolist() == [6, 20]


def test_token_rewards_enter_gae_at_their_tokens(tiny, tmp_path):
    """With values and KL of 0, an advantage before whitening is the discounted sum of later rewards."""
    function = lambda p, c, completion_ids, **k: [[float(i) for i in range(len(ids))] for ids in completion_ids]  # noqa: E731
    trainer = trainer_of(tiny, tmp_path, reward_funcs=function, kl_coef=0.0, critic="none", gamma=0.5)
    batch = trainer.advantage(scored(trainer))
    rows = batch.token_batches["policy"]
    for row, done in enumerate(batch.completions):
        expected, later = [], 0.0
        for reward in reversed(range(len(done.response_ids))):
            later = reward + 0.5 * later
            expected.append(later)
        assert rows.returns[row][rows.sampled_mask[row]].tolist() == expected[::-1]
    lengths = [len(c.response_ids) for c in batch.completions]
    sums = [n * (n - 1) / 2 for n in lengths]
    assert batch.metrics["objective/scores"] == pytest.approx(sum(sums) / len(sums))
    assert batch.metrics["reward/<lambda>"] == pytest.approx(sum(sums) / len(sums))


def test_a_list_with_the_whole_score_at_the_last_token_equals_the_number():
    generator = random.Random(0)
    for case in range(50):
        options = PPOOptions(
            kl_coef=generator.choice([0.0, 0.3]), gamma=generator.uniform(0.5, 1), lam=generator.random(),
            whiten_rewards=case % 2 == 0,
        )  # fmt: skip
        lengths = [generator.randint(1, 7) for _ in range(4)]
        scores = [generator.uniform(-5, 5) for _ in lengths]
        weight, penalty = generator.uniform(-2, 2), generator.choice([None, 0.7])
        lists = [[0.0] * (n - 1) + [s] for n, s in zip(lengths, scores, strict=True)]
        found = []
        for values in (scores, lists):
            completions = [completion(n, ended=n > 3) for n in lengths]
            assign_scores(completions, {"one": values, "two": [0.25] * 4}, [weight, 1.0], penalty)
            rows = build_token_batch(completions, "cpu")
            seeded = torch.Generator().manual_seed(case)
            rows.old_logprobs = torch.where(rows.sampled_mask, torch.randn(rows.values.shape, generator=seeded), 0.0)
            rows.values = torch.where(rows.sampled_mask, torch.randn(rows.values.shape, generator=seeded), 0.0)
            metrics = assign_advantages(rows, options)
            found.append((rows.advantages, rows.returns, [c.score for c in completions], metrics))
        for one, two in zip(*found, strict=True):
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_numbers_lists_and_none_mix_with_weights_and_the_penalty_is_at_the_last_token():
    completions = [completion(3), completion(2, ended=False), completion(1)]
    named = {"number": [1.0, 2.0, None], "list": [[0.5, 0.0, -1.0], None, [4.0]], "none": [None, None, None]}
    assign_scores(completions, named, [10.0, 2.0, 3.0], 5.0)
    assert [c.token_scores for c in completions] == [[1.0, 0.0, 8.0], None, [8.0]]
    assert [c.score for c in completions] == [9.0, 15.0, 8.0]
    with pytest.raises(RewardError, match=r"no source of \['number', 'none'\] scored completion 2"):
        assign_scores(completions, {"number": named["number"], "none": named["none"]}, [1.0, 1.0], None)


def test_the_ids_are_those_that_were_sampled_for_who_asks():
    seen = {}

    def asks(prompts, completions, completion_ids):
        seen["asks"] = completion_ids
        return [0.0]

    def takes_all(prompts, completions, **columns):
        seen["takes_all"] = columns
        return [0.0]

    class Other:
        def __call__(self, prompts, completions, number):
            return [0.0]

    assert call_reward_functions([Other()], ["p"], ["c"], [[3, 4]], {"number": [1]}) == {"Other": [0.0]}
    call_reward_functions([asks, takes_all], ["p"], ["c"], [[3, 4]], {})
    assert seen == {"asks": [[3, 4]], "takes_all": {"completion_ids": [[3, 4]], "trainer_state": None}}


@pytest.mark.parametrize("value", [[1, 2.5], (1, 2.5), torch.tensor([1, 2.5]), np.array([1, 2.5]), [torch.tensor(1.0), np.float32(2.5)]])  # fmt: skip
def test_lists_may_be_tuples_tensors_and_arrays(value):
    given = call_reward_functions([lambda p, c: [value]], ["p"], ["c"], [[3, 4]], {})
    assert given == {"<lambda>": [[1.0, 2.5]]}


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor([2.0]), np.array([2.0]), np.float32(2), 2, True + 1])
def test_one_number_may_have_any_kind(value):
    assert call_reward_functions([lambda p, c: [value]], ["p"], ["c"], [[3, 4]], {}) == {"<lambda>": [2.0]}


@pytest.mark.parametrize("value, error, message", [
    ([1.0], RewardError, r"reward 'bad': expected one number, None, or a list of 2 numbers, one for each sampled token .completion_ids., got a list of 1 for completion 0 .'text'."),
    ([], RewardError, r"a list of 2 numbers.* got a list of 0 for completion 0"),
    ([1.0, None], RewardError, r"expected numbers or None, got None for token 1 of completion 0"),
    ([[1.0], [2.0]], RewardError, r"got \[1\.0\] for token 0 of completion 0"),
    (torch.ones(2, 2), RewardError, r"got \[1\.0, 1\.0\] for token 0"),
    ("ab", RewardError, r"expected numbers or None, got 'ab' for completion 0"),
    ({0: 1.0, 1: 2.0}, RewardError, r"got \{0: 1\.0, 1: 2\.0\} for completion 0"),
    ([1.0, math.nan], NonFiniteError, r"reward 'bad': value nan for token 1 of completion 0"),
    ([-math.inf, 1.0], NonFiniteError, r"value -inf for token 0 of completion 0"),
    (torch.tensor([1.0, math.nan]), NonFiniteError, r"value nan for token 1"),
    (math.nan, NonFiniteError, r"value nan for completion 0"),
    (1e39, NonFiniteError, r"value 1e\+39 for completion 0"),
    (10**400, NonFiniteError, r"value 1000.* for completion 0"),
])  # fmt: skip
def test_wrong_values_are_refused_by_name(value, error, message):
    def bad(prompts, completions):
        return [value]

    with pytest.raises(error, match=message):
        call_reward_functions([bad], ["p"], ["text"], [[3, 4]], {})


def test_a_weight_acts_on_every_kind_of_source(tiny, tmp_path):
    async def later(prompts, completions, **columns):
        return [2.0] * len(completions)

    def tokens(prompts, completions, completion_ids, **columns):
        return [[1.0] * len(ids) for ids in completion_ids]

    model, tokenizer = tiny()
    reward = classifier(tokenizer)
    trainer = PPOv2Trainer(
        config(tmp_path), tokenizer, model, None, reward, QUESTIONS, reward_funcs=[later, tokens],
        reward_weights=[100.0, 10.0, -0.5],
    )  # fmt: skip
    batch = scored(trainer)
    for number, done in enumerate(batch.completions):
        by_model = trainer.rewards["reward_model"][number]
        assert done.token_scores[:-1] == [-0.5] * (len(done.response_ids) - 1)
        assert done.token_scores[-1] == pytest.approx(100 * by_model + 20 - 0.5)
    assert batch.metrics["reward/later"] == 2.0


def test_an_evaluation_and_the_file_of_completions_say_what_was_earned(tiny, tmp_path):
    def halves(prompts, completions, completion_ids, **columns):
        return [[0.5] * len(ids) for ids in completion_ids]

    trainer = trainer_of(tiny, tmp_path, total_episodes=16, eval_dataset=QUESTIONS[:3], reward_funcs=halves)
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(records) == 3
    for record in records:
        tokens = record["rewards"]["halves"]
        assert record["score"] == 0.5 * len(tokens) and set(tokens) == {0.5}
    metrics = trainer.evaluate()
    assert metrics["eval_halves"] == metrics["eval_score"] == sum(r["score"] for r in records) / 3


def test_the_policy_learns_which_token_was_rewarded(tiny, tmp_path):
    """Every 'a' earns 1 where it is said. A score of the whole answer would not tell the tokens apart."""

    def says_a(prompts, completions, completion_ids, **columns):
        return [[float(token == wanted) for token in ids] for ids in completion_ids]

    options = {"total_episodes": 16 * 5, "gamma": 0.0, "critic": "none", "learning_rate": 1e-2}
    trainer = trainer_of(tiny, tmp_path, reward_funcs=says_a, **options)
    [wanted] = trainer.learners["policy"].tokenizer.encode("a", add_special_tokens=False)
    shares = []
    for _ in range(2):
        batch = trainer.collect(trainer.next_batch())
        ids = [token for c in batch.completions for token in c.response_ids]
        shares.append(ids.count(wanted) / len(ids))
        if len(shares) == 1:
            trainer.train()
    assert shares[1] > shares[0] + 0.3
