"""DeepSpeed ZeRO: the optimizer state, and in stage 3 the weights, are distributed over processes."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trl_ext.process import distributed
from trl_ext.sharding.holder import PROBED, Build, Holder, State, working_dtype
from trl_ext.sharding.shards import WEIGHT, Shard, Shards, flattened
from trl_ext.sharding.spreading import Received, spread

Result = TypeVar("Result")
MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(Holder):
    """DeepSpeed ZeRO, with a separate engine for this learner and accelerate's DeepSpeed configuration."""

    sharded = True
    steps_all = True

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        head: nn.Module | None,
        trained: Sequence[nn.Parameter],
        args: Any,
        accelerator: Any,
    ):
        self.config = deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, args)
        self.stage = self.config["zero_optimization"]["stage"]
        if trained:
            dtype = working_dtype(head, trained)
            if self.stage == 3 and head is not None:
                head.to(dtype)  # ZeRO-3 keeps all shards in one flat tensor; the head's master weights stay in float32
        else:
            self.config["zero_optimization"].pop("offload_optimizer", None)
        super().__init__(models, head, trained, args, accelerator)
        if self.stage == 3:
            partition(self.root, accelerator.device, self.config)
        self.trained: list[nn.Parameter] = []
        self.numbers: list[list[int]] = []
        if not trained:
            self._begin()

    @classmethod
    def distributes(cls, accelerator: Any) -> bool:
        return accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {}).get("stage") == 3

    def optimizer_of(self, groups: list[dict], build: Build) -> torch.optim.Optimizer:
        return build(groups)  # DeepSpeed keeps master weights itself

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.trained = self._parameters()  # DeepSpeed replaces the optimizer's parameters by flat ones
        self.numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        self._begin()
        self.engine.optimizer.check_grad_overflow = True  # ZeRO-2 would step bfloat16 weights by a gradient that is NaN

    def _begin(self) -> None:
        """Make DeepSpeed's engine."""
        import deepspeed

        self.engine, *_ = deepspeed.initialize(model=self.root, optimizer=self.optimizer, config=self.config)

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
                for parameter in self.trained:  # the optimizer's float32 copies
                    self._set(parameter, parameter.detach().float())

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        import deepspeed

        for name, parameter in model.named_parameters():  # memory need not hold the whole model
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if distributed.is_main():
                    parameter.copy_(weights[name])

    def stream(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            with gathered_by_zero(self.engine, [parameter]) if self.stage == 3 else nullcontext():
                yield name, parameter

    def streamed_bytes(self, parameters: Mapping[str, nn.Parameter]) -> int:
        if self.stage < 3:
            return super().streamed_bytes(parameters)
        partitioned: list[Any] = list(parameters.values())  # DeepSpeed has added attributes
        return sum(parameter.ds_numel * parameter.dtype.itemsize for parameter in partitioned)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * distributed.size())  # DeepSpeed divides by the number of processes

    def step(self, largest_norm: float) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm() or 0.0)

    def optimizer_groups(self) -> list[dict]:
        groups = self.optimizer.param_groups
        return [{**group, "params": numbers} for group, numbers in zip(groups, self.numbers, strict=True)]

    def shards(self, weights: Collection[str] | None = None) -> Iterator[Shard]:
        stepped = any("step" in entry for entry in self.optimizer.state.values())
        if stepped:
            self._link()
        for name, parameter in self.root.named_parameters():
            wanted = weights is None or name in weights
            if name not in self.shapes:
                yield from self._frozen(name, parameter) if wanted else ()
            else:
                for part in (*((WEIGHT,) if wanted else ()), *(MOMENTS if stepped else ())):
                    fragment = self._fragment(parameter, part)
                    if fragment is not None:
                        yield Shard(name, part, *fragment)

    def optimizer_rest(self) -> State:
        steps = [entry["step"] for entry in self.optimizer.state.values() if "step" in entry]
        return {index: {"step": copy.deepcopy(steps[0])} for index in range(len(self.trained))} if steps else {}

    @torch.no_grad()
    def load_shards(self, saved: Shards, rest: State, groups: list[dict]) -> None:
        import deepspeed

        for name, parameter in self.root.named_parameters():
            if saved.lacks(name):
                continue
            # DeepSpeed may hold several copies of a part, so it distributes one parameter at a time itself
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0) if self.stage == 3 else nullcontext():
                if self.stage < 3 or distributed.is_main():
                    parameter.copy_(saved.whole(name, WEIGHT, parameter.shape))
        self._begin_state(rest, groups)
        for name, parameter in zip(self.names, self.trained, strict=True):
            # a parameter that another strategy has never stepped has no moments
            for part in filter(partial(saved.has, name), (WEIGHT, *(MOMENTS if rest else ()))):
                fragment = self._fragment(parameter, part)
                if fragment is not None:
                    start, numbers = fragment
                    values = saved.read(name, part, start, start + numbers.numel()).to(numbers.device)
                    if self.stage == 3:
                        self._set_local(parameter, values, part)
                    else:
                        numbers.copy_(values)

    def _frozen(self, name: str, parameter: Any) -> Iterator[Shard]:
        """Yield this process's part of a frozen parameter: what ZeRO-3 gave it, or in the main process all."""
        if self.stage == 3:
            size = parameter.ds_tensor.ds_numel
            start = min(size * distributed.rank(), parameter.ds_numel)
            yield Shard(name, WEIGHT, start, parameter.ds_tensor[: min(size, parameter.ds_numel - start)])
        elif distributed.is_main():
            yield flattened(name, WEIGHT, parameter)

    def _fragment(self, parameter: Any, part: str) -> tuple[int, Tensor] | None:
        """Return where this process's part of a trained parameter begins, and its weights or moment, if it has any."""
        from deepspeed import utils

        if self.stage == 3:
            if part == WEIGHT:
                numbers = utils.safe_get_local_fp32_param(parameter)
            else:
                numbers = utils.safe_get_local_optimizer_state(parameter, part)
            start = numbers.numel() * distributed.rank()
            length = min(numbers.numel(), parameter.ds_numel - start)
            return (start, numbers.flatten()[:length]) if length > 0 else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        numbers = mapping.get_hp_fragment(None if part == WEIGHT else part)
        return mapping.lp_fragment_address.start, numbers

    def _begin_state(self, state: State, groups: list[dict]) -> None:
        """Take over the options of ``groups``, and begin with zero moments if ``state`` has counts of steps."""
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        if state:
            for flat in self._flat():
                zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
                self.optimizer.state[flat] = zeros | {"step": copy.deepcopy(next(iter(state.values()))["step"])}
            self._link()

    def _set(self, parameter: Any, value: Tensor) -> None:
        """Write a parameter's whole master weights into the shards."""
        # DeepSpeed's function for whole tensors fails under ZeRO-3 if a parameter's size is not a multiple of the
        # number of processes, such as the bias of a head with one output. Each process therefore writes its own padded
        # part.
        from deepspeed import utils

        if self.stage < 3:
            utils.safe_set_full_fp32_param(parameter, value)
            return
        size = parameter.ds_tensor.numel()
        first = min(size * distributed.rank(), value.numel())
        self._set_local(parameter, value.flatten()[first : first + size], WEIGHT)

    def _set_local(self, parameter: Any, values: Tensor, part: str) -> None:
        """Write this process's ``values`` of a part of a parameter, without padding, under ZeRO-3."""
        from deepspeed import utils

        padded = torch.nn.functional.pad(values, (0, parameter.ds_tensor.numel() - values.numel()))
        if part == WEIGHT:
            utils.safe_set_local_fp32_param(parameter, padded)
        else:
            utils.safe_set_local_optimizer_state(parameter, padded, part)

    def _of_policy(self) -> Sequence[Tensor]:
        return self._flat()[0].detach().chunk(PROBED**2)

    def _flat(self) -> list[Tensor]:
        """Return this process's shards of the weights as the optimizer sees them, one flat tensor for each group."""
        names = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self.engine.optimizer, names))

    def _link(self) -> None:
        """Link DeepSpeed's parameters to the optimizer's state."""
        # DeepSpeed itself makes these links at the first step only, which is too late for saving and loading
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
