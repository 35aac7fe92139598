"""What a service does with log-probabilities, losses and steps, measured at the start on a throw-away adapter.

Servers that speak the Tinker API differ in what they do, and say nothing. So each is asked for log-probabilities whose
values are known, and for steps whose effect is known: by an Adam without memory whose ``eps`` is so large that a step
is proportional to the gradient. What can be corrected here is, and what cannot ends the run before it costs anything.
"""

import math
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from maporl.integrations.tinker.engine import _completion, _parameters, _prompt, prompt_logprobs
from maporl.integrations.tinker.service import Adapter, Row, Service, ServiceFailure
from trl_ext.sampling.request import Draw, TokenRequest

RANK = 8
"""The rank of the throw-away adapters."""
SHORT, LONG = 8, 24
"""The tokens with a log-probability of the probed row, and those of the row beside it and of what follows it."""
MOST_GAP = 0.3
"""The largest difference of log-probabilities that are to be the same, in nats a token: services compute in half
precision."""
AIM = 0.3
"""The change of a log-probability that a step is to make, in nats, which is far above rounding."""
NEAR = math.log(1.5)
"""How far the logarithm of a ratio of two steps may be from that of what it is taken for."""
EPS = 1e4
"""A step is ``rate / EPS`` times the gradient, because gradients are much smaller."""
RATIOS = {
    "sum": (1.0, 1.0),
    "rows": (1 / 2, 1.0),
    "tokens": (SHORT / (SHORT + LONG), SHORT / LONG),
    "sequence": (1.0, SHORT / LONG),
    "sequence and rows": (1 / 2, SHORT / LONG),
}
"""How much smaller a step is beside a second row, and in a row that goes on to LONG tokens, by what a loss is divided
by."""


def probe(service: Service, base: str, vocabulary: int, clips: bool) -> list[str]:
    """Measure what a service does, write it into ``service.facts[base]``, and return it as lines of text.

    Args:
        service: the service.
        base: a base model.
        vocabulary: the number of its tokens.
        clips: whether a learner asks for gradients to be clipped.

    Raises:
        ServiceFailure: the service does something that cannot be corrected. The message says what.
    """
    facts = service.facts[base] = {"divides": "sum"}
    row, longer, beside = _rows(vocabulary)
    sampler = service.base(base)
    known = torch.tensor(service.answer("read a row", prompt_logprobs(sampler, longer.ids))[-LONG:])
    trial = _Trial(Adapter(service, f"probe {uuid4().hex[:6]}", base, RANK, 0), row)
    try:
        _check_logprobs(service, trial.adapter, sampler, [longer, beside], known, facts)
        _measure_division(service, trial, longer, beside, facts)
        facts["clips"] = trial.clips()
    finally:
        trial.adapter.unload()
    again = Adapter(service, "a second probe", base, RANK, 0)
    try:
        found = again.logprobs([longer], again.forward([longer]))[0]
    finally:
        again.unload()
    gap = abs(float(found[0] - known[longer.first - 1]))
    if gap > facts["step"] / 2:
        raise _refused(
            service,
            f"a new LoRA changes its base by {gap:.2g} nats at a token: it has weights of an earlier "
            "one that was left over",
            "start the server again",
        )
    lines = [
        f"probe of {service.name}, {base}: sampled and trained log-probabilities differ by {facts['gap']:.2g} nats"
    ]
    if facts["divides"] != "sum":
        lines.append(f"it divides losses by {facts['divides']}, which is corrected here")
    if clips and not facts["clips"]:
        lines.append("it ignores grad_clip_norm, so that nothing clips gradients: training.max_grad_norm does nothing")
    return ["; ".join(lines)]


class _Trial:
    """Steps of a throw-away adapter, whose effect on the first token of a row is measured."""

    def __init__(self, adapter: Adapter, row: Row):
        self.adapter, self.row, self.rate = adapter, row, EPS / 1e4
        self.last: float | None = None
        """The log-probability after the last step."""

    def effect(self, rows: Sequence[Row], sign: float = 1.0, clip: float = 0.0, apart: bool = False) -> float:
        """Return how a step for the first sampled token of the first of ``rows`` changes its log-probability.

        The step, and the forward pass after it, are asked for together. ``apart`` sends each row in a request.

        Raises:
            ServiceFailure: the log-probability has changed since the last step's forward pass.
        """
        adapter = self.adapter
        before = adapter.logprobs(rows, adapter.forward(rows))
        if self.last is not None and abs(float(before[0][0]) - self.last) > AIM / 4:
            raise _refused(
                adapter.service,
                "it makes forward passes before the steps that were asked for earlier, so "
                "that old log-probabilities would be trained on",
                "look for an option by which it keeps the order of requests",
            )
        slopes = [torch.zeros_like(one) for one in before]
        slopes[0][0] = -sign
        each = [[n] for n in range(len(rows))] if apart else [list(range(len(rows)))]
        given: Any = [[[values[n] for n in part] for values in (rows, before, slopes)] for part in each]
        asked = [future for part in given for future in adapter.backward(*part)]
        options = {"beta1": 0.0, "beta2": 0.0, "eps": EPS, "weight_decay": 0.0}
        step = adapter.step(learning_rate=self.rate, grad_clip_norm=clip, **options)
        then = adapter.forward(rows[:1])
        for future in [*asked, step]:
            adapter.answer("train", future)
        self.last = float(adapter.logprobs(rows[:1], then)[0][0])
        return sign * (self.last - float(before[0][0]))

    def aim(self) -> float:
        """Choose the rate at which a step makes a change of about AIM, and return that change."""
        for _ in range(12):
            change = self.effect([self.row])
            if AIM / 4 < abs(change) < 4 * AIM:
                self.effect([self.row], -1.0)
                return self.effect([self.row])
            self.rate *= min(max(AIM / max(abs(change), 1e-4), 1e-3), 1e2)
        return change

    def clips(self) -> bool:
        """Return whether ``grad_clip_norm`` makes a step smaller."""
        return abs(self.effect([self.row], clip=1e-6)) < AIM / 8


