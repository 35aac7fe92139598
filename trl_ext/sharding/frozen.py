"""Frozen models, such as references, frozen agents and past opponents, under the strategy of the policies that train.

A frozen model that is whole in every process costs as much as a policy, and policies may be distributed over all
processes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trl_ext.process import distributed
from trl_ext.sharding.spreading import Received, parts, spread

Result = TypeVar("Result")


class Whole(nn.Module):
    """All trainable modules of a learner as one module. Its forward runs a given function.

    DeepSpeed and FSDP wrap a single module and hook into its forward.
    """

    def __init__(self, models: dict[str, nn.Module], head: nn.Module | None):
        super().__init__()
        self.models = nn.ModuleDict(models)
        self.head = head

    def forward(self, function: Callable[[], Result]) -> Result:
        """Return ``function()``."""
        return function()


class Frozen:
    """A frozen model that is whole in every process. It is also the base class of the distributed ones."""

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function``, which makes forward passes of the model, and return its result.

        Processes that share a model call this together.
        """
        return function()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every process the whole weights, to sample. All processes enter together."""
        yield

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Replace the parameters of ``model``, which this holds, by the ``weights`` of the main process.

        The other processes need none. All processes call this together, outside of :meth:`whole`.
        """
        for name, parameter in model.named_parameters():
            if distributed.rank() == 0:
                parameter.copy_(weights[name])
            distributed.broadcast_weights([parameter])


class FrozenShards(Frozen):
    """A frozen model whose weights FSDP2 distributes. Every transformer block is one group, and everything else
    another.

    A forward holds one group at a time.

    Args:
        model: the model, with the main process's weights. The other processes may have it on the meta device.
        device: the device that reads it.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.mesh = init_device_mesh(device.type, (distributed.size(),))
        self.root: Any = Whole({"model": model.requires_grad_(False)}, None)
        for group, modules in parts(self.root, blocks_of(model)):
            spread(modules, device)
            fully_shard(group, mesh=self.mesh, reshard_after_forward=True)

    def call(self, function: Callable[[], Result]) -> Result:
        return self.root(function)

    @contextmanager
    def whole(self) -> Iterator[None]:
        with gathered(self.root):
            yield

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        scatter(dict(model.named_parameters()), dict(weights), self.mesh)


class FrozenZero(Frozen):
    """A frozen model whose weights ZeRO-3 distributes.

    Args:
        model: the model, with the main process's weights. The other processes may have it on the meta device.
        device: the device that reads it.
        config: DeepSpeed's configuration, with stage 3.
    """

    def __init__(self, model: nn.Module, device: torch.device, config: dict[str, Any]):
        import deepspeed

        self.root = Whole({"model": model.requires_grad_(False)}, None)
        partition(self.root, device, config)
        zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_optimizer"}
        self.engine, *_ = deepspeed.initialize(model=self.root, config=config | {"zero_optimization": zero})

    def call(self, function: Callable[[], Result]) -> Result:
        # results bypass the engine, which searches a forward's result for tensors and supports few types
        results: list[Result] = []
        self.engine(lambda: results.append(function()))
        return results[0]

    @contextmanager
    def whole(self) -> Iterator[None]:
        with gathered_by_zero(self.engine, list(self.root.parameters())):
            yield

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        import deepspeed

        for name, parameter in model.named_parameters():  # memory need not hold the whole model
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if distributed.rank() == 0:
                    parameter.copy_(weights[name])


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


def partition(root: nn.Module, device: torch.device, config: dict[str, Any]) -> None:
    """Distribute the parameters of ``root`` by ZeRO-3, module by module, with the main process's values.

    DeepSpeed's engine would do it too, but only after each process has moved the whole model to its device.
    """
    import deepspeed

    received: Received = {}
    for module in list(root.modules()):
        spread([module], device, received=received)
        if parameters := list(module.parameters(recurse=False)):
            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=config)


@contextmanager
def gathered_by_zero(engine: Any, parameters: list[nn.Parameter], write: bool = False) -> Iterator[None]:
    """Gather ``parameters`` that ZeRO-3 has distributed. With ``write``, the main process's values count afterwards."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None), without_hooks(engine):
        yield


@contextmanager
def without_hooks(engine: Any) -> Iterator[None]:
    """Take ZeRO-3's hooks off the modules of ``engine``, and put them back where they were.

    In front of each module they would gather its weights, and after it distribute them again although all are needed.
    """
    offload = getattr(
        engine.optimizer, "parameter_offload", engine.optimizer
    )  # an engine that only reads has no optimizer
    numbers = {hook.id for hook in (*offload.forward_hooks, *offload.backward_hooks)}
    modules = list(offload.module.modules())
    saved = [(hooks, dict(hooks)) for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()  # after an interrupted forward it would count as in use for ever
    for hooks, _ in saved:
        for number in numbers & hooks.keys():
            del hooks[number]
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.clear()
            hooks.update(before)
