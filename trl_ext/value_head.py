"""The critic's head: a float32 linear map from the trunk's hidden states to one value per output."""

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """``V = W h + b`` in float32, whatever the trunk's precision; several outputs for one critic per turn.

    Starts at zero, so that the first advantages are the returns themselves rather than noise.
    """

    def __init__(self, hidden_size: int, outputs: int = 1):
        super().__init__()
        self.linear = nn.Linear(hidden_size, outputs, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, output: Tensor | None = None) -> Tensor:
        """``hidden`` [M, H] -> values [M]; ``output`` [M] picks each row's output (the turn), default output 0."""
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.linear(hidden.to(self.linear.weight.dtype))
        if output is None:
            return values[:, 0]
        return values.gather(1, output.unsqueeze(1)).squeeze(1)
