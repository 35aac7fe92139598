"""The critic's head: a float32 linear map from hidden states to values."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class ValueHead(nn.Module):
    """The linear map ``V = W h + b`` in float32, whatever the precision of the hidden states.

    It may have several outputs, for example one for each turn. It starts at zero, so that the first advantages are the
    returns rather than noise.
    """

    def __init__(self, hidden_size: int, outputs: int = 1):
        super().__init__()
        self.linear = nn.Linear(hidden_size, outputs, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, output: Tensor | None = None) -> Tensor:
        """Return the values [M] of hidden states [M, H].

        ``output`` [M] picks each row's output, such as its turn. By default output 0 is taken.
        """
        with torch.autocast(hidden.device.type, enabled=False):  # ZeRO-3 keeps the weights in the model's dtype
            values = linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())
        if output is None:
            return values[:, 0]
        return values.gather(1, output.unsqueeze(1)).squeeze(1)
