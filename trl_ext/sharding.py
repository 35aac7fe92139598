"""Strategies that distribute a learner's weights, gradients and optimizer over the processes of a run.

- ``Replicated``: every process holds everything. Gradients are summed before a step, in one message for each dtype. The
  model has no wrapper, processes may have different amounts of work, and adapters may share a base.
- ``Zero``: DeepSpeed ZeRO, with a separate engine for each learner.
- ``Sharded``: PyTorch's FSDP2 (``fully_shard``).

The launcher chooses the strategy by a DeepSpeed or FSDP configuration of accelerate, or by neither. Each process
computes its share of the mean loss over the minibatch of *all* processes (:class:`trl_ext.losses.Totals`). Gradients
are therefore summed, never averaged.
"""

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Trainer

from trl_ext import distributed
from trl_ext.forward import base_of
from trl_ext.frozen import (
    Frozen,
    FrozenShards,
    FrozenZero,
    Whole,
    blocks_of,
    gathered,
    gathered_by_zero,
    partition,
    scatter,
)
from trl_ext.master_weights import HALF_PRECISION, move_gradients, round_to_weights, with_master
from trl_ext.spreading import parts, place, spread

Result = TypeVar("Result")
State = dict[int, dict[str, Any]]
MOMENTS = ("exp_avg", "exp_avg_sq")
FSDP_TORCH = "2.13"
"""The oldest torch with which FSDP2 was seen to end with one process's weights. Those between 2.8 and it were not tried."""


