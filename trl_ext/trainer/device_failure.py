"""What is told of an accelerator that failed during a run: after which update, and how to go on."""

import re
from pathlib import Path

import torch

from trl_ext.errors import UserError
from trl_ext.files.checkpoints import list_checkpoints


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
