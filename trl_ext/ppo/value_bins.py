"""The categorical critic: values as a distribution over bins, trained on histograms of returns."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from trl_ext.ppo.options import PPOOptions


@dataclass(frozen=True)
class ValueBins:
    """B bins of equal width from ``low`` to ``high``.

    A return becomes the histogram of a normal distribution around it, cut at the ends of the range (HL-Gauss;
    Farebrother et al. 2024, "Stop Regressing", arXiv 2403.03950), and the loss is the cross-entropy to it. The value of
    a distribution is its mean over the bins' centers. A return beyond the range counts as its nearest end.

    Args:
        low: where the first bin begins.
        high: where the last bin ends.
        count: the number B of bins.
        sigma: the standard deviation of the normal distribution, in the units of returns.
    """

    low: float
    high: float
    count: int
    sigma: float

    @classmethod
    def of(cls, options: PPOOptions) -> "ValueBins | None":
        """Return the bins that ``options`` ask for, or None if the critic's values are numbers.

        Raises:
            ValueError: ``value_range`` is not known.
        """
        if options.value_loss != "hl_gauss":
            return None
        if options.value_range is None:
            raise ValueError(
                "value_range: value_loss hl_gauss needs the smallest and the largest return, such as [0.0, 1.0] where "
                "answers earn 0 to 1; set it"
            )
        low, high = options.value_range
        width = (high - low) / options.value_bins
        return cls(low, high, options.value_bins, width * options.value_sigma)

    def _edges(self, like: Tensor) -> Tensor:
        # in float64, because neighbouring edges differ little
        return torch.linspace(self.low, self.high, self.count + 1, dtype=torch.float64, device=like.device)

    def targets(self, returns: Tensor) -> Tensor:
        """Return the histograms [M, B] of ``returns`` [M]."""
        distance = self._edges(returns) - returns.double().clamp(self.low, self.high).unsqueeze(-1)
        below = torch.erf(distance / (math.sqrt(2) * self.sigma))
        histogram = below.diff(dim=-1) / (below[:, -1:] - below[:, :1])
        return histogram.to(returns.dtype)

    def values(self, logits: Tensor) -> Tensor:
        """Return the values [M] of distributions with ``logits`` [M, B]."""
        edges = self._edges(logits)
        centers = ((edges[:-1] + edges[1:]) / 2).to(logits.dtype)
        return logits.softmax(-1) @ centers

    def losses(self, logits: Tensor, returns: Tensor) -> Tensor:
        """Return the cross-entropy [M] of distributions with ``logits`` [M, B] to the histograms of ``returns`` [M]."""
        return -(self.targets(returns) * log_softmax(logits, -1)).sum(-1)
