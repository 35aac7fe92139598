"""FSDP2: the weights, gradients and optimizer state of a learner are distributed over processes, block by block."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trl_ext.process import distributed
from trl_ext.sharding.holder import Build, Holder, State, working_dtype
from trl_ext.sharding.shards import WEIGHT, Shard, Shards, has_shape
from trl_ext.sharding.spreading import parts, spread

Result = TypeVar("Result")
FSDP_TORCH = "2.13"
"""The oldest torch with which FSDP2 was seen to end with one process's weights.

Those between 2.8 and it were not tried.
"""


class Sharded(Holder):
    """PyTorch's FSDP2. Every transformer block is one group, the critic's head another, and everything else a third.

    Shards of the trained weights are in float32, and they are the master weights. They are gathered in the dtype of the
    model, and gradients are summed in float32. A forward of a frozen model holds one group at a time.
    """

    sharded = True

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        head: nn.Module | None,
        trained: Sequence[nn.Parameter],
        args: Any,
        accelerator: Any,
    ):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(models, head, trained, args, accelerator)
        self.dtype: Any = working_dtype(head, trained) if trained else None
        """The dtype in which trained weights are gathered."""
        for parameter in trained:
            parameter.grad = None
        plain = MixedPrecisionPolicy()
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32) if trained else plain
        self.mesh = init_device_mesh(accelerator.device.type, (distributed.size(),))
        kinds = blocks_of(*models.values()) | ({type(head).__name__} if head is not None else set())
        for group, modules in parts(self.root, kinds):
            spread(modules, accelerator.device, {id(parameter) for parameter in trained})
            # one group has one dtype, and the head computes in float32
            fully_shard(
                group,
                mesh=self.mesh,
                mp_policy=plain if group is head else policy,
                reshard_after_forward=None if trained else True,
            )

    @classmethod
    def distributes(cls, accelerator: Any) -> bool:
        return True

    def optimizer_of(self, groups: list[dict], build: Build) -> torch.optim.Optimizer:
        """Return the optimizer that ``build`` makes of ``groups``, whose shards are the master weights.

        Raises:
            WorldError: they hold the parameters from before sharding.
        """
        shards = {id(parameter) for parameter in self.root.parameters()}
        if any(id(parameter) not in shards for group in groups for parameter in group["params"]):
            raise distributed.WorldError("the optimizer was built before FSDP; name an optimizer by args.optim instead")
        return build(groups)

    def call(self, function: Callable[[], Result]) -> Result:
        return self.root(function)

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        loaded: dict[str, Tensor] = {}
        with gathered(self.root, root_stays=bool(self.names)):
            yield
            if write and distributed.is_main():
                loaded = {name: p.detach().clone() for name, p in self.root.named_parameters()}
        if write:
            scatter(dict(self.root.named_parameters()), loaded, self.mesh)

    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        scatter(dict(model.named_parameters()), dict(weights), self.mesh)

    @torch.no_grad()
    def stream(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            weight: Any = parameter.to(self.dtype)
            # between a forward and its backward, some weights are whole
            yield name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    def streamed_bytes(self, parameters: Mapping[str, nn.Parameter]) -> int:
        return sum(parameter.numel() * self.dtype.itemsize for parameter in parameters.values())

    def _of_policy(self) -> Sequence[Tensor]:
        return [parameter.to_local() for parameter in super()._of_policy()]  # type: ignore[attr-defined]  # a DTensor

    def stepped_here(self) -> int:
        return super().stepped_here() // distributed.size()  # a shard gives the number of the whole

    def backward(self, loss: Tensor, last: bool) -> None:
        (loss * distributed.size()).backward()  # FSDP divides by the number of processes

    def _sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Do nothing, because each backward pass has summed them."""

    def shards(self, weights: Collection[str] | None = None) -> Iterator[Shard]:
        state = self.optimizer.state_dict()["state"]
        by_name = {name: state.get(index, {}) for index, name in enumerate(self.names)}
        for name, parameter in self.root.named_parameters():
            start = self._start(parameter)
            if weights is None or name in weights:
                yield Shard(name, WEIGHT, start, parameter.to_local().flatten())
            for part, value in by_name.get(name, {}).items():
                if has_shape(value, parameter.shape):
                    yield Shard(name, part, start, value.to_local().flatten())

    @torch.no_grad()
    def load_shards(self, saved: Shards, rest: State, groups: list[dict]) -> None:
        parameters = dict(self.root.named_parameters())
        for name, parameter in parameters.items():
            if not saved.lacks(name):
                self._read(parameter, saved, name, WEIGHT)
        state: State = {}
        for index, name in enumerate(self.names):
            if index in rest:
                parts = {part: torch.zeros_like(parameters[name]) for part in saved.parts(name)}
                for part, value in parts.items():
                    self._read(value, saved, name, part)
                state[index] = dict(rest[index]) | parts
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _start(self, value: Any) -> int:
        """Return where this process's rows begin in the flattened whole."""
        # FSDP2 cuts the first dimension as chunk does
        rows = -(-value.shape[0] // distributed.size())
        return min(distributed.rank() * rows, value.shape[0]) * (value.numel() // max(value.shape[0], 1))

    def _read(self, value: Any, saved: Shards, name: str, part: str) -> None:
        local, start = value.to_local(), self._start(value)
        local.copy_(saved.read(name, part, start, start + local.numel()).view(local.shape))


def blocks_of(*models: nn.Module) -> set[str]:
    """Return the names of the classes of the models' transformer blocks, which transformers calls not to be split."""
    return {name for model in models for name in getattr(model, "_no_split_modules", None) or ()}


@contextmanager
def gathered(root: Any, root_stays: bool = False) -> Iterator[None]:
    """Gather all groups that FSDP2 has made of ``root`` and its submodules. All processes enter together.

    ``root_stays`` is whether the group of ``root`` itself stays gathered between a forward and its backward.
    """
    from torch.distributed.fsdp import FSDPModule

    root(lambda: None)  # FSDP takes the first module that runs for the root
    groups = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    saved = [(hooks, dict(hooks)) for module in root.modules() for hooks in _state_dict_hooks(module)]
    for hooks, _ in saved:
        hooks.clear()  # FSDP's hooks would make state_dict() and load_state_dict() shard the weights again
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.update(before)
        for group in groups:
            group.reshard()
            group.set_reshard_after_forward(group is not root or not root_stays, recurse=False)


@torch.no_grad()
def scatter(parameters: Mapping[str, Any], loaded: dict[str, Tensor], mesh: Any) -> None:
    """Give every process its shards of what the main process has ``loaded``. The other processes have nothing.

    Args:
        parameters: FSDP2's parameters by name.
        loaded: their whole values. It is used up.
        mesh: the device mesh that the parameters are distributed over.
    """
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in parameters.items():
        whole = loaded.pop(name, None)
        whole = torch.empty(parameter.shape, device=parameter.device) if whole is None else whole
        whole = whole.to(parameter.device, parameter.dtype)
        parameter.copy_(distribute_tensor(whole, mesh, parameter.placements))


def _state_dict_hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
