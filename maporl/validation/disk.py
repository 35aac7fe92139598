"""Whether the disk of a run's folder has room for what the run writes there. No weights are read."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from maporl.config.schema import Config
from maporl.errors import Fault
from maporl.protocols import policy_names
from maporl.run import ResolvedRun
from maporl.team.memory import adapter_parameters, shape_of
from trl_ext.models.shape import training_bytes

SPARE = 0.2e9
"""Bytes beside weights: metrics, dialogues, the report."""


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the disk is too full: an error if the final weights do not fit, a warning if checkpoints do not."""
    config = run.config
    weights, checkpoint = _sizes(config)
    kept = _checkpoints(config)
    final = weights + SPARE
    needed = final + kept * checkpoint
    folder = Path(config.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free >= needed:
        return
    remedy = "make room, or give another output_dir"
    if kept and free >= final:
        remedy = f"set training.save_total_limit: 1 or training.save_steps: 0 (no checkpoints), {remedy}"
    what = (
        f"the disk of {str(there)!r} has {_shown(free)} free, and the run writes about {_shown(needed)} there "
        f"({_shown(final)} at its end, and {kept} checkpoint{'' if kept == 1 else 's'} of {_shown(checkpoint)})"
    )
    yield Fault("output_dir", what, remedy, "warning" if free >= final else "error")


def _sizes(config: Config) -> tuple[float, float]:
    """Return the bytes of the trained weights of all policies, and of a checkpoint with their optimizer."""
    weights = checkpoint = 0.0
    seen: set[str] = set()
    for name, section in config.agents.items():
        if not section.weights or not section.trainable:
            continue
        for policy in set(policy_names(name, section, config)) - seen:
            seen.add(policy)
            shape = shape_of(section)
            adapter = section.lora is not None or section.adapter is not None
            trained = adapter_parameters(section) if adapter else shape.parameters
            weights += trained * shape.bytes
            each = training_bytes(shape.bytes, config.training.optim)
            checkpoint += trained * (shape.bytes + each.copy + each.moments)
    return weights, checkpoint


def _checkpoints(config: Config) -> int:
    """Return how many checkpoints are there at the end."""
    every = config.training.save_steps
    if not every or config.stages:
        return 0
    made = -(-config.updates // every)  # one after the last update too
    return min(made, config.training.save_total_limit or made)


def _shown(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
