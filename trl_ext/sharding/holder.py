"""How processes hold the weights of models, which are trained or frozen. Training is a holder with an optimizer.

- :class:`Holder`: every process holds everything. Gradients are summed before a step, in one message for each
  dtype. The model has no wrapper, processes may have different amounts of work, and adapters may share a base.
- :class:`trl_ext.sharding.zero.Zero`: DeepSpeed ZeRO, with a separate engine for each learner.
- :class:`trl_ext.sharding.fsdp.Sharded`: PyTorch's FSDP2 (``fully_shard``).

The launcher chooses the strategy (:mod:`trl_ext.sharding.choice`). Each process computes its share of the mean loss
over the minibatch of *all* processes (:class:`trl_ext.ppo.losses.Totals`). Gradients are therefore summed, never
averaged.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trl_ext.process import distributed
from trl_ext.sharding.master_weights import HALF_PRECISION, MASTER, WithMasters
from trl_ext.sharding.shards import WEIGHT, Shard, Shards, flattened, has_shape, state_shards
from trl_ext.sharding.spreading import place

Result = TypeVar("Result")
State = dict[int, dict[str, Any]]
Build = Callable[[list[dict]], torch.optim.Optimizer]
"""Builds an optimizer over groups of parameters."""


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


class Holder:
    """Holds all weights in every process. It is also the base class of the holders that distribute them.

    Every holder steps half-precision weights in float32 (:mod:`trl_ext.sharding.master_weights`).

    Args:
        models: a learner's trainable models by name, or a frozen model.
        head: the critic's head, which is in float32, or None.
        trained: the parameters that the optimizer steps, in its order. A frozen model has none, and no optimizer.
        args: the trainer's arguments.
        accelerator: accelerate's ``Accelerator``.
    """

    sharded = False
    """Whether the weights are distributed over the processes."""
    steps_all = False
    """Whether an optimizer step also decays parameters that had no gradient in any process."""

    @classmethod
    def distributes(cls, accelerator: Any) -> bool:
        """Return whether the holder brings the weights to the devices itself, distributed over the processes.

        Otherwise every process holds them whole, and moves them before.
        """
        return False

    def __init__(
        self,
        models: Mapping[str, nn.Module] | None = None,
        head: nn.Module | None = None,
        trained: Sequence[nn.Parameter] = (),
        args: Any = None,
        accelerator: Any = None,
    ):
        self.optimizer: Any = None
        self.args, self.accelerator = args, accelerator
        self.root: Any = Whole(dict(models or {}), head)
        name_of = {id(parameter): name for name, parameter in self.root.named_parameters()}
        self.names = [name_of[id(parameter)] for parameter in trained]
        """The names of the trained parameters in ``root``, in the optimizer's order. Checkpoints use them."""
        self.half = [index for index, parameter in enumerate(trained) if parameter.dtype in HALF_PRECISION]
        """The indices of the trained parameters that are in half precision. Checkpoints hold their master weights."""

    def optimizer_of(self, groups: list[dict], build: Build) -> torch.optim.Optimizer:
        """Return the optimizer that ``build`` makes of ``groups``, which are in all processes the main process's."""
        distributed.broadcast_weights([parameter for group in groups for parameter in group["params"]])
        return WithMasters(groups, build)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over what :meth:`optimizer_of` returned."""
        self.optimizer = optimizer

    def freeze(self, model: nn.Module, device: torch.device) -> "Holder":
        """Return a holder of a frozen ``model`` on ``device``, distributed as the weights of this one are.

        A frozen model that is whole in every process would cost as much as a policy that is distributed. Only the main
        process needs its weights; the others may have it on the meta device. All processes call this together.
        """
        if self.distributes(self.accelerator):
            return type(self)({"model": model.requires_grad_(False)}, None, (), self.args, self.accelerator)
        place(model, device)
        return Holder()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run ``function``, which makes forward passes of the models, and return its result.

        Processes that share a model call this together.
        """
        return function()

    @contextmanager
    def whole(self, write: bool = False) -> Iterator[None]:
        """Give every process the whole weights, to sample or to save. With ``write``, weights may be loaded.

        All processes enter together.
        """
        yield

    @torch.no_grad()
    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Replace the parameters of a frozen ``model``, which this holds, by the ``weights`` of the main process.

        The other processes need none. All processes call this together, outside of :meth:`whole`.
        """
        for name, parameter in model.named_parameters():
            if distributed.is_main():
                parameter.copy_(weights[name])
            distributed.broadcast_weights([parameter])

    def stream(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of ``parameters`` whole, with its name, so that a device never holds more than one of them.

        All processes iterate together, outside of :meth:`whole`.
        """
        yield from parameters.items()

    def streamed_bytes(self, parameters: Mapping[str, nn.Parameter]) -> int:
        """Return the bytes of what :meth:`stream` yields."""
        return sum(parameter.nbytes for parameter in parameters.values())

    def rounds(self, number: int, device: torch.device) -> int:
        """Return how many forwards this process must make if it has ``number`` micro-batches.

        Sharded processes must make equally many forwards, so it is then the largest number of all processes.
        """
        return distributed.all_reduce_max(number, device) if self.sharded else number

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of ``loss``. ``last`` says that an optimizer step follows."""
        loss.backward()
        self.optimizer.take_gradients()

    def step(self, largest_norm: float) -> float:
        """Sum gradients over processes, clip them, step the optimizer and clear the gradients.

        No step is taken if the gradient norm is NaN or infinite.

        Returns:
            The gradient norm before clipping.
        """
        parameters = self._parameters()
        self._sum_gradients(parameters)
        total: Any = torch.nn.utils.clip_grad_norm_(parameters, largest_norm)
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients of ``parameters`` over processes."""
        self.optimizer.take_gradients()  # those that were set without :meth:`backward`
        if distributed.size() > 1:
            # a parameter without a gradient here may have one in another process, and messages must match; one that has
            # none in any process keeps none, because an optimizer steps zeros too, by weight decay and momentum
            present = [float(p.grad is not None) for p in parameters]
            for parameter, number in zip(
                parameters, distributed.all_reduce_sum(present, parameters[0].device), strict=True
            ):
                if parameter.grad is None and number:
                    parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce_tensors([p.grad for p in parameters if p.grad is not None])

    def optimizer_state(self) -> State:
        """Return the optimizer's whole state by parameter index (:meth:`optimizer_entries`)."""
        return {index: entries for index, entries in self.optimizer_entries() if entries}

    def optimizer_entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index and the whole state of each parameter. All processes iterate together, to the end.

        The entry ``master`` holds the master weights of a parameter. If the state is distributed over processes, one
        parameter at a time is gathered into the main memory of the main process, and the other processes yield no
        entries.
        """
        state = self.optimizer.state_dict()["state"]
        for index in range(len(self.names)):
            yield index, state.get(index, {})

    def optimizer_groups(self) -> list[dict]:
        """Return the options of the optimizer's groups, each with the indices of its parameters."""
        return self.optimizer.state_dict()["param_groups"]

    def load_optimizer_state(self, state: State, groups: list[dict]) -> None:
        """Load what :meth:`optimizer_state` and :meth:`optimizer_groups` returned, after the weights were loaded.

        ``state`` is used up.
        """
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def shards(self, trained_only: bool = False) -> Iterator[Shard]:
        """Yield what this process writes of the weights and of the optimizer's state.

        The processes together yield everything once but :meth:`optimizer_rest`. Nothing is sent between them. With
        ``trained_only``, weights that are not trained are left out.
        """
        if not distributed.is_main():
            return
        left_out = self._frozen_names(trained_only)
        state = self.optimizer.state_dict()["state"]
        entries = {name: state.get(index, {}) for index, name in enumerate(self.names)}
        for name, parameter in self.root.named_parameters():
            if name not in left_out:
                yield flattened(name, WEIGHT, entries.get(name, {}).pop(MASTER, parameter))
        for name, parameter in zip(self.names, self._parameters(), strict=True):
            yield from state_shards(name, parameter.shape, entries[name])

    def _frozen_names(self, wanted: bool) -> set[str]:
        """Return the names of the parameters that are not trained, if they are ``wanted``."""
        trained = set(self.names)
        return {name for name, _ in self.root.named_parameters() if name not in trained} if wanted else set()

    def optimizer_rest(self) -> State:
        """Return the parts of the optimizer's state that :meth:`shards` leaves out, such as counts, by parameter
        index."""
        state = self.optimizer.state_dict()["state"]
        parameters = dict(enumerate(self._parameters()))
        return {
            index: {key: value for key, value in entries.items() if not has_shape(value, parameters[index].shape)}
            for index, entries in state.items()
        }

    @torch.no_grad()
    def load_shards(self, saved: Shards, rest: State, groups: list[dict]) -> None:
        """Load what :meth:`shards`, :meth:`optimizer_rest` and :meth:`optimizer_groups` returned.

        All processes call this together. Other processes, or another strategy, may have written it.

        Raises:
            CheckpointError: the shards are not those of this learner.
        """
        state: State = {index: dict(entries) for index, entries in rest.items()}
        numbers = {name: index for index, name in enumerate(self.names)}
        for name, parameter in self.root.named_parameters():
            if saved.lacks(name):
                continue
            weights, index = saved.whole(name, WEIGHT, parameter.shape), numbers.get(name)
            parameter.copy_(weights)
            if index in rest:
                state[index] |= {part: saved.whole(name, part, parameter.shape) for part in saved.parts(name)}
            if index in self.half:
                state.setdefault(index, {})[MASTER] = weights
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def stepped_here(self) -> int:
        """Return how many numbers the optimizer of this process steps."""
        return sum(p.numel() for p in self._parameters())

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def working_dtype(head: nn.Module | None, trained: Sequence[nn.Parameter]) -> torch.dtype:
    """Return the dtype of the ``trained`` parameters, apart from the critic's ``head``, which is in float32.

    Raises:
        WorldError: they have several dtypes, or one that cannot be trained when weights are sharded.
    """
    head_ids = set() if head is None else {id(p) for p in head.parameters()}
    dtypes = {p.dtype for p in trained if id(p) not in head_ids}
    dtype = next(iter(dtypes))
    if len(dtypes) > 1 or dtype not in (torch.float32, torch.bfloat16):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise distributed.WorldError(
            f"the trained weights are in {names}; with DeepSpeed or FSDP all weights of a policy and its critic must "
            "be in float32, or all in bfloat16; load them so (dtype), or start without DeepSpeed and FSDP"
        )
    return dtype


def keep_on_main(found: dict[str, Any], key: str, value: Any) -> None:
    """Copy a part of the optimizer's state to the main memory of the main process. The other processes keep nothing."""
    if distributed.is_main():
        found[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
