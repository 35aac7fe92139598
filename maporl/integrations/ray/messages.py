"""What the driver and the processes of a group send each other: samples without text, numbers for each
sampled token, and weights.

Everything is in a few flat arrays, which Ray sends without copying them one by one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maporl.team.agents import Policy
from trl_ext.errors import UserError
from trl_ext.models.adapters import adapter_parameters
from trl_ext.models.forward import base_of
from trl_ext.ppo.batch import Completion, Mark, TokenBatch
from trl_ext.ppo.options import Grammar

# -- samples and their numbers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Completions as arrays: the share of one process of a group, for a policy in an update.

    Args:
        ids: the ids of all prompts and completions, one after the other.
        lengths: for each completion, the number of ids of its prompt, of its response, and of the critic's own prompt
            (-1: it has none), [N, 3].
        logprobs: the sampling engine's log-probabilities of all response ids. NaN where they are unknown.
        places: for each completion its critic output and its trajectory, [N, 2].
        temperatures: for each completion its temperature. NaN for that of the run.
        ended: for each completion, whether it ended by itself.
        labels: the names of the completions in errors.
        grammars: what each completion was held to.
    """

    ids: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    places: np.ndarray
    temperatures: np.ndarray
    ended: np.ndarray
    labels: list[str]
    grammars: list[Grammar | None]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "Samples":
        """Pack ``completions``. Their scores and texts stay with the driver."""
        ids: list[int] = []
        logprobs: list[float] = []
        lengths, places = [], []
        trajectories: dict[tuple, int] = {}
        for number, completion in enumerate(completions):
            critic = completion.critic_prompt_ids
            ids += [*completion.prompt_ids, *completion.response_ids, *(critic or ())]
            lengths.append(
                (len(completion.prompt_ids), len(completion.response_ids), -1 if critic is None else len(critic))
            )
            logprobs += completion.sampled_logprobs or [float("nan")] * len(completion.response_ids)
            places.append((completion.head, trajectories.setdefault(completion.trajectory or (number,), number)))
        nan = float("nan")
        return cls(
            np.asarray(ids, dtype=np.int32),
            np.asarray(lengths, dtype=np.int32).reshape(-1, 3),
            np.asarray(logprobs, dtype=np.float32),
            np.asarray(places, dtype=np.int32).reshape(-1, 2),
            np.asarray(
                [nan if completion.temperature is None else completion.temperature for completion in completions],
                dtype=np.float64,
            ),
            np.asarray([completion.ended for completion in completions], dtype=bool),
            [completion.label for completion in completions],
            [completion.grammar for completion in completions],
        )

    def completions(self) -> list[Completion]:
        """Return the completions, with a score of 0."""
        completions, start, drawn = [], 0, 0
        for number, (prompt, response, critic) in enumerate(self.lengths.tolist()):
            middle, end = start + prompt, start + prompt + response
            logprobs = self.logprobs[drawn : drawn + response]
            temperature = float(self.temperatures[number])
            head, trajectory = self.places[number].tolist()
            completions.append(
                Completion(
                    prompt_ids=self.ids[start:middle].tolist(),
                    response_ids=self.ids[middle:end].tolist(),
                    ended=bool(self.ended[number]),
                    label=self.labels[number],
                    head=head,
                    trajectory=(trajectory,),
                    score=0.0,
                    critic_prompt_ids=None if critic < 0 else self.ids[end : end + critic].tolist(),
                    sampled_logprobs=None if np.isnan(logprobs).any() else logprobs.tolist(),
                    temperature=None if np.isnan(temperature) else temperature,
                    grammar=self.grammars[number],
                )
            )
            start, drawn = end + max(critic, 0), drawn + response
        return completions


@dataclass(frozen=True)
class Assigned:
    """What the driver has computed of the rows of one process, in an update of one policy.

    Args:
        rows: which of the rows that the process was given are trained on, in rising order.
        tokens: what is ``assigned`` (:data:`trl_ext.ppo.batch.Mark`) of their sampled tokens, in row-major order.
        weights: the weight of each row in the loss.
        rollouts: the number of rollouts of the update (:class:`trl_ext.ppo.batch.TokenBatch`).
    """

    rows: np.ndarray
    tokens: dict[str, np.ndarray]
    weights: np.ndarray
    rollouts: int | None


def numbers_of(batch: TokenBatch, mark: Mark) -> dict[str, np.ndarray]:
    """Return the tensors [N, T] of ``batch`` with a mark at its sampled tokens, in row-major order."""
    row, column = batch.sampled
    return {name: v[row, column].cpu().numpy() for name, v in batch.marked(mark).items() if v.dim() == 2}


