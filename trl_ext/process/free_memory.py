"""Ask how much memory a process can still allocate on its device."""

import os

import psutil
import torch

from trl_ext.process.devices import accelerator


def total_bytes() -> int | None:
    """Return the memory of this process's accelerator, or None without an accelerator, or if it cannot tell."""
    kind = accelerator()
    ask = None if kind is None else getattr(torch.get_device_module(kind), "mem_get_info", None)
    return None if ask is None else ask()[1]


def main_bytes() -> int:
    """Return this process's share of the main memory, if the processes on this machine share it equally."""
    return psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes this process can still allocate on ``device``, or None if the device cannot tell.

    On an accelerator this is the device's free memory and what torch holds without using it. On a CPU it is the
    available main memory, divided by the number of processes on this machine.
    """
    if device.type == "cpu":
        return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    module = torch.get_device_module(device)
    ask = getattr(module, "mem_get_info", None)  # CUDA, ROCm and XPU have it
    if ask is None:
        return None
    return ask(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