class Replicated:
    """The strategy in which every process holds all weights. It is also the base class of the other strategies.

    Every strategy steps float32 copies of half-precision weights, the *master weights* (:mod:`trl_ext.master_weights`), and
    rounds them afterwards.

    Args:
        models: the learner's trainable models by name.
        head: the critic's head, which is in float32, or None.
        trained: the parameters that the optimizer steps, in its order.
        args: the trainer's arguments.
        accelerator: accelerate's ``Accelerator``.
    """

    sharded = False
    """Whether the weights are distributed over the processes."""
    steps_all = False
    """Whether an optimizer step also decays parameters that had no gradient in any process."""

    @classmethod
    def distributes(cls, accelerator: Any) -> bool:
        """Return whether the strategy brings the weights to the devices itself, distributed over the processes.

        Otherwise every process holds them whole, and moves them before.
        """
        return False

    def __init__(
        self,
        models: dict[str, nn.Module],
        head: nn.Module | None,
        trained: Sequence[nn.Parameter],
        args: Any,
        accelerator: Any,
    ):
        self.optimizer: Any = None
        self.masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.half = [index for index, parameter in enumerate(trained) if parameter.dtype in HALF_PRECISION]
        """The indices of the trained parameters that are in half precision. Checkpoints hold their master weights."""

    def with_masters(self, groups: list[dict]) -> None:
        """Put float32 master weights in the place of the half-precision parameters of the optimizer's ``groups``."""
        for group in groups:
            group["params"] = [with_master(parameter, self.masters) for parameter in group["params"]]
        for parameter, _ in self.masters:
            parameter.grad = None  # a warm start leaves gradients

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the optimizer, and broadcast the main process's weights to all processes."""
        self.optimizer = optimizer
        distributed.broadcast_weights(self._parameters())
        round_to_weights(self.masters)

    def freeze(self, model: nn.Module, device: torch.device) -> Frozen:
        """Bring a frozen copy of the policy to ``device``, distributed as the policy is. All processes call this together."""
        place(model, device)
        return Frozen()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function``, which makes forward passes of the learner's models, and return its result."""
        return function()

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        """Give every process the whole weights, to sample or to save. With ``write``, weights may be loaded.

        All processes enter together.
        """
        yield

    def rounds(self, number: int, device: torch.device) -> int:
        """Return how many forwards this process must make if it has ``number`` micro-batches.

        Sharded processes must make equally many forwards, so it is then the largest number of all processes.
        """
        return distributed.all_reduce_max(number, device) if self.sharded else number

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of ``loss``. ``last`` says that an optimizer step follows."""
        loss.backward()
        move_gradients(self.masters)

    def step(self, largest_norm: float) -> float:
        """Sum gradients over processes, clip them, step the optimizer and clear the gradients.

        No step is taken if the gradient norm is NaN or infinite.

        Returns:
            The gradient norm before clipping.
        """
        parameters = self._parameters()
        move_gradients(self.masters)  # those that were set without :meth:`backward`
        if not self.sharded and distributed.size() > 1:
            # a parameter without a gradient here may have one in another process, and messages must match; one that has
            # none in any process keeps none, because an optimizer steps zeros too, by weight decay and momentum
            own = [float(p.grad is not None) for p in parameters]
            for parameter, number in zip(
                parameters, distributed.all_reduce_sum(own, parameters[0].device), strict=True
            ):
                if parameter.grad is None and number:
                    parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce_tensors([p.grad for p in parameters if p.grad is not None])
        total: Any = torch.nn.utils.clip_grad_norm_(parameters, largest_norm)
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        if math.isfinite(norm):
            self.optimizer.step()
            round_to_weights(self.masters)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def optimizer_state(self) -> State:
        """Return the optimizer's whole state by parameter index (:meth:`optimizer_entries`)."""
        return {index: entries for index, entries in self.optimizer_entries() if entries}

    def optimizer_entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the whole state of each parameter. All processes iterate together, to the end.

        The entry ``master`` holds the master weights of a parameter. If the state is distributed over processes, one parameter
        at a time is gathered into the main memory of the main process, and the other processes yield no entries.
        """
        state = self.optimizer.state_dict()["state"]
        for index, parameter in enumerate(self._parameters()):
            master = {"master": parameter.detach()} if index in self.half else {}
            yield index, state.get(index, {}) | master

    def optimizer_groups(self) -> list[dict]:
        """Return the options of the optimizer's groups, each with the indices of its parameters."""
        return self.optimizer.state_dict()["param_groups"]

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        """Load what :meth:`optimizer_state` and :meth:`optimizer_groups` returned, after the weights were loaded.

        ``state`` is used up.
        """
        parameters = self._parameters()
        with torch.no_grad():
            for parameter, master in self.masters:
                master.copy_(parameter)
            for index, entries in state.items():
                if "master" in entries:
                    parameters[index].copy_(entries.pop("master"))
        state = {index: entries for index, entries in state.items() if entries}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def stepped_here(self) -> int:
        """Return how many numbers the optimizer of this process steps."""
        return sum(p.numel() for p in self._parameters())

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class Sharded(Replicated):
    """PyTorch's FSDP2. Every transformer block is one group, the critic's head another, and everything else a third.

    Shards of the trained weights are in float32, and they are the master weights. They are gathered in the dtype of the
    model, and gradients are summed in float32.
    """

    sharded = True

    def __init__(
        self,
        models: dict[str, nn.Module],
        head: nn.Module | None,
        trained: Sequence[nn.Parameter],
        args: Any,
        accelerator: Any,
    ):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(models, head, trained, args, accelerator)
        dtype = working_dtype(head, trained)
        for parameter in trained:
            parameter.grad = None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        self.mesh = init_device_mesh(accelerator.device.type, (distributed.size(),))
        self.root: Any = Whole(models, head)
        kinds = blocks_of(*models.values()) | ({type(head).__name__} if head is not None else set())
        for group, own in parts(self.root, kinds):
            spread(own, accelerator.device, {id(parameter) for parameter in trained})
            # one group has one dtype, and the head computes in float32
            fully_shard(group, mesh=self.mesh, mp_policy=MixedPrecisionPolicy() if group is head else policy)

    @classmethod
    def distributes(cls, accelerator: Any) -> bool:
        return True

    def with_masters(self, groups: list[dict]) -> None:
        """Check that the optimizer's ``groups`` hold the shards, which are the master weights.

        Raises:
            WorldError: they hold the parameters from before sharding.
        """
        shards = {id(parameter) for parameter in self.root.parameters()}
        if any(id(parameter) not in shards for group in groups for parameter in group["params"]):
            raise distributed.WorldError(
                "the optimizer was built before FSDP replaced the weights by shards; name an optimizer by args.optim instead"
            )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def call(self, function: Callable[[], Result]) -> Result:
        return self.root(function)

    def freeze(self, model: nn.Module, device: torch.device) -> Frozen:
        return FrozenShards(model, device)

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        loaded: dict[str, Tensor] = {}
        with gathered(self.root, root_stays=True):
            yield
            if write and distributed.is_main():
                loaded = {name: p.detach().clone() for name, p in self.root.named_parameters()}
        if write:
            scatter(dict(self.root.named_parameters()), loaded, self.mesh)

    def stepped_here(self) -> int:
        return super().stepped_here() // distributed.size()  # a shard gives the number of the whole

    def backward(self, loss: Tensor, last: bool) -> None:
        (loss * distributed.size()).backward()  # FSDP divides by the number of processes

    def optimizer_entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, entries in super().optimizer_entries():
            found: dict[str, Any] = {}
            for key, value in entries.items():
                _keep_on_main(found, key, value.full_tensor() if hasattr(value, "full_tensor") else value)
            yield index, found

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        from torch.distributed.tensor import distribute_tensor

        parameters: list[Any] = self._parameters()
        for index, entries in state.items():
            own = parameters[index]
            for (
                key,
                value,
            ) in entries.items():  # each whole tensor is forgotten at once, which only the main process reads
                if isinstance(value, Tensor) and value.shape == own.shape:
                    entries[key] = distribute_tensor(value, self.mesh, own.placements)
        super().load_optimizer_state(state, groups)


