"""Bi-level GAE (VAGEN) by hand, against the sums that define it, and through the trainer's own steps."""

import random
from collections import defaultdict
from itertools import chain

import pytest
import torch
from scripted_dialogues import assigned
from scripted_training import played, recipe_values, scripted_trainer

from trl_ext.ppo.advantages import token_rewards


def by_definition(values, rewards, gamma, lam, token_gamma, token_lam):
    """The advantages of one agent's turns, as sums. ``values`` and ``rewards`` have a list of tokens for each turn."""
    ends = [own[-1] for own in values] + [0.0]
    deltas = [rewards[k][-1] + gamma * ends[k + 1] - ends[k] for k in range(len(values))]
    found = []
    for t, own in enumerate(values):
        turn = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(values)))
        inner = [r + token_gamma * v - u for r, u, v in zip(rewards[t], own, own[1:], strict=False)]
        steps, weight = [*inner, turn], token_gamma * token_lam
        places = range(len(steps))
        found.append([sum(weight ** (j - i) * steps[j] for j in places[i:]) for i in places])
    return found


def close(found, expected, tolerance=1e-5):
    assert [len(own) for own in found] == [len(own) for own in expected]
    assert list(chain.from_iterable(found)) == pytest.approx(list(chain.from_iterable(expected)), abs=tolerance)


def test_two_turns_of_vagen_by_hand():
    """Turn 2: 1 - .7 = .3, and .7 - .6 + .5 * .3 = .25.

    Turn 1: .9 * .7 - .5 + .9 * .8 * .3 = .346, then .273 and .3365.
    """
    ann = [("ann", [0.2, 0.4, 0.5], 0.0), ("ann", [0.6, 0.7], 1.0)]
    advantages, returns = assigned([ann], 0.9, 0.8, 1.0, 0.5)
    close(advantages, [[0.3365, 0.273, 0.346], [0.25, 0.3]])
    close(returns, [[0.5365, 0.673, 0.846], [0.85, 1.0]])


def test_the_turns_of_others_are_no_turns_of_an_agent():
    ann, bob = [("ann", [0.2, 0.4, 0.5], 0.0), ("ann", [0.6, 0.7], 1.0)], ("bob", [9.0, 9.0], 5.0)
    advantages, _ = assigned([[ann[0], bob, ann[1]], [bob]], 0.9, 0.8, 1.0, 0.5)
    close([advantages[0], advantages[2]], [[0.3365, 0.273, 0.346], [0.25, 0.3]])
    close([advantages[1], advantages[3]], [[-2.0, -4.0], [-2.0, -4.0]])


def drawn(rng):
    """A random agent: for each turn the values of its tokens, and its score."""
    return [
        ("ann", [rng.uniform(-1, 1) for _ in range(rng.randint(1, 6))], rng.uniform(-1, 1))
        for _ in range(rng.randint(1, 5))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_its_definition_says(seed):
    rng = random.Random(seed)
    turns, weights = drawn(rng), [rng.uniform(0.5, 1) for _ in range(4)]
    scores = [[0.0] * (len(values) - 1) + [score] for _, values, score in turns]
    advantages, returns = assigned([turns], *weights)
    expected = by_definition([values for _, values, _ in turns], scores, *weights)
    close(advantages, expected)
    targets = [[a + v for a, v in zip(own, said[1], strict=True)] for own, said in zip(expected, turns, strict=True)]
    close(returns, targets)


def test_vagen_runs_gae_over_turns_and_then_within_them(tmp_path):
    """Through the trainer: 0.95 between turns, 1 within them, both lambdas 1, and whitened over all tokens."""
    trainer = scripted_trainer(
        recipe_values("vagen", tmp_path), lambda request: "so " * (request.turn % 3) + request.ask.tags["moves"][0]
    )
    (learner,) = trainer.learners.values()
    torch.nn.init.normal_(learner.value_head.linear.weight, generator=torch.Generator().manual_seed(0))
    batch = played(trainer)
    ((policy, tokens),) = batch.token_batches.items()
    rewards, turns = token_rewards(tokens, trainer.args), defaultdict(list)
    for i, sample in enumerate(tokens.sample.tolist()):
        columns, mask = batch.samples[policy][sample].columns, tokens.sampled_mask[i]
        prompt, rollout, agent, turn = map(columns.values.get, ("prompt", "rollout", "agent", "turn"))
        turns[prompt, rollout, agent].append((turn, i, mask, columns.credit))
    assert len(turns) > 4 and max(map(len, turns.values())) > 2
    expected = torch.zeros_like(tokens.advantages)
    for own in turns.values():
        own.sort(key=lambda turn: turn[0])
        picked = [[column[i][mask].tolist() for _, i, mask, _ in own] for column in (tokens.values, rewards)]
        for (_, i, mask, credit), advantages in zip(own, by_definition(*picked, 0.95, 1.0, 1.0, 1.0), strict=True):
            assert rewards[i][mask][-1] == pytest.approx(credit, abs=1e-4), "the KL is 0 yet"
            expected[i, mask] = torch.tensor(advantages)
    everything = expected[tokens.sampled_mask]
    assert float(tokens.values[tokens.sampled_mask].std()) > 1e-3
    torch.testing.assert_close(
        tokens.returns[tokens.sampled_mask], everything + tokens.values[tokens.sampled_mask], atol=1e-4, rtol=0
    )
    whitened = (everything - everything.mean()) / everything.std()
    torch.testing.assert_close(tokens.advantages[tokens.sampled_mask], whitened, atol=1e-4, rtol=0)
    assert bool((tokens.value_mask == tokens.sampled_mask).all()), "the critic learns at every token"
