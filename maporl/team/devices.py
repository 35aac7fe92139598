"""Give each base model a device."""

import os
from collections.abc import Mapping

import torch

from maporl.team.agents import Policy
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.process.devices import accelerator, accelerators


def own_device(use_cpu: bool) -> torch.device:
    """Return the device of this process, before any library has chosen it: the CPU, or the accelerator of its rank."""
    kind = None if use_cpu else accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def split(owners: list[str], use_cpu: bool, devices: list[torch.device] | None = None) -> list[torch.device]:
    """Return a device for each base model. ``owners`` names each of them by one of its policies.

    ``devices`` are by default the accelerators of this process, or the CPU with ``use_cpu``.

    Raises:
        ValueError: the devices are fewer than the base models, or several processes were started.
    """
    if distributed.size() > 1:
        raise ValueError(
            f"placement: split gives one process several devices, and {distributed.size()} processes were started; "
            "start one, or use placement: shared, where every process has all models on its own device"
        )
    if devices is None:
        devices = (not use_cpu and accelerators()) or [torch.device("cpu")]
    if len(owners) > len(devices):
        raise ValueError(
            f"placement: split needs a device for each of {len(owners)} base models (of policies {', '.join(owners)}), "
            f"and there {'is' if len(devices) == 1 else 'are'} {len(devices)} ({', '.join(map(str, devices))}); use "
            "placement: shared, or let agents share a base (agents.NAME.lora)"
        )
    return devices[: len(owners)]


def split_bases(policies: Mapping[str, Policy], use_cpu: bool) -> dict[int, torch.device]:
    """Return a device for every base model by the model's ``id``, in the order of the policies.

    Raises:
        ValueError: the devices are fewer than the base models, or several processes were started.
    """
    bases = {id(base_of(policy.model)): name for name, policy in reversed(list(policies.items()))}
    return dict(zip(reversed(bases), split(list(reversed(bases.values())), use_cpu), strict=True))
