"""Finds answers that repeat themselves. Repetition is one of the penalties for malformed answers.

Each penalty has a name. It is subtracted only from the credit of the agent that gave the answer.
"""

from collections.abc import Collection, Sequence

import numpy as np

LONGEST_NGRAM = 20
"""The longest n-gram whose repetition is searched for, as in MAPoRL's published code."""


def repeats(
    answers: Sequence[Sequence[int]], exempt: Sequence[Collection[int]] | None = None, times: int = 3
) -> np.ndarray:
    """Return which answers contain some n-gram of tokens (n = 1 .. 20) more than ``times`` times in a row: bool
    [answer].

    ``exempt`` lists, for each answer, token ids that do not count, such as digits. An n-gram that contains only such
    ids may repeat, because 1111 is a number. The time is linear in the number of tokens: an n-gram stands k times in a
    row if k-1 periods in a row agree with the period after them.
    """
    repeating = np.zeros(len(answers), dtype=bool)
    order = np.argsort([len(a) for a in answers], kind="stable")
    for chunk in np.array_split(order, max(1, len(answers) // 512)):  # answers of similar length share an array
        if len(chunk):
            repeating[chunk] = _repeats(
                [answers[i] for i in chunk], [exempt[i] if exempt else () for i in chunk], times
            )
    return repeating


def _repeats(answers: list[Sequence[int]], exempt: list[Collection[int]], times: int) -> np.ndarray:
    width = max((len(a) for a in answers), default=0)
    # padding differs at every position, so it never repeats
    ids = np.tile(-1 - np.arange(width), (len(answers), 1))
    counts = np.zeros((len(answers), width + 1), dtype=np.int64)  # tokens that are not exempt, up to a position
    for row, (answer, ignored) in enumerate(zip(answers, exempt, strict=True)):
        ids[row, : len(answer)] = answer
        marks = [token not in ignored for token in answer]
        counts[row, 1 : len(answer) + 1] = np.cumsum(marks)
        counts[row, len(answer) + 1 :] = counts[row, len(answer)]
    repeating = np.zeros(len(answers), dtype=bool)
    for n in range(1, min(LONGEST_NGRAM, width // (times + 1)) + 1):
        same = ids[:, n:] == ids[:, :-n]
        agreeing = np.zeros((len(answers), same.shape[1] + 1), dtype=np.int64)
        np.cumsum(same, axis=1, out=agreeing[:, 1:])
        span = times * n
        starts = agreeing[:, span:] - agreeing[:, :-span] == span
        counted = counts[:, n : n + starts.shape[1]] > counts[:, : starts.shape[1]]
        repeating |= (starts & counted).any(1)
    return repeating