def put_numbers(batch: TokenBatch, rows: Sequence[int], numbers: dict[str, np.ndarray]) -> None:
    """Write ``numbers`` of the sampled tokens of ``rows``, which rise, into the tensors of ``batch``."""
    row, column = batch.sampled_on_host
    chosen = torch.isin(row, torch.as_tensor(list(rows), dtype=torch.long))
    place = row[chosen], column[chosen]
    for name, values in numbers.items():
        tensor: Any = getattr(batch, name)
        tensor[place[0].to(tensor.device), place[1].to(tensor.device)] = torch.from_numpy(np.array(values)).to(
            tensor.device, tensor.dtype
        )


def dealt(batch: TokenBatch, processes: int) -> list[list[int]]:
    """Return the rows of ``batch`` for each of ``processes``: successive groups of inseparable rows, of nearly equal
    tokens.

    Rows rise within a process. Put one after the other, the groups of all processes are in the order of one process, so
    that minibatches are the same (:meth:`trl_ext.learning.learners.Learning.minibatches`).
    """
    groups = batch.inseparable()
    sizes = [sum(batch.tree.lengths[row] for row in group) for group in groups]
    total, reached = max(sum(sizes), 1), 0
    shares: list[list[int]] = [[] for _ in range(processes)]
    for group, size in zip(groups, sizes, strict=True):
        shares[min(processes * (2 * reached + size) // (2 * total), processes - 1)] += group
        reached += size
    return [sorted(rows) for rows in shares]


# -- weights -----------------------------------------------------------------------------------------------------------


class WeightsDiffer(UserError, RuntimeError):
    """The weights that arrived are not those that were sent."""


@dataclass(frozen=True)
class Packed:
    """The weights of a policy: its adapter, or its whole model.

    Args:
        entries: the name, the dtype and the shape of each tensor, in the order of the buffer.
        sums: the sum of each tensor in float64, by which a receiver checks what it has loaded.
        buffer: the bytes of all tensors.
    """

    entries: list[tuple[str, str, tuple[int, ...]]]
    sums: list[float]
    buffer: np.ndarray


def sent_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """Return the parameters of a policy that change, by name: those of its adapter, without its name in them, or
    all."""
    if policy.adapter is not None:
        return adapter_parameters(policy.model, policy.adapter)
    return dict(base_of(policy.model).named_parameters())


def pack(named: Iterable[tuple[str, Tensor]], size: int) -> Packed:
    """Copy tensors of together ``size`` bytes one after the other into a buffer in main memory.

    Each is forgotten before the next one is asked for, so that a device need not hold all of them.
    """
    # FSDP frees the storage of gathered weights, which numpy would pin; so they are copied into a tensor of our own
    buffer = torch.empty(size, dtype=torch.uint8)
    start, entries, sums = 0, [], []
    for name, tensor in named:
        values = tensor.detach()
        buffer[start : start + values.nbytes].copy_(values.contiguous().view(-1).view(torch.uint8))
        start += values.nbytes
        entries.append((name, str(values.dtype).removeprefix("torch."), tuple(values.shape)))
        sums.append(_sum(values))
        del tensor, values
    assert start == size, f"the tensors have {start} bytes, and {size} were announced"
    return Packed(entries, sums, buffer.numpy())


def tensors_of(packed: Packed) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each tensor of ``packed`` with its name."""
    start = 0
    for name, kind, shape in packed.entries:
        dtype = getattr(torch, kind)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        yield name, torch.from_numpy(packed.buffer[start : start + size].copy()).view(dtype).view(shape)
        start += size


@torch.no_grad()
def unpack(packed: Packed, parameters: dict[str, Any]) -> None:
    """Copy the tensors of ``packed`` into ``parameters``, and check what is there afterwards.

    Raises:
        WeightsDiffer: a tensor is missing or has another shape, or its numbers have another sum.
    """
    names = [name for name, *_ in packed.entries]
    if set(names) != parameters.keys():
        other = sorted(set(names) ^ parameters.keys())[0]
        raise WeightsDiffer(
            f"weights: {other!r} is on one side only; expected {len(parameters)} tensors, got {len(names)}"
        )
    for (name, values), expected in zip(tensors_of(packed), packed.sums, strict=True):
        parameter = parameters[name]
        if parameter.shape != values.shape:
            raise WeightsDiffer(f"weights: {name!r} has shape {tuple(parameter.shape)}, got {tuple(values.shape)}")
        parameter.copy_(values)
        total = _sum(parameter.detach())
        if not np.isclose(total, expected, rtol=1e-9, atol=1e-9, equal_nan=True):
            raise WeightsDiffer(f"weights: {name!r} sums to {total} after loading, expected {expected}")


def _sum(tensor: Tensor) -> float:
    return float(tensor.double().sum())