def _keep_on_main(found: dict[str, Any], key: str, value: Any) -> None:
    """Copy a part of the optimizer's state to the main memory of the main process. The other processes keep nothing."""
    if distributed.is_main():
        found[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value


class Zero(Replicated):
    """DeepSpeed ZeRO, with a separate engine for this learner and accelerate's DeepSpeed configuration."""

    sharded = True
    steps_all = True

    def __init__(
        self,
        models: dict[str, nn.Module],
        head: nn.Module | None,
        trained: Sequence[nn.Parameter],
        args: Any,
        accelerator: Any,
    ):
        self.config = deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, args)
        self.stage = self.config["zero_optimization"]["stage"]
        dtype = working_dtype(head, trained)
        if self.stage == 3 and head is not None:
            head.to(dtype)  # ZeRO-3 keeps all shards in one flat tensor; the head's master weights stay in float32
        super().__init__(models, head, trained, args, accelerator)
        self.root = Whole(models, head)
        if self.stage == 3:
            partition(self.root, accelerator.device, self.config)
        self.own: list[nn.Parameter] = []
        self.numbers: list[list[int]] = []

    @classmethod
    def distributes(cls, accelerator: Any) -> bool:
        return accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {}).get("stage") == 3

    def freeze(self, model: nn.Module, device: torch.device) -> Frozen:
        return FrozenZero(model, device, self.config) if self.stage == 3 else super().freeze(model, device)

    def with_masters(self, groups: list[dict]) -> None:
        """Change nothing, because DeepSpeed keeps master weights of its own."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        import deepspeed

        self.optimizer = optimizer
        self.own = self._parameters()  # DeepSpeed replaces the optimizer's parameters by flat ones
        self.numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        self.engine, *_ = deepspeed.initialize(model=self.root, optimizer=optimizer, config=self.config)
        self.engine.optimizer.check_grad_overflow = True  # ZeRO-2 would step bfloat16 weights by a gradient that is NaN

    def call(self, function: Callable[[], Result]) -> Result:
        # results bypass the engine, which searches a forward's result for tensors and supports few types
        results: list[Result] = []
        self.engine(lambda: results.append(function()))
        return results[0]

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        parameters = list(self.root.parameters())
        with gathered_by_zero(self.engine, parameters, write) if self.stage == 3 else nullcontext():
            yield
            if write:
                for parameter in self.own:  # the optimizer's float32 copies
                    self._set(parameter, parameter.detach().float())

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * distributed.size())  # DeepSpeed divides by the number of processes

    def step(self, largest_norm: float) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm() or 0.0)

    def optimizer_entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        steps = [entry["step"] for entry in self.optimizer.state.values() if "step" in entry]
        if not steps:
            return
        self._link()
        for index, parameter in enumerate(self.own):
            found: dict[str, Any] = {}
            for key in MOMENTS:
                _keep_on_main(found, key, safe_get_full_optimizer_state(parameter, key))
            _keep_on_main(found, "step", copy.deepcopy(steps[0]))
            if index in self.half:
                _keep_on_main(found, "master", safe_get_full_fp32_param(parameter))
            yield index, found

    def optimizer_groups(self) -> list[dict]:
        groups = self.optimizer.param_groups
        return [{**group, "params": numbers} for group, numbers in zip(groups, self.numbers, strict=True)]

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if not state:
            return
        for flat in self._flat():
            zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
            self.optimizer.state[flat] = zeros | {"step": copy.deepcopy(state[0]["step"])}
        self._link()
        for index in list(state):
            own, entries = self.own[index], state.pop(index)  # memory need not hold the whole state
            for key in MOMENTS:
                self._set(own, entries[key].to(own.device), key)
            if "master" in entries:
                self._set(own, entries["master"].to(own.device))

    def _set(self, parameter: Any, value: Tensor, key: str | None = None) -> None:
        """Write the whole master weights of a parameter, or the moment ``key`` of its optimizer state, into the shards.

        DeepSpeed's functions for whole tensors fail under ZeRO-3 if a parameter's size is not a multiple of the number of
        processes, such as the bias of a head with one output. Each process therefore writes its own padded part.
        """
        from deepspeed import utils

        if self.stage < 3:
            if key is None:
                utils.safe_set_full_fp32_param(parameter, value)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, key)
            return
        size = parameter.ds_tensor.numel()
        padded = torch.nn.functional.pad(value.flatten(), (0, size * distributed.size() - value.numel()))
        own = padded.narrow(0, size * distributed.rank(), size)
        if key is None:
            utils.safe_set_local_fp32_param(parameter, own)
        else:
            utils.safe_set_local_optimizer_state(parameter, own, key)

    def _flat(self) -> list[Tensor]:
        """Return this process's shards of the weights as the optimizer sees them, one flat tensor for each group."""
        names = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self.engine.optimizer, names))

    def _link(self) -> None:
        """Link DeepSpeed's parameters to the optimizer's state.

        DeepSpeed itself makes these links at the first step only, which is too late for saving and loading.
        """
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if self.stage < 3:
            for group, flat in zip(self.engine.optimizer.bit16_groups, self._flat(), strict=True):
                lazy_init_hp_params_optimizer_state(group, flat, self.optimizer.state)


