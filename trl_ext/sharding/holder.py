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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trl_ext.models.adapters import HALF_PRECISION
from trl_ext.process import distributed
from trl_ext.sharding.master_weights import MASTER, WithMasters
from trl_ext.sharding.shards import WEIGHT, Shard, Shards, flattened, has_shape, state_shards
from trl_ext.sharding.spreading import place

Result = TypeVar("Result")
State = dict[int, dict[str, Any]]
Build = Callable[[list[dict]], torch.optim.Optimizer]
"""Builds an optimizer over groups of parameters."""


PROBED = 16
"""The numbers of each tensor that are looked at to see whether an update moves a policy."""


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
        self.shapes = {name_of[id(parameter)]: parameter.shape for parameter in trained}
        """The whole shapes of the trained parameters by their names in ``root``, in the optimizer's order."""
        self.names = list(self.shapes)
        """The names of the trained parameters."""
        self.half = [name_of[id(parameter)] for parameter in trained if parameter.dtype in HALF_PRECISION]
        """The names of those that are in half precision. Checkpoints hold their master weights."""

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
        total: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        if math.isfinite(norm):
            if norm + 1e-6 >= largest_norm:  # otherwise torch would multiply every gradient by 1
                torch.nn.utils.clip_grads_with_norm_(parameters, largest_norm, total)
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

    def optimizer_groups(self) -> list[dict]:
        """Return the options of the optimizer's groups, each with the indices of its parameters."""
        return self.optimizer.state_dict()["param_groups"]

    def shards(self, weights: Collection[str] | None = None) -> Iterator[Shard]:
        """Yield what this process writes of the optimizer's state, and of the ``weights`` of these names.

        By default it is all weights. The processes together yield everything once but :meth:`optimizer_rest`. Nothing
        is sent between them.
        """
        if not distributed.is_main():
            return
        state = self.optimizer.state_dict()["state"]
        entries = {name: state.get(index, {}) for index, name in enumerate(self.names)}
        for name, parameter in self.root.named_parameters():
            exact = entries.get(name, {}).pop(MASTER, parameter)
            if weights is None or name in weights:
                yield flattened(name, WEIGHT, exact)
            yield from state_shards(name, parameter.shape, entries.get(name, {}))

    def optimizer_rest(self) -> State:
        """Return the parts of the optimizer's state that :meth:`shards` leaves out, such as counts, by parameter
        index."""
        state = self.optimizer.state_dict()["state"]
        shapes = list(self.shapes.values())
        return {
            index: {key: value for key, value in entries.items() if not has_shape(value, shapes[index])}
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
            parts = {part: saved.whole(name, part, parameter.shape) for part in saved.parts(name)}
            if not saved.lacks(name):
                weights = saved.whole(name, WEIGHT, parameter.shape)
                parameter.copy_(weights)
                if name in self.half:
                    parts[MASTER] = weights
            if parts and name in numbers:
                state[numbers[name]] = state.get(numbers[name], {}) | parts
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    @torch.no_grad()
    def probe(self) -> Tensor:
        """Return a few of the policy's numbers that the optimizer of this process steps, to see whether they move."""
        return torch.cat([stepped.detach().flatten()[:PROBED].float() for stepped in self._of_policy()])

    def _of_policy(self) -> Sequence[Tensor]:
        """Return what the optimizer of this process steps for the policy: the first of its groups."""
        return self.optimizer.param_groups[0]["params"]

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