def _rows(vocabulary: int) -> tuple[Row, Row, Row]:
    """Return a row of SHORT tokens, one that goes on to LONG tokens, and another one of LONG tokens."""
    generator = torch.Generator().manual_seed(0)
    ids, other = torch.randint(vocabulary, (2, LONG + 1), generator=generator).tolist()
    return Row(ids[: SHORT + 1], 2), Row(ids, 2), Row(other, 2)


def _check_logprobs(
    service: Service, adapter: Adapter, sampler: Any, rows: list[Row], known: Tensor, facts: dict
) -> None:
    """Check that log-probabilities are those of the tokens, in the order of the rows, and the same each time."""
    first, second = (adapter.logprobs(rows, adapter.forward(rows)) for _ in range(2))
    facts["repeats"] = _gap(torch.cat(first), torch.cat(second))
    here = known[rows[0].first - 1 :]
    facts["gap"] = _gap(first[0], here)
    if facts["gap"] > MOST_GAP:
        shifted = min(_gap(first[0][1:], here[:-1]), _gap(first[0][:-1], here[1:]))
        if shifted < facts["gap"] / 4:
            raise _refused(
                service,
                "its forward passes are off by a token: log-probabilities are those of the token "
                "beside the one that was asked for",
                "report it, and use another version of it",
            )
        raise _refused(
            service,
            f"the log-probabilities of a new LoRA and of its base differ by {facts['gap']:.2g} nats a "
            "token, so that another policy would be trained than the one that speaks",
            "look whether both are the same model, or start the server again",
        )
    asked = TokenRequest("probe", list(rows[0].ids), Draw(8), label="the probe")
    said = _completion(
        asked, service.answer("sample", sampler.sample(_prompt(asked.prompt_ids), 1, _parameters(asked.draw))), 0
    )  # type: ignore[attr-defined]
    read = Row([*asked.prompt_ids, *said.ids], len(asked.prompt_ids))
    facts["sampled_gap"] = _gap(adapter.logprobs([read], adapter.forward([read]))[0], torch.tensor(said.logprobs))
    if facts["sampled_gap"] > MOST_GAP:
        raise _refused(
            service,
            f"log-probabilities of sampled tokens and of forward passes differ by "
            f"{facts['sampled_gap']:.2g} nats a token",
            "look at the server's options for log-probabilities",
        )


def _measure_division(service: Service, trial: _Trial, longer: Row, beside: Row, facts: dict) -> None:
    """Find out by what losses are divided, of a request or of a step, and that steps go up."""
    alone = trial.aim()
    facts["step"] = alone
    if abs(alone) < AIM / 16:
        raise _refused(service, "its optimizer steps do nothing", "report it, and use another version of it")
    if alone < 0:
        raise _refused(
            service,
            "advantages have the wrong sign: a token with a positive one became less likely",
            "report it, and use another version of it",
        )
    ratios = []
    for rows in ([trial.row, beside], [longer]):
        trial.effect([trial.row], -1.0)  # back to where the first step began
        ratios.append(trial.effect(rows) / alone)
    distance = {name: max(_far(a, b) for a, b in zip(ratios, wanted, strict=True)) for name, wanted in RATIOS.items()}
    divides = min(distance, key=lambda name: distance[name])
    if distance[divides] > NEAR:
        told = f"{ratios[0]:.2g} beside another row and {ratios[1]:.2g} in a longer one"
        raise _refused(
            service,
            f"a step is {told} times as large, which no known way to divide a loss explains",
            "report it, and use another version of it",
        )
    trial.effect([trial.row], -1.0)
    together = trial.effect([trial.row, beside], apart=True) / alone
    of_step = together < (1 + ratios[0]) / 2 and RATIOS[divides][0] < 1
    # from here on it is corrected
    facts |= {"divides": divides, "over": "step" if of_step else "request", "ratios": [*ratios, together]}


def _far(ratio: float, wanted: float) -> float:
    return abs(math.log(ratio / wanted)) if ratio > 0 else math.inf


def _gap(one: Tensor, other: Tensor) -> float:
    """Return the mean difference of two lists of log-probabilities."""
    return float((one - other).abs().mean())


def _refused(service: Service, what: str, remedy: str) -> ServiceFailure:
    return ServiceFailure(f"{service.name} cannot be trained with: {what}; {remedy}")
