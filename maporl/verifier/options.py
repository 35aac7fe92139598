"""The options of the verifier's three commands, each declared once. No torch."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from maporl.errors import ConfigError


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled: a temperature for each batch, uniform between two, and ``top_p``."""

    temperature_low: float = 1.3
    temperature_high: float = 1.5
    top_p: float = 0.9
    batch_size: int = 64

    def __post_init__(self):
        _expect("--temperature-low", self.temperature_low, 0 < self.temperature_low < math.inf, "a number above 0")
        fits = self.temperature_low <= self.temperature_high < math.inf
        _expect("--temperature-high", self.temperature_high, fits, f"at least {self.temperature_low}")
        _expect("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _expect("--batch-size", self.batch_size, self.batch_size >= 1, "at least 1")


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    """``per_question`` samples by each agent of each training question, of the first ``limit`` questions or of all.

    ``agents`` names who answers; by default everyone but the ``judge``, which labels in the place of the task's grader.
    """

    per_question: int = 100
    limit: int | None = None
    agents: tuple[str, ...] = ()
    judge: str | None = None

    def __post_init__(self):
        super().__post_init__()
        _expect("--per-question", self.per_question, self.per_question >= 1, "at least 1")
        _expect("--limit", self.limit, self.limit is None or self.limit >= 1, "at least 1")


@dataclass(frozen=True)
class BalanceOptions(SamplingOptions):
    """At most ``per_question`` right and as many wrong answers of each question.

    A question short of one side is topped up in at most ``rounds`` rounds of ``per_round`` samples. ``short`` says what
    becomes of one that stays short: cut to its smaller side, or dropped. ``free_form``: answers have no asked form.
    ``repeats``: equal texts count each, as short answers need, of which there is only one right one.
    """

    per_question: int = 10
    rounds: int = 4
    per_round: int = 8
    short: Literal["cut", "drop"] = "cut"
    free_form: bool = False
    repeats: bool = False
    agent: str | None = None
    judge: str | None = None
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        _expect("--per-question", self.per_question, self.per_question >= 1, "at least 1")
        _expect("--rounds", self.rounds, self.rounds >= 0, "at least 0")
        _expect("--per-round", self.per_round, self.per_round >= 1, "at least 1")


@dataclass(frozen=True)
class TrainOptions:
    """``loss``: on every answer token or on the last; ``held_out``: the share of the questions kept for evaluation.

    ``longest``: rows of more tokens are dropped. ``bf16``: weights in bfloat16, what is trained in float32.
    """

    model: str
    loss: Literal["every", "last"] = "every"
    lora_r: int = 16
    lora_alpha: int = 32
    learning_rate: float = 2e-4
    batch_size: int = 8
    epochs: float = 1.0
    longest: int = 550
    held_out: float = 0.1
    bf16: bool = False
    use_cpu: bool = False
    chat_template: str | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("lora_r", "lora_alpha", "batch_size", "longest"):
            value = getattr(self, name)
            _expect(f"--{name.replace('_', '-')}", value, value >= 1, "at least 1")
        _expect("--learning-rate", self.learning_rate, 0 < self.learning_rate < math.inf, "a number above 0")
        _expect("--epochs", self.epochs, 0 < self.epochs < math.inf, "a number above 0")
        _expect("--held-out", self.held_out, 0 < self.held_out < 1, "a share between 0 and 1")


def _expect(name: str, got: Any, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"{name}: expected {expected}, got {got}")
