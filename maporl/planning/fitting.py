"""From measured seconds to the rates of a device with one model. Imports no torch."""

from dataclasses import dataclass, replace

from maporl.planning.estimates import Model, Rates, Work, update_flops


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
        steps: decoding steps of few rows and of many.
        prompted: the tokens of prompts that were read in one call.
        reading: its seconds.
        updates: two updates with their seconds, the smaller one first. Empty: none was measured.
    """

    steps: tuple[Step, Step]
    prompted: int
    reading: float
    updates: tuple[tuple[Work, float], ...] = ()


def fitted(assumed: Rates, model: Model, found: Timings) -> Rates:
    """Return the rates with which the formulas give what was measured. What was not measured stays as ``assumed``.

    A decoding step takes some seconds whatever its rows, which count as the reading of weights, and as many more for each row,
    which count as the reading of its cache and as arithmetic. Where rows cost less than their cache would, arithmetic stays
    assumed. Where many rows took less than few, which only noise explains, decoding stays assumed. What an update takes beside
    its operations is the optimizer's.
    """
    few, many = found.steps
    row = (many.seconds - few.seconds) / (many.rows - few.rows)
    weights = few.seconds - row * few.rows
    rates = replace(assumed, reading=2 * model.parameters * found.prompted / found.reading, measured=("reading",))
    if row >= 0 and weights > 0:
        # both steps have the same context
        bandwidth = model.weights / weights
        arithmetic = row - few.context * model.cache / bandwidth
        rates = replace(
            rates, bandwidth=bandwidth, step=0.0, overlap=False, measured=(*rates.measured, "bandwidth", "step")
        )
        if arithmetic > 0:
            rates = replace(rates, decoding=2 * model.parameters / arithmetic, measured=(*rates.measured, "decoding"))
    if found.updates:
        (less, short), (more, long) = found.updates
        operations = update_flops(model, more) - update_flops(model, less)
        whole = (long - short) / operations if long > short else long / update_flops(model, more)
        optimizer = max(0.0, short - whole * update_flops(model, less))
        rates = replace(
            rates, learning=1 / whole, optimizer=optimizer, measured=(*rates.measured, "learning", "optimizer")
        )
    return rates
