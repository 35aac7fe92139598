"""Communication between the processes of a run. With a single process, every function here returns at once.

Importing this module does not import torch.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trl_ext.errors import UserError

if TYPE_CHECKING:
    import torch


class WorldError(UserError, RuntimeError):
    """The processes that train together are not those that the launcher started."""


def size() -> int:
    """Return the number of processes that train together."""
    # torch.distributed is asked because accelerate reports one process under DeepSpeed on CPUs
    if "torch" not in sys.modules:
        return 1
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    import torch.distributed as dist

    return dist.get_rank() if size() > 1 else 0


def is_main() -> bool:
    """Return whether this process is the one that writes files and prints messages."""
    return int(os.environ.get("RANK", "0")) == 0 if size() == 1 else rank() == 0


def shutdown() -> None:
    """Leave the process group at the end of a run."""
    # a process that ends while its communication threads are still running may be aborted by them
    if size() > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Check that as many processes train together as the launcher started.

    ``accelerate launch --cpu --num_processes 2`` silently starts a single process. That process has a master address in
    its environment, and no ``WORLD_SIZE``.

    Raises:
        WorldError: the numbers differ, or the launcher was asked for several processes and started one.
    """
    started = int(environment.get("WORLD_SIZE", "1"))
    if started != size():
        raise WorldError(
            f"{started} processes were started (WORLD_SIZE), but {size()} train together: torch.distributed is not set "
            "up; on CPUs set training.use_cpu: true and start with torchrun --nproc_per_node N"
        )
    alone = "WORLD_SIZE" not in environment and "MASTER_ADDR" in environment
    if alone and "ACCELERATE_MIXED_PRECISION" in environment:
        raise WorldError(
            "accelerate launch was asked for several processes and started one, because on CPUs it needs MPI for more; "
            "start with torchrun --nproc_per_node N train_multi_agent.py, or ask for --num_processes 1"
        )


def all_gather_lists(items: list[Any]) -> list[Any]:
    """Return the lists of all processes, joined in the order of the processes."""
    return [item for part in all_gather(items) for item in part]


def all_gather(value: Any) -> list[Any]:
    """Return the values of all processes, in the order of the processes."""
    if size() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def to_main(items: list[Any]) -> list[Any]:
    """Return the joined lists of all processes on the main process, and the process's own list elsewhere."""
    if size() == 1:
        return items
    import torch.distributed as dist

    parts: list[Any] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(items, parts, dst=0)
    return items if parts is None else [item for part in parts for item in part]


def share_of_first(items: list[Any], count: int) -> list[Any]:
    """Return which of this process's ``items`` are among the first ``count`` of all processes."""
    lengths: list[int] = all_gather(len(items))
    return items[: max(0, count - sum(lengths[: rank()]))]


def broadcast_from_main(value: Any) -> Any:
    """Return the main process's value on every process."""
    if size() == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(work: Callable[[], Any]) -> Any:
    """Do ``work`` on the main process while the others wait.

    Return its result, or raise its error, on every process.
    """
    if size() == 1:
        return work()
    result, failed = None, None
    if is_main():
        try:
            result = work()
        except Exception as error:
            failed = error
    result, failed = broadcast_from_main((result, failed))
    if failed is not None:
        raise failed
    return result


def broadcast_weights(tensors: "Iterable[torch.Tensor]") -> None:
    """Replace the values of ``tensors`` in every process by those of the main process."""
    if size() == 1:
        return
    import torch.distributed as dist

    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def barrier() -> None:
    """Wait until all processes have come here."""
    import torch.distributed as dist

    if size() > 1:
        dist.barrier()


def all_reduce_sum(numbers: list[float], device: "torch.device | str") -> list[float]:
    """Return each number's sum over all processes."""
    if size() == 1:
        return numbers
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(number: int, device: "torch.device | str") -> int:
    """Return the largest of all processes' numbers."""
    if size() == 1:
        return number
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


BUCKET = 2**28
"""Most bytes of the copies that :func:`all_reduce_tensors` makes at a time."""


def all_reduce_tensors(tensors: "list[torch.Tensor]") -> None:
    """Replace each of ``tensors`` by its sum over all processes.

    Small tensors of one dtype are copied into messages of at most :data:`BUCKET` bytes, because every message costs
    time. Larger ones are summed where they are. Two processes get the same bits however tensors are grouped. More
    processes may add in another order.
    """
    if size() == 1:
        return
    import torch
    import torch.distributed as dist

    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0])
            continue
        flat = torch.cat([t.flatten() for t in bucket])
        dist.all_reduce(flat)
        for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def _buckets(tensors: "list[torch.Tensor]") -> "Iterator[list[torch.Tensor]]":
    """Yield ``tensors`` in groups of one dtype and at most :data:`BUCKET` bytes. A larger tensor is alone."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        bucket: list[torch.Tensor] = []
        used = 0
        for tensor in (t for t in tensors if t.dtype == dtype):
            if bucket and used + tensor.nbytes > BUCKET:
                yield bucket
                bucket, used = [], 0
            bucket.append(tensor)
            used += tensor.nbytes
        if bucket:
            yield bucket
