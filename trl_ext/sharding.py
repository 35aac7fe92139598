"""How a learner's weights, gradients and optimizer lie over the processes of a run.

``Replicated``: every process holds everything and gradients are summed before a step, in one message per dtype. No wrapper
stands around the model, processes may have different amounts of work, and adapters may share a base.
``Zero``: DeepSpeed ZeRO, an engine of its own for each learner. ``Sharded``: PyTorch's FSDP2 (``fully_shard``).

Which one is the launcher's choice: a DeepSpeed or FSDP configuration of accelerate, or neither. Losses are parts of the mean
over the minibatch of *all* processes (:class:`trl_ext.losses.Totals`), so gradients are summed, never averaged.
"""

import copy
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer

from trl_ext import distributed
from trl_ext.forward import base_of

Result = TypeVar("Result")
State = dict[int, dict[str, Any]]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Whole(nn.Module):
    """Everything of a learner that trains, as one module, whose forward is whatever it is told to run."""

    def __init__(self, parts: dict[str, nn.Module]):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, function: Callable[[], Result]) -> Result:
        return function()


class Replicated:
    """Every process holds everything."""

    sharded = False

    def __init__(self, parts: dict[str, nn.Module], args: Any, accelerator: Any):
        self.optimizer: Any = None
        self.masters: list[tuple[nn.Parameter, nn.Parameter]] = []

    def with_masters(self, groups: list[dict], dtype: torch.dtype | None) -> list[dict]:
        """``groups`` with float32 copies in place of parameters of ``dtype``, so that steps too small for it add up."""

        def master(parameter: nn.Parameter) -> nn.Parameter:
            if parameter.dtype != dtype:
                return parameter
            copy_ = nn.Parameter(parameter.detach().float())
            self.masters.append((parameter, copy_))
            return copy_

        return [group | {"params": [master(p) for p in group["params"]]} for group in groups]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take charge of the optimizer; the main process's weights count."""
        self.optimizer = optimizer
        if distributed.size() > 1:
            for parameter in self._parameters():
                torch.distributed.broadcast(parameter.data, src=0)
        self._from_masters()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a forward (and nothing else) of the learner's models."""
        return function()

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        """Every process sees the whole weights, for generating, saving, or (``write``) loading; all enter together."""
        yield

    def rounds(self, number: int, device: torch.device) -> int:
        """How many forwards every process makes where this one has work for ``number``: as many where they make them together."""
        return distributed.all_reduce_max(number, device) if self.sharded else number

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of ``loss``; ``last`` says that a step comes next."""
        loss.backward()

    def step(self, largest_norm: float) -> float:
        """Sum gradients over processes, clip, step, clear; the norm before clipping. A norm that is no number: no step."""
        parameters = self._parameters()
        for parameter, master in self.masters:
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if (
            not self.sharded and distributed.size() > 1
        ):  # everybody has the same gradients in the message, whatever it worked on
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce_tensors([p.grad for p in parameters if p.grad is not None])
        total: Any = torch.nn.utils.clip_grad_norm_(parameters, largest_norm)
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        if math.isfinite(norm):
            self.optimizer.step()
            self._from_masters()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def _from_masters(self) -> None:
        for parameter, master in self.masters:
            parameter.copy_(master)

    def optimizer_state(self) -> State:
        """The optimizer's state by number of the parameter, whole, on every process; ``master`` is a float32 copy."""
        state = {index: dict(entries) for index, entries in self.optimizer.state_dict()["state"].items()}
        numbers = {id(p): index for index, p in enumerate(self._parameters())}
        for _, master in self.masters:
            state.setdefault(numbers[id(master)], {})["master"] = master.detach()
        return state

    def optimizer_groups(self) -> list[dict]:
        """The options of the optimizer's groups, each with the numbers of its parameters."""
        return self.optimizer.state_dict()["param_groups"]

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        """Inverse of :meth:`optimizer_state` and :meth:`optimizer_groups`, after the weights have been loaded."""
        parameters = self._parameters()
        with torch.no_grad():
            for parameter, master in self.masters:
                master.copy_(parameter)
            for index, entries in state.items():
                if "master" in entries:
                    parameters[index].copy_(entries.pop("master"))
        state = {index: entries for index, entries in state.items() if entries}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class Sharded(Replicated):
    """PyTorch's FSDP2: every transformer block, and the rest, is a group of its own."""

    sharded = True

    def __init__(self, parts: dict[str, nn.Module], args: Any, accelerator: Any):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(parts, args, accelerator)
        self.mesh = init_device_mesh(accelerator.device.type, (distributed.size(),))
        self.root: Any = Whole(parts)
        blocks = {name for part in parts.values() for name in getattr(part, "_no_split_modules", None) or ()}
        for module in list(self.root.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=self.mesh)
        fully_shard(self.root, mesh=self.mesh)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def call(self, function: Callable[[], Result]) -> Result:
        return self.root(function)

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        self.root(lambda: None)  # FSDP takes for the root what runs first
        groups = [module for module in self.root.modules() if isinstance(module, FSDPModule)]
        for group in groups:
            group.set_reshard_after_forward(False, recurse=False)
            group.unshard()
        loaded: dict[str, Tensor] = {}
        kept = [(hooks, dict(hooks)) for module in self.root.modules() for hooks in _state_dict_hooks(module)]
        for hooks, _ in kept:
            hooks.clear()  # of FSDP: state_dict() and load_state_dict() would cut the weights again
        try:
            yield
            if write:
                loaded = {name: p.detach().clone() for name, p in self.root.named_parameters()}
        finally:
            for hooks, before in kept:
                hooks.update(before)
            for group in groups:
                group.reshard()
                group.set_reshard_after_forward(group is not self.root, recurse=False)
        self._scatter(loaded)

    @torch.no_grad()
    def _scatter(self, loaded: dict[str, Tensor]) -> None:
        from torch.distributed.tensor import distribute_tensor

        for name, parameter in self.root.named_parameters():
            if name in loaded:
                parameter.copy_(distribute_tensor(loaded[name], self.mesh, parameter.placements))

    def backward(self, loss: Tensor, last: bool) -> None:
        self.root.set_requires_gradient_sync(last)
        (loss * distributed.size()).backward()  # FSDP divides by the number of processes

    def optimizer_state(self) -> State:
        return {
            index: {key: v.full_tensor() if hasattr(v, "full_tensor") else v for key, v in entries.items()}
            for index, entries in super().optimizer_state().items()
        }

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        from torch.distributed.tensor import distribute_tensor

        parameters: list[Any] = self._parameters()
        state = {
            index: {
                key: distribute_tensor(v, self.mesh, parameters[index].placements)
                if isinstance(v, Tensor) and v.shape == parameters[index].shape
                else v
                for key, v in entries.items()
            }
            for index, entries in state.items()
        }
        super().load_optimizer_state(state, groups)


