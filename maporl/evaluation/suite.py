"""Evaluation on a suite of benchmarks with several samples of each question: avg@k, pass@k, maj@k. No torch.

A team's answer to a question is the plurality of its agents' answers in the last turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maporl.evaluation.metrics import Share, majority_credit, numbers_of
from maporl.text import markdown_table
from maporl.types import Dialogue, Grade


@dataclass(frozen=True)
class SuiteResult:
    """The result of one benchmark: ``average`` is avg@k, ``passed`` maps j to pass@j, and ``majority`` is maj@k."""

    name: str
    questions: int
    samples: int
    average: Share
    passed: dict[int, Share]
    majority: Share
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values, with 95% intervals."""
        return {
            "benchmark": self.name,
            "questions": self.questions,
            "samples": self.samples,
            f"avg@{self.samples}": numbers_of(self.average),
            **{f"pass@{k}": numbers_of(share) for k, share in self.passed.items()},
            f"maj@{self.samples}": numbers_of(self.majority),
            "tokens": self.tokens,
        }


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

    It is ``1 - C(n - c, k) / C(n, k)`` for c right answers among n samples (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    >>> [round(pass_at_k(4, 1, k), 4) for k in (1, 2, 4)], pass_at_k(4, 0, 4), pass_at_k(4, 4, 1)
    ([0.25, 0.5, 1.0], 0.0, 1.0)
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def summarise(name: str, dialogues: Sequence[Dialogue], samples: int) -> SuiteResult:
    """Measure graded dialogues, of which each question (``Dialogue.prompt``) has ``samples``."""
    questions: dict[int, list[list[Grade]]] = {}
    for dialogue in dialogues:
        last = [u.grade for u in dialogue.at(dialogue.turns() - 1) if u.grade is not None]
        questions.setdefault(dialogue.prompt, []).append(last)
    total = len(questions)
    credit = {q: [majority_credit(grades) for grades in tries] for q, tries in questions.items()}
    ks = [k for k in (2**power for power in range(samples.bit_length())) if k <= samples]
    right = [sum(c > 0.5 for c in values) for values in credit.values()]
    return SuiteResult(
        name,
        total,
        samples,
        Share(sum(sum(values) / len(values) for values in credit.values()), total),
        {k: Share(sum(pass_at_k(samples, c, k) for c in right), total) for k in ks},
        Share(sum(majority_credit([g for grades in tries for g in grades]) for tries in questions.values()), total),
        sum(len(u.response_ids) for d in dialogues for u in d.utterances),
    )


def markdown(results: Sequence[SuiteResult]) -> str:
    """Return a Markdown table with one row per benchmark and the mean over benchmarks in the last row.

    Shares are in %, with 95% Wilson intervals over questions.
    """
    first = results[0]
    columns = [f"avg@{first.samples}", *(f"pass@{k}" for k in first.passed), f"maj@{first.samples}"]
    shares = [[r.average, *r.passed.values(), r.majority] for r in results]
    rows = [[r.name, r.questions, *map(_cell, own)] for r, own in zip(results, shares, strict=True)]
    means = [sum(s.value for s in column) / len(results) for column in zip(*shares, strict=True)]
    lines = markdown_table(["benchmark", "questions", *columns], rows)
    return "\n".join([*lines, "| mean | | " + " | ".join(f"{100 * m:.1f}" for m in means) + " |"])


def _cell(share: Share) -> str:
    low, high = share.interval()
    return f"{100 * share.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
