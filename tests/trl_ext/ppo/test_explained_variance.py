"""The explained variance of a critic, and where there is nothing that a critic could explain."""

import pytest
import torch

from trl_ext.ppo.advantages import assign_advantages, row_metrics
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.ppo.options import PPOOptions


def explained(scores, values, has_critic=True, alone=True, **options):
    """The metrics' explained variance of answers of two tokens, each with its score and its critic's values."""
    rows = build_token_batch([Completion([1], [2, 3], True, "row", score=score) for score in scores], "cpu")
    rows.values[rows.sampled_mask] = torch.tensor(values)
    options = PPOOptions(kl_coef=0.0, **options)
    metrics = assign_advantages(rows, options, has_critic)
    again = row_metrics(rows, options, has_critic, alone)  # whitening has changed advantages alone
    assert not alone or metrics == again
    return again.get("val/explained_variance")


def test_a_critic_explains_the_share_of_variance_that_its_errors_leave():
    # returns 0, 0, 1, 1: variance 0.25; errors 0, 0, 0.5, 0.5: variance 0.0625
    assert explained([0.0, 1.0], [0.0, 0.0, 0.5, 0.5], lam=1.0) == pytest.approx(0.75)
    assert explained([0.0, 1.0], [0.5, 0.5, 0.5, 0.5], lam=1.0) == pytest.approx(0.0)


@pytest.mark.parametrize(("scores", "options"), [
    pytest.param([0.1, 0.1, 0.1], {"lam": 1.0}, id="the same returns, up to rounding"),
    pytest.param([1.0, 1.0, 1.0], {"lam": 0.5}, id="returns that differ by the critic's own values"),
    pytest.param([0.0, 0.0, 0.0], {}, id="no reward"),
    pytest.param([0.0, 1.0, 0.0], {"has_critic": False}, id="no critic"),
])  # fmt: skip
def test_there_is_no_share_of_a_variance_that_is_not_there(scores, options):
    assert explained(scores, [0.7, -0.3, 0.2, 0.9, -0.6, 0.1], **options) is None


def test_turns_of_a_dialogue_and_a_discount_give_equal_scores_something_to_explain():
    values = [0.7, -0.3, 0.2, 0.9]
    assert explained([1.0, 1.0], values, alone=False, lam=0.5) is not None
    # returns 0.5, 1, 0.5, 1: variance 0.0625; errors -0.2, 1.3, 0.3, 0.1: mean 0.375, variance 0.3169
    assert explained([1.0, 1.0], values, lam=1.0, gamma=0.5) == pytest.approx(1 - 0.316875 / 0.0625)
