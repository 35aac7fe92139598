"""Float32 copies of half-precision weights, the *master weights*, which an optimizer steps in their place.

A weight of 0.02 has neighbours 1.2e-4 away in bfloat16, so a step of 1e-6 would be rounded away. The strategies of
``trl_ext.sharding.replicated`` keep master weights for PPO. :class:`MasterAdamW` keeps them wherever else weights are
trained.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

HALF_PRECISION = (torch.bfloat16, torch.float16)
Masters = Sequence[tuple[nn.Parameter, nn.Parameter]]
"""Pairs of a half-precision parameter and its float32 master weights, of the same shape."""


def with_master(parameter: nn.Parameter, masters: list[tuple[nn.Parameter, nn.Parameter]]) -> nn.Parameter:
    """Return what an optimizer steps for ``parameter``: itself, or new master weights if it is in half precision.

    The new pair is added to ``masters``.
    """
    if parameter.dtype not in HALF_PRECISION:
        return parameter
    master = nn.Parameter(parameter.detach().float())
    masters.append((parameter, master))
    return master


def move_gradients(masters: Masters) -> None:
    """Add the gradients of half-precision parameters to those of their master weights, and drop them.

    The gradients of many micro-batches are therefore summed in float32.
    """
    for parameter, master in masters:
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None


@torch.no_grad()
def round_to_weights(masters: Masters) -> None:
    """Give every half-precision parameter its master weights, rounded."""
    for parameter, master in masters:
        parameter.copy_(master)


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps master weights in the place of half-precision parameters, and others as they are.

    Its state holds the master weights of a parameter as the entry ``master``. A state without that entry goes on from
    the parameter's present weights.

    Args:
        params: parameters, or groups of parameters with options, as for any optimizer.
        options: AdamW's options.
    """

    def __init__(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], **options: Any):
        self.masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        listed: list[Any] = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        super().__init__(
            [group | {"params": [with_master(p, self.masters) for p in group["params"]]} for group in groups], **options
        )

    def step(self, closure: Any = None) -> Any:
        """Step the master weights by the gradients of their parameters, and round them to the parameters."""
        move_gradients(self.masters)
        loss = super().step(closure)
        round_to_weights(self.masters)
        for _, master in self.masters:
            master.grad = None  # some loops clear the model's gradients only
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters. Those of master weights are cleared by each step."""
        super().zero_grad(set_to_none)
        for parameter, _ in self.masters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the master weights."""
        content = super().state_dict()
        state = {index: dict(entries) for index, entries in content["state"].items()}
        for index, master in self._by_index().items():
            state.setdefault(index, {})["master"] = master.detach()
        return content | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, after the parameters were loaded."""
        state = {index: dict(entries) for index, entries in state_dict["state"].items()}
        saved = {index: entries.pop("master") for index, entries in state.items() if "master" in entries}
        super().load_state_dict(state_dict | {"state": {i: entries for i, entries in state.items() if entries}})
        for parameter, master in self.masters:
            master.copy_(parameter)
        for index, master in self._by_index().items():
            if index in saved:
                master.copy_(saved[index])

    def _by_index(self) -> dict[int, nn.Parameter]:
        """The master weights by the index of their parameter in the state."""
        master_ids = {id(master) for _, master in self.masters}
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {index: p for index, p in enumerate(parameters) if id(p) in master_ids}
