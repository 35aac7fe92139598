"""The processes of a run: how many there are, and what they tell each other. With one process everything here is free.

Importing this module does not import torch.
"""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trl_ext.errors import UserError

if TYPE_CHECKING:
    import torch


class WorldError(UserError, RuntimeError):
    """The run is not spread over the processes that it was started with."""


def size() -> int:
    """Processes that train together. From ``torch.distributed``: accelerate counts one under DeepSpeed on CPUs."""
    if "torch" not in sys.modules:
        return 1
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number."""
    import torch.distributed as dist

    return dist.get_rank() if size() > 1 else 0


def is_main() -> bool:
    """Whether this process writes files and talks to the user."""
    return int(os.environ.get("RANK", "0")) == 0 if size() == 1 else rank() == 0


def shutdown() -> None:
    """Leave the processes that train together, once nothing is said any more: one that ends while its threads still listen to
    others may be aborted by them."""
    if size() > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise unless this process is one of as many as a launcher has started.

    ``accelerate launch --cpu --num_processes 2`` starts a single process and says nothing; such a one has the address of
    others in its environment, and no number of its own.
    """
    started = int(environment.get("WORLD_SIZE", "1"))
    if started != size():
        raise WorldError(
            f"{started} processes were started (WORLD_SIZE), but {size()} train together: torch.distributed is not set up; "
            "on CPUs set training.use_cpu: true and start with torchrun --nproc_per_node N"
        )
    alone = "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment
    if alone and "ACCELERATE_MIXED_PRECISION" in environment:
        raise WorldError(
            "accelerate launch was asked for several processes and started one, because on CPUs it needs MPI for more; "
            "start with torchrun --nproc_per_node N train_multi_agent.py, or ask for --num_processes 1"
        )


def all_gather_lists(things: list[Any]) -> list[Any]:
    """The lists of all processes, one after the other."""
    return [thing for own in all_gather(things) for thing in own]


def all_gather(thing: Any) -> list[Any]:
    """One thing from every process, in the order of their numbers."""
    if size() == 1:
        return [thing]
    import torch.distributed as dist

    found: list[Any] = [None] * size()
    dist.all_gather_object(found, thing)
    return found


def to_main(things: list[Any]) -> list[Any]:
    """On the main process the lists of all processes, one after the other; elsewhere its own."""
    if size() == 1:
        return things
    import torch.distributed as dist

    box: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(things, box, dst=0)
    return things if box is None else [thing for own in box for thing in own]


def first_of_all(things: list[Any], count: int) -> list[Any]:
    """On the main process the first ``count`` things of all processes, in the order of their numbers; elsewhere its own share of them.

    No more than ``count`` things travel, and to the main process alone.
    """
    if size() == 1:
        return things[:count]
    lengths: list[int] = all_gather(len(things))
    return to_main(things[: max(0, count - sum(lengths[: rank()]))])[:count]


def broadcast_from_main(thing: Any) -> Any:
    """The main process's value."""
    if size() == 1:
        return thing
    import torch.distributed as dist

    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Until all processes are here."""
    import torch.distributed as dist

    if size() > 1:
        dist.barrier()


def all_reduce_sum(numbers: list[float], device: "torch.device | str") -> list[float]:
    """The sums over all processes."""
    if size() == 1:
        return numbers
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(number: int, device: "torch.device | str") -> int:
    """The largest of all processes' numbers."""
    if size() == 1:
        return number
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def all_reduce_tensors(tensors: "list[torch.Tensor]") -> None:
    """Replace each of ``tensors`` by its sum over all processes: one message for each dtype."""
    if size() == 1:
        return
    import torch
    import torch.distributed as dist

    for dtype in sorted({t.dtype for t in tensors}, key=str):
        own = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.flatten() for t in own])
        dist.all_reduce(flat)
        for tensor, summed in zip(own, flat.split([t.numel() for t in own]), strict=True):
            tensor.copy_(summed.view_as(tensor))