def _state_dict_hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks


class Zero(Replicated):
    """DeepSpeed ZeRO: an engine for this learner alone, configured as accelerate was."""

    sharded = True

    def __init__(self, parts: dict[str, nn.Module], args: Any, accelerator: Any):
        super().__init__(parts, args, accelerator)
        self.root = Whole(parts)
        self.config = deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, args, self.root)
        self.stage = self.config["zero_optimization"]["stage"]
        self.own: list[nn.Parameter] = []
        self.numbers: list[list[int]] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        import deepspeed

        self.optimizer = optimizer
        self.own = self._parameters()  # DeepSpeed puts flat ones in their place
        self.numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        self.engine, *_ = deepspeed.initialize(model=self.root, optimizer=optimizer, config=self.config)

    def call(self, function: Callable[[], Result]) -> Result:
        # past DeepSpeed, which looks for tensors in what a forward returns and knows few types
        results: list[Result] = []
        self.engine(lambda: results.append(function()))
        return results[0]

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        import deepspeed
        from trl.models.utils import add_hooks, remove_hooks

        loaded: list[Tensor] = []
        parameters = list(self.root.parameters()) if self.stage == 3 else []
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            if self.stage == 3:
                remove_hooks(self.engine)
            try:
                yield
                if write:
                    loaded = [p.detach().clone() for p in self.own]
            finally:
                if self.stage == 3:
                    add_hooks(self.engine)
        for parameter, value in zip(self.own, loaded, strict=bool(loaded)):  # the optimizer's own copies
            deepspeed.utils.safe_set_full_fp32_param(parameter, value.float())

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * distributed.size())  # DeepSpeed divides by the number of processes

    def step(self, largest_norm: float) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm() or 0.0)

    def optimizer_state(self) -> State:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = [entry["step"] for entry in self.optimizer.state.values() if "step" in entry]
        if not steps:
            return {}
        self._link()
        found: State = {}
        for index, parameter in enumerate(self.own):
            moments = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            found[index] = {key: value.clone() for key, value in moments.items()} | {"step": copy.deepcopy(steps[0])}
        return found

    def optimizer_groups(self) -> list[dict]:
        groups = self.optimizer.param_groups
        return [{**group, "params": numbers} for group, numbers in zip(groups, self.numbers, strict=True)]

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if not state:
            return
        for flat in self._flat():
            zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
            self.optimizer.state[flat] = zeros | {"step": copy.deepcopy(state[0]["step"])}
        self._link()
        for index, entries in state.items():
            for key in MOMENTS:
                safe_set_full_optimizer_state(self.own[index], entries[key].to(self.own[index].device), key)

    def _flat(self) -> list[Tensor]:
        """This process's parts of the weights as the optimizer sees them, a tensor for each group."""
        names = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self.engine.optimizer, names))

    def _link(self) -> None:
        """Let DeepSpeed find its optimizer's state by parameter: by itself it looks after the first group's first step."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if self.stage < 3:
            for group, flat in zip(self.engine.optimizer.bit16_groups, self._flat(), strict=True):
                lazy_init_hp_params_optimizer_state(group, flat, self.optimizer.state)


def deepspeed_config(given: dict[str, Any], args: Any, module: nn.Module) -> dict[str, Any]:
    """The launcher's DeepSpeed configuration, completed: what accelerate would fill in, and what belongs to the trainer."""
    config = {key: copy.deepcopy(value) for key, value in given.items() if key not in ("optimizer", "scheduler")}
    zero = config.get("zero_optimization", {"stage": 2})
    config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    half = any(p.dtype == torch.bfloat16 for p in module.parameters())
    for key in ("train_batch_size", "fp16"):
        config.pop(key, None)
    return config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm or 0.0,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def build_optimizer(groups: list[dict], args: Any, kind: type[Replicated]) -> torch.optim.Optimizer:
    """The optimizer that ``args.optim`` names, a name of ``transformers.training_args.OptimizerNames``, over ``groups``."""
    if kind.sharded and args.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise ValueError(
            f"optim: {args.optim.value!r} keeps a state that {kind.__name__} cannot cut; expected adamw_torch or adamw_torch_fused, or "
            "start without DeepSpeed and FSDP"
        )
    made, options = Trainer.get_optimizer_cls_and_kwargs(args)
    return made(groups, **(options | {"weight_decay": args.weight_decay}))


