"""Measure the reward rules on one core: shaping 10,000 questions, and repetition in 10,000 answers.

    OMP_NUM_THREADS=1 python benchmarks/shaping.py

It prints one JSON line with medians of several runs in milliseconds: ``share_scores_ms`` (the slowest of the six
rules), ``collaboration_bonus_ms``, ``shaping_ms`` (both) and ``repetition_ms``.
"""

import json
import statistics
import time

import numpy as np

from maporl.rewards.credit import repeats
from maporl.rewards.shaping import HORIZONS, SHARES, collaboration_bonus, share_scores

QUESTIONS, AGENTS, TURNS, ANSWERS, TOKENS, RUNS = 10_000, 4, 5, 10_000, 300, 9


def milliseconds(function, *arguments) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        function(*arguments)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def main() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((TURNS, AGENTS, QUESTIONS))
    finished = rng.integers(0, TURNS, QUESTIONS)
    for turn in range(TURNS):
        scores[turn][:, finished < turn] = np.nan
    correct = np.where(np.isnan(scores), np.nan, scores > 0.5)
    share = max(milliseconds(share_scores, scores, h, s) for h in HORIZONS for s in SHARES)
    bonus = milliseconds(collaboration_bonus, correct, (1.0, 1.0, 1.0, 1.0))
    answers = rng.integers(0, 30_000, (ANSWERS, TOKENS)).tolist()
    digits = [frozenset(range(10))] * ANSWERS
    result = {
        "share_scores_ms": share,
        "collaboration_bonus_ms": bonus,
        "shaping_ms": share + bonus,
        "repetition_ms": milliseconds(repeats, answers, digits),
    }
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))


if __name__ == "__main__":
    main()
