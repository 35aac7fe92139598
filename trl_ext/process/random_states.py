"""Random numbers: states that are put back, and seeds and orders that depend on a key only.

Torch and NumPy are imported where they are meant.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class GeneratorStates(NamedTuple):
    """The states of the global generators of Python and NumPy. NumPy's is None as long as nobody has imported NumPy."""

    python: Any
    numpy: dict[str, Any] | None


def generator_states() -> GeneratorStates:
    """Return the states of today, which may be compared by :func:`same_states`."""
    numpy = sys.modules.get("numpy")
    return GeneratorStates(random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False))


def same_states(before: GeneratorStates, now: GeneratorStates) -> tuple[bool, bool]:
    """Return whether Python's and NumPy's generators are as ``before``. One that there was not is."""
    return before.python == now.python, before.numpy is None or _plain(before.numpy) == _plain(now.numpy)


def _plain(state: Any) -> Any:
    """Return a state without arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python and, if it is imported, NumPy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def forked_generators() -> Iterator[None]:
    """Restore the states of the global generators of Python and NumPy afterwards."""
    before = generator_states()
    try:
        yield
    finally:
        random.setstate(before.python)
        if before.numpy is not None:
            sys.modules["numpy"].random.set_state(before.numpy)


@contextmanager
def forked_rng() -> Iterator[None]:
    """Restore torch's random states afterwards, on the CPU and on every accelerator.

    ``torch.manual_seed`` seeds them all. ``torch.random.fork_rng`` restores them all, too, but it warns where several
    accelerators are not named.
    """
    import torch

    from trl_ext.process.devices import accelerators

    devices = accelerators()
    kind = devices[0].type if devices else "cuda"  # any kind, if there is nothing to restore
    with torch.random.fork_rng([device.index for device in devices], device_type=kind):
        yield


def number_of(key: tuple) -> int:
    """Return a number of 128 bits that depends on ``key`` only, for seeding a random generator."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")


def shuffled_indices(size: int, seed: int, start: int, count: int) -> list[int]:
    """Return entries ``start`` to ``start + count`` of an endless sequence of seeded permutations of ``range(size)``.

    The position alone determines the entries, so a resumed run needs no other state.
    """
    import numpy as np

    indices: list[int] = []
    for position in range(start, start + count):
        epoch, offset = divmod(position, size)
        if not indices or offset == 0:
            order = np.random.default_rng([seed, epoch]).permutation(size)
        indices.append(int(order[offset]))
    return indices
