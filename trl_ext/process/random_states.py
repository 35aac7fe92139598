"""Random numbers: states that are put back, and seeds that depend on a key only."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trl_ext.process.devices import accelerators


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


def number_of(key: tuple) -> int:
    """Return a number of 128 bits that depends on ``key`` only, for seeding a random generator."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")
