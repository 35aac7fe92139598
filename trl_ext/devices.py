"""The devices of this process, of whichever kind: CUDA, ROCm, XPU and the others that torch knows."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState

from trl_ext.checkpoint_folder import list_checkpoints
from trl_ext.errors import UserError


class DeviceFailure(UserError, RuntimeError):
    """An accelerator failed or ran out of memory during a run. The process cannot go on, and a new one can resume."""


def device_failure(error: BaseException, folder: Path, updates: int) -> DeviceFailure | None:
    """Return what to tell the user of an ``error`` that came from a device, or None for any other error.

    A device that disappears and a kernel that fails are one to the process: every later call to the device fails too.

    Args:
        error: what was raised.
        folder: the output folder, whose newest checkpoint is named.
        updates: the number of updates that were complete.
    """
    full = isinstance(error, torch.OutOfMemoryError)
    if not full and not (isinstance(error, RuntimeError) and re.match("(CUDA|HIP|XPU|MPS|NPU) error", str(error))):
        return None
    what = " ".join(str(error).split("\n", 1)[0].split())
    saved = list_checkpoints(folder)
    again = "in a new process, go on from it with --resume, or train(resume_from_checkpoint=True)"
    last = (
        f"its newest checkpoint is {saved[-1]}; {again}"
        if saved
        else "it has no checkpoint; set save_steps to have some"
    )
    less = (
        "; set a lower max_tokens_per_microbatch or local_rollout_forward_batch_size, or gradient_checkpointing"
        if full
        else ""
    )
    return DeviceFailure(f"{folder}: the device failed after {updates} complete updates ({what}{less}); {last}")


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process can use, without an index, or None if it has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def accelerators() -> list[torch.device]:
    """Return every accelerator that this process can use. The list is empty without one."""
    kind = accelerator()
    return [] if kind is None else [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())]


def process_device() -> torch.device:
    """Return the device of this process, for models that no trainer places, such as verifiers and encoders.

    It is the device that accelerate has chosen for a training or an evaluation, which is the CPU with ``use_cpu`` and the
    accelerator of this rank otherwise. Outside of these it is the present accelerator, or the CPU without one.
    """
    if PartialState._shared_state:
        return PartialState().device
    kind = accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


@contextmanager
def forked_rng() -> Iterator[None]:
    """Restore torch's random states afterwards, on the CPU and on every accelerator.

    ``torch.manual_seed`` seeds them all. ``torch.random.fork_rng`` restores them all, too, but it warns where several
    accelerators are not named.
    """
    found = accelerators()
    kind = found[0].type if found else "cuda"  # any kind, if there is nothing to restore
    with torch.random.fork_rng([device.index for device in found], device_type=kind):
        yield


def peak_bytes(devices: Iterable[torch.device]) -> int | None:
    """Return the peak memory of the accelerator among ``devices`` that held most, or None if none of them can tell."""
    peaks = []
    for device in set(devices):
        ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)  # CPU and MPS do not have it
        if ask is not None:
            peaks.append(ask(device))
    return max(peaks, default=None)
