"""The categorical critic: histograms of returns, values of distributions, and their loss."""

import math

import pytest
import torch
from one_policy import trainer_of

from trl_ext.ppo.options import PPOOptions
from trl_ext.ppo.value_bins import ValueBins

BINS = ValueBins(0.0, 1.0, 4, 0.25)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.3, [0.3464, 0.4164, 0.1994, 0.0378]),  # inside a bin
        (0.5, [0.1424, 0.3576, 0.3576, 0.1424]),  # on an edge
        (1.0, [0.0026, 0.0429, 0.2718, 0.6827]),  # on the end of the range
        (1.7, [0.0026, 0.0429, 0.2718, 0.6827]),  # beyond the range
        (-9.0, [0.6827, 0.2718, 0.0429, 0.0026]),
    ],
)
def test_a_return_becomes_a_histogram_of_the_normal_distribution_around_it(target, expected):
    histogram = BINS.targets(torch.tensor([target]))
    assert histogram[0].tolist() == pytest.approx(expected, abs=1e-4) and histogram.sum() == pytest.approx(1.0)


def test_the_value_is_the_mean_of_the_distribution_and_the_loss_its_cross_entropy():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [5.0, 0.0, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    shares = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in logits.tolist()]
    centers = [0.125, 0.375, 0.625, 0.875]
    means = [sum(p * c for p, c in zip(row, centers, strict=True)) for row in shares]
    assert BINS.values(logits).tolist() == pytest.approx(means) and means[0] == pytest.approx(0.5)
    returns = torch.tensor([0.3, 0.9], dtype=torch.float64)
    targets = BINS.targets(returns)
    expected = [
        -sum(t * math.log(p) for t, p in zip(*rows, strict=True)) for rows in zip(targets.tolist(), shares, strict=True)
    ]
    losses = BINS.losses(logits, returns)
    assert losses.tolist() == pytest.approx(expected, abs=1e-9)
    losses.sum().backward()
    torch.testing.assert_close(logits.grad, logits.softmax(-1).detach() - targets)


def test_the_width_of_the_histogram_is_counted_in_bins():
    options = PPOOptions(value_loss="hl_gauss", value_range=[-1.0, 1.0], value_bins=100, value_sigma=0.75)
    assert ValueBins.of(options) == ValueBins(-1.0, 1.0, 100, 0.015) and ValueBins.of(PPOOptions()) is None
    for wrong in ([1.0, 0.0], [0.0], [0.0, math.inf], ["a", "b"]):
        with pytest.raises(ValueError, match="value_range: expected two numbers, the smaller one first"):
            PPOOptions(value_range=wrong)


@pytest.mark.parametrize("critic", ["head", "adapter", "model"])
def test_a_critic_of_one_policy_learns_by_bins_and_comes_back(tiny, tmp_path, critic):
    options = {"value_loss": "hl_gauss", "value_range": [0.0, 1.0], "value_bins": 11, "critic": critic}
    trainer = trainer_of(tiny, tmp_path, lora=critic == "adapter", **options, vf_coef=1.0)
    learner = trainer.learners["policy"]
    assert learner.value_head.linear.weight.shape[0] == 11
    metrics = trainer.train()
    assert learner.value_head.linear.weight.any() and metrics["loss/value_avg"] > 0
    assert metrics["val/clipfrac_avg"] == 0.0
    with pytest.raises(ValueError, match=r"value_range: value_loss hl_gauss needs the smallest and the largest return"):
        trainer_of(tiny, tmp_path / "other", value_loss="hl_gauss")