def deepspeed_config(given: dict[str, Any], args: Any) -> dict[str, Any]:
    """Return the launcher's DeepSpeed configuration with the entries that the trainer decides.

    These are the batch sizes, gradient clipping and precision. Accelerate would otherwise fill them in. DeepSpeed's
    section ``bf16`` stays off, because it would convert the critic's head to bfloat16 too. Without it, ZeRO leaves the
    weights in their own dtype, keeps float32 master weights of all of them, and sums gradients in float32.
    """
    config = {key: copy.deepcopy(value) for key, value in given.items() if key not in ("optimizer", "scheduler")}
    zero = config.get("zero_optimization", {"stage": 2})
    config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    for key in ("train_batch_size", "fp16"):
        config.pop(key, None)
    return config | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm or 0.0,
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def build_optimizer(groups: list[dict], args: Any, kind: type[Replicated]) -> torch.optim.Optimizer:
    """Build the optimizer ``args.optim`` over the parameter ``groups``.

    The names are those of ``transformers.training_args.OptimizerNames``.

    Raises:
        ValueError: the strategy ``kind`` cannot shard this optimizer's state.
    """
    if kind.sharded and args.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise ValueError(
            f"optim: {args.optim.value!r} keeps a state that {kind.__name__} cannot shard; expected adamw_torch or "
            "adamw_torch_fused, or start without DeepSpeed and FSDP"
        )
    optimizer, options = Trainer.get_optimizer_cls_and_kwargs(args)
    return optimizer(groups, **(options | {"weight_decay": args.weight_decay}))


def working_dtype(head: nn.Module | None, trained: Sequence[nn.Parameter]) -> torch.dtype:
    """Return the dtype of the ``trained`` parameters, apart from the critic's ``head``, which is in float32.

    Raises:
        WorldError: they have several dtypes, or one that cannot be trained when weights are sharded.
    """
    own = set() if head is None else {id(p) for p in head.parameters()}
    found = {p.dtype for p in trained if id(p) not in own}
    dtype = next(iter(found))
    if len(found) > 1 or dtype not in (torch.float32, torch.bfloat16):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in found))
        raise distributed.WorldError(
            f"the trained weights are in {names}; with DeepSpeed or FSDP all weights of a policy and its critic must be "
            "in float32, or all in bfloat16; load them so (dtype), or start without DeepSpeed and FSDP"
        )
    return dtype


def check_bases(models: dict[str, Any], accelerator: Any) -> None:
    """Check that no base model is shared by policies if weights are sharded.

    Raises:
        WorldError: two policies are adapters of one base, which each policy's strategy would shard.
    """
    owners: dict[int, list[str]] = {}
    for name, model in models.items():
        owners.setdefault(id(base_of(model)), []).append(name)
    shared = next((names for names in owners.values() if len(names) > 1), None)
    if shared and strategy_of(accelerator).sharded:
        raise distributed.WorldError(
            f"policies {' and '.join(map(repr, shared))} are adapters of one base, which {strategy_of(accelerator).__name__} "
            "would shard once for each; start without DeepSpeed or FSDP (every process then holds the base, and only "
            "adapters have gradients), or give each policy a separate model"
        )


def strategy_of(accelerator: Any, environment: Any = os.environ) -> type[Replicated]:
    """Return the strategy that the launcher was configured for.

    Raises:
        WorldError: the launcher asks for DeepSpeed, but accelerate has turned it off; or it asks for FSDP, and torch is
            too old.
    """
    state = getattr(accelerator, "state", None)
    wanted = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if getattr(state, "deepspeed_plugin", None) is not None:
        return Zero
    if wanted:
        raise distributed.WorldError(
            "the launcher asks for DeepSpeed, which accelerate turns off with use_cpu: true; set training.use_cpu: false "
            "(a machine without accelerators trains on its CPU anyway; DS_ACCELERATOR=cpu tells DeepSpeed)"
        )
    # accelerate drops its FSDP plugin on CPUs and replicates the weights, so its environment is asked
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if torch.__version__ < FSDP_TORCH:
            raise distributed.WorldError(
                f"FSDP2 needs torch {FSDP_TORCH} or newer, got {torch.__version__}: torch 2.8 trains weights that a model's input "
                "and output share to other values, and 2.6 and 2.7 fail; update torch, or use a DeepSpeed configuration"
            )
        return Sharded
    return Replicated
