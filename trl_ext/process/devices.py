"""The devices of this process, of whichever kind torch knows, their memory, and how a CPU reuses it."""

import ctypes
import os
import platform
from collections.abc import Iterable

import psutil
import torch
from accelerate import PartialState


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process can use, without an index, or None if it has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def accelerators() -> list[torch.device]:
    """Return every accelerator that this process can use. The list is empty without one."""
    kind = accelerator()
    return [] if kind is None else [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())]


def process_device() -> torch.device:
    """Return the device of this process, for models that no trainer places, such as verifiers and encoders.

    It is the device that accelerate has chosen for a training or an evaluation, which is the CPU with ``use_cpu`` and
    the accelerator of this rank otherwise. Outside of these it is the present accelerator, or the CPU without one.
    """
    if PartialState._shared_state:
        return PartialState().device
    kind = accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def peak_bytes(devices: Iterable[torch.device]) -> int | None:
    """Return the peak memory of the accelerator among ``devices`` that held most, or None if none of them can tell."""
    peaks = []
    for device in set(devices):
        ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)  # CPU and MPS do not have it
        if ask is not None:
            peaks.append(ask(device))
    return max(peaks, default=None)


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


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def reuse_memory() -> bool:
    """Let glibc keep freed memory for reuse, in the whole process. Return whether the setting was changed.

    Without it, every large tensor costs page faults. A forward and backward pass then takes up to 1.4 times as long
    (``docs/lab/speed.md`` has the measurement). The setting stays as it is on systems without glibc, and where the
    environment variable ``MAPORL_REUSE_MEMORY`` is 0.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get("MAPORL_REUSE_MEMORY") == "0":
        return False
    libc = ctypes.CDLL("libc.so.6")
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    return all(libc.mallopt(parameter, value) for parameter, value in settings)
