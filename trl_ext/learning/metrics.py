"""Measurements of a trainer: seconds of each phase, means over optimizer steps, and peak memory."""

import resource
import time
from collections.abc import Iterable
from contextlib import contextmanager

import numpy as np
import torch

from trl_ext.process.devices import peak_bytes

Metrics = dict[str, float]


class Clock:
    """Measures the seconds of each named phase of an update: ``with clock("update"): ...``."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def total(self) -> float:
        """Return the seconds of all phases together."""
        return sum(self.seconds.values())


def update_metrics(entries: list[Metrics]) -> Metrics:
    """Return means over all optimizer steps of an update, under TRL's metric names, and of an objective's measures."""
    if not entries:
        return {}
    found: dict[str, list[float]] = {}
    for entry in entries:
        for key, value in entry.items():
            found.setdefault(key, []).append(value)
    mean = {key: sum(values) / len(values) for key, values in found.items()}
    ratios = found["ratio"]
    named = {"kl_loss": "loss/kl_avg", "clipped": "policy/clipfrac_avg"}
    extra = {named.get(k, k): value for k, value in mean.items() if k in named or k.startswith("measure/")}
    return extra | {
        "loss/policy_avg": mean["policy_loss"],
        "loss/value_avg": mean["value_loss"],
        "policy/approxkl_avg": mean["approx_kl"],
        "val/clipfrac_avg": mean["value_clipped"],
        "val/ratio": mean["ratio"],
        "val/ratio_var": float(np.var(ratios)),
        "val/first_ratio": ratios[0],
        "grad_norm": mean["grad_norm"],
    }


def peak_memory(devices: Iterable[torch.device]) -> float:
    """Return the peak memory of this process in GiB: that of its fullest accelerator, or main memory on CPUs."""
    peak = peak_bytes(devices)
    if peak is not None:
        return peak / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def mean(values: list[float | None]) -> float:
    """Return the mean of ``values`` without the entries that are None, or NaN if no entry is left."""
    numbers = [v for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else float("nan")
