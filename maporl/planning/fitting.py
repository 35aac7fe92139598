"""From measured seconds to the rates of a device with one model. Imports no torch."""

from dataclasses import dataclass, replace

from maporl.planning.estimates import Rates, Work, update_flops
from trl_ext.models.shape import Shape


@dataclass(frozen=True)
class Step:
    """A decoding step that was measured.

    Args:
        rows: the number of rows.
        context: the mean number of tokens before each of them.
        seconds: what it took.
    """

    rows: int
    context: float
    seconds: float


@dataclass(frozen=True)
class Timings:
    """What was measured of one base model.

    Args:
        steps: two decoding steps or more, whose rows rise from a single one.
        prompted: the tokens of prompts that were read in one call.
        reading: its seconds.
        updates: two updates with their seconds, the smaller one first. Empty: none was measured.
    """

    steps: tuple[Step, ...]
    prompted: int
    reading: float
    updates: tuple[tuple[Work, float], ...] = ()


def fitted(assumed: Rates, model: Shape, timings: Timings) -> Rates:
    """Return the rates with which the formulas give what was measured. What was not measured stays as ``assumed``.

    A step of a single row says how fast weights are read, and so how fast the cache of each row is. What an update
    takes beside its operations is the optimizer's.
    """
    first = timings.steps[0]
    bandwidth = (model.weights + first.context * model.kv_cache(1)) / first.seconds
    steps = tuple(
        (step.rows, step.seconds - step.rows * step.context * model.kv_cache(1) / bandwidth) for step in timings.steps
    )
    rates = replace(
        assumed,
        reading=2 * model.parameters * timings.prompted / timings.reading,
        bandwidth=bandwidth,
        steps=steps,
        measured=("reading", "bandwidth", "steps"),
    )
    if timings.updates:
        (less, short), (more, long) = timings.updates
        operations = update_flops(model, more) - update_flops(model, less)
        whole = (long - short) / operations if long > short else long / update_flops(model, more)
        optimizer = max(0.0, short - whole * update_flops(model, less))
        rates = replace(
            rates, learning=1 / whole, optimizer=optimizer, measured=(*rates.measured, "learning", "optimizer")
        )
    return rates