def check_bases(models: dict[str, Any], accelerator: Any) -> None:
    """Raise if weights would be cut for two policies at once."""
    owners: dict[int, list[str]] = {}
    for name, model in models.items():
        owners.setdefault(id(base_of(model)), []).append(name)
    shared = next((names for names in owners.values() if len(names) > 1), None)
    if shared and strategy_of(accelerator).sharded:
        raise distributed.WorldError(
            f"policies {' and '.join(map(repr, shared))} are adapters of one base, which {strategy_of(accelerator).__name__} "
            "would cut up once for each; start without DeepSpeed or FSDP (every process then holds the base, and only "
            "adapters have gradients), or give each policy a model of its own"
        )


def strategy_of(accelerator: Any, environment: Any = os.environ) -> type[Replicated]:
    """The strategy that the launcher was configured for."""
    state = getattr(accelerator, "state", None)
    wanted = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if getattr(state, "deepspeed_plugin", None) is not None:
        return Zero
    if wanted:
        raise distributed.WorldError(
            "the launcher asks for DeepSpeed, which accelerate turns off with use_cpu: true; set training.use_cpu: false "
            "(a machine without accelerators trains on its CPU anyway; DS_ACCELERATOR=cpu tells DeepSpeed)"
        )
    # accelerate drops its FSDP plugin on CPUs and goes on with whole copies, so its environment is asked
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return Sharded
    return Replicated
