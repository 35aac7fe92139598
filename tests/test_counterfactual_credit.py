"""C3 (arXiv 2603.06859) compares answers to the same transcript; its form without a critic is made of existing parts."""

import random

import pytest
import torch

from maporl.advantages import AdvantageConfig, TurnBatch, estimate

KEY = ("prompt", "agent", "parent")
LEAVES = [[1, 1, 0, 1], [0, 1, 0, 0]]


def trees(*questions):
    """Return a batch of questions, each with one row per message of the reasoner and one per answer of the actor."""
    reward, prompt, agent, parent = [], [], [], []
    for number, messages in enumerate(questions):
        first = len(reward)
        leaves = [(first + i, value) for i, values in enumerate(messages) for value in values]
        reward += [0.0] * len(messages) + [value for _, value in leaves]
        parent += [None] * len(messages) + [node for node, _ in leaves]
        agent += ["reasoner"] * len(messages) + ["actor"] * len(leaves)
        prompt += [number] * (len(messages) + len(leaves))
    return TurnBatch(reward=reward, prompt=prompt, agent=agent, parent=parent)


def credit(batch, **options):
    given = {"returns": "tree", "baseline": "mean", "scale": "std", "ddof": 0, "eps": 1e-6, "key": KEY, **options}
    return estimate(batch, AdvantageConfig(**given)).float()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "loo", "scale": "none"}, [0.5, -0.5, 1 / 3, 1 / 3, -1, 1 / 3, -1 / 3, 1, -1 / 3, -1 / 3]),
        ({}, [1, -1, 0.5774, 0.5774, -1.7321, 0.5774, -0.5774, 1.7321, -0.5774, -0.5774]),
        ({"key": ("prompt", "agent")}, [1, -1, 1, 1, -1, 1, -1, 1, -1, -1]),
    ],
    ids=["differences", "normalised", "without the transcript in the key"],
)
def test_c3_two_messages_and_four_answers_to_each(options, expected):
    torch.testing.assert_close(
        credit(trees(LEAVES), **options), torch.tensor(expected, dtype=torch.float32), atol=1e-3, rtol=0
    )


def test_leave_one_out_before_the_division_only_multiplies_the_credit():
    """For n siblings the factor is n / (n - 1): 2 for the messages and 4/3 for the answers."""
    factor = torch.tensor([2.0] * 2 + [4 / 3] * 8)
    torch.testing.assert_close(credit(trees(LEAVES), baseline="loo"), credit(trees(LEAVES)) * factor, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_equal_answers_earn_equal_credit_and_a_batch_may_be_cut_between_questions(seed):
    rng = random.Random(seed)
    questions = [[[rng.choice([0.0, 0.5, 1.0]) for _ in range(4)] for _ in range(2)] for _ in range(3)]
    batch = trees(*questions)
    whole = credit(batch)
    torch.testing.assert_close(whole, torch.cat([credit(trees(question)) for question in questions]))
    earned = {}
    for i in (i for i, parent in enumerate(batch.parent) if parent is not None):
        torch.testing.assert_close(earned.setdefault((batch.parent[i], float(batch.reward[i])), whole[i]), whole[i])
