"""Float32 copies of half-precision weights, the *master weights*, which an optimizer steps in their place.

A weight of 0.02 has neighbours 1.2e-4 away in bfloat16, so a step of 1e-6 would be rounded away. FSDP2 and DeepSpeed
keep master weights themselves. Everything else that trains weights wraps its optimizer in :class:`WithMasters`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from trl_ext.models.adapters import HALF_PRECISION

MASTER = "master"
"""The entry of an optimizer's state that holds the master weights of a parameter."""


class WithMasters(torch.optim.Optimizer):
    """An optimizer that steps master weights in the place of half-precision parameters, and others as they are.

    Its state holds the master weights of a parameter as the entry ``master``. A state without that entry goes on from
    the parameter's present weights.

    Args:
        groups: groups of parameters with options, as for any optimizer. Master weights replace parameters in them.
        build: returns the optimizer of these groups.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]):
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        """The float32 master weights of each half-precision parameter, of its shape."""
        for group in groups:
            group["params"] = [self._stepped(parameter) for parameter in group["params"]]
        self.optimizer = build(groups)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)  # for hooks of this optimizer's own
        self._share()

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is stepped for ``parameter``: itself, or new master weights."""
        if parameter.dtype not in HALF_PRECISION:
            return parameter
        self.masters[parameter] = nn.Parameter(parameter.detach().float())
        return self.masters[parameter]

    def _share(self) -> None:
        """Have the groups, the state and the defaults of the optimizer, which schedules and hooks read."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.defaults = self.optimizer.defaults

    def take_gradients(self) -> None:
        """Add the gradients of half-precision parameters to those of their master weights, and drop them.

        After each backward pass, it sums the gradients of many micro-batches in float32.
        """
        for parameter, master in self.masters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # torch has one overload for each closure
        """Step the master weights by the gradients of their parameters, and round them to the parameters."""
        self.take_gradients()
        loss = self.optimizer.step(closure)
        for parameter, master in self.masters.items():
            parameter.copy_(master)
            master.grad = None  # some loops clear the model's gradients only
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters and of their master weights."""
        self.optimizer.zero_grad(set_to_none)
        for parameter in self.masters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the master weights."""
        content = self.optimizer.state_dict()
        state = {index: dict(entries) for index, entries in content["state"].items()}
        for index, master in self._by_index().items():
            state.setdefault(index, {})[MASTER] = master.detach()
        return content | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, after the parameters were loaded."""
        state = {index: dict(entries) for index, entries in state_dict["state"].items()}
        saved = {index: entries.pop(MASTER) for index, entries in state.items() if MASTER in entries}
        self.optimizer.load_state_dict(state_dict | {"state": {i: entries for i, entries in state.items() if entries}})
        self._share()  # it has new ones
        for parameter, master in self.masters.items():
            master.copy_(parameter)
        for index, master in self._by_index().items():
            if index in saved:
                master.copy_(saved[index])

    def _by_index(self) -> dict[int, nn.Parameter]:
        """The master weights by the index of their parameter in the state."""
        masters = set(self.masters.values())
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {index: p for index, p in enumerate(parameters) if p in masters}


class MasterAdamW(WithMasters):
    """AdamW with master weights over ``params``: parameters, or groups of parameters with options."""

    def __init__(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], **options: Any):
        listed: list[Any] = list(params)
        groups = [dict(group) for group in listed] if listed and isinstance(listed[0], dict) else [{"params": listed}]
        super().__init__(groups, lambda stepped: torch.optim.AdamW(stepped, **options))
