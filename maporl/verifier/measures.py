"""Measures of a verifier's scores: accuracy, ranking, calibration. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 10


def sigmoid(outputs: np.ndarray) -> np.ndarray:
    """The probabilities for a model's outputs, computed without overflow."""
    return np.exp(-np.logaddexp(0.0, -outputs))


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """The share of answers that the score predicts, from 1/2 on as right and below it as wrong."""
    return float(np.mean((scores >= 0.5) == (labels > 0.5)))


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """The probability that a right answer scores above a wrong one, with ties counting half.

    None if all answers are right or all are wrong. Computed from ranks (Mann and Whitney 1947), for R right and W wrong
    answers: ``(sum of the ranks of the right ones - R (R + 1) / 2) / (R W)``.

    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """
    right = labels > 0.5
    count, others = int(right.sum()), int((~right).sum())
    if not count or not others:
        return None
    _, inverse, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(sizes) - (sizes - 1) / 2
    return float((mean_ranks[inverse][right].sum() - count * (count + 1) / 2) / (count * others))


def reached_by_chance(labels: np.ndarray) -> float | None:
    """The AUC that scores without any meaning exceed in one of twenty cases, or None without right or without wrong
    answers.

    It is 1/2 plus 1.645 standard errors of the Mann-Whitney statistic: ``sqrt((R + W + 1) / (12 R W))`` for R right and
    W wrong answers. It may be above 1 for very few answers, which can show nothing.

    >>> round(reached_by_chance(np.array([1] * 100 + [0] * 100)), 3), round(reached_by_chance(np.array([1, 0])), 2)
    (0.567, 1.32)
    """
    right = int((labels > 0.5).sum())
    wrong = len(labels) - right
    if not right or not wrong:
        return None
    return 0.5 + 1.645 * math.sqrt((len(labels) + 1) / (12 * right * wrong))


def calibration_bins(scores: np.ndarray, labels: np.ndarray) -> list[tuple[int, float, float]]:
    """(answers, mean score, share right) for each of :data:`BINS` equal intervals of the score that holds an answer."""
    place = np.minimum((scores * BINS).astype(int), BINS - 1)
    masks = [place == index for index in range(BINS)]
    return [(int(mask.sum()), float(scores[mask].mean()), float(labels[mask].mean())) for mask in masks if mask.any()]


def ece(scores: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599): mean distance of score and share right over bins.

    >>> round(ece(np.array([0.95, 0.85, 0.15]), np.array([1, 0, 0])), 4)
    0.35
    """
    return sum(n * abs(score - right) for n, score, right in calibration_bins(scores, labels)) / len(scores)


def nll(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean binary cross-entropy of outputs before the sigmoid, nats."""
    return float(np.mean(np.logaddexp(0.0, outputs) - labels * outputs))


def fit_temperature(outputs: np.ndarray, labels: np.ndarray) -> float:
    """The ``T`` from 0.05 to 20 with the least cross-entropy of ``sigmoid(outputs / T)`` and the labels.

    The cross-entropy is convex in 1/T, so that a golden-section search finds its minimum.
    """
    golden = (math.sqrt(5) - 1) / 2
    a, b = 1 / 20.0, 1 / 0.05
    while b - a > 1e-6 * b:
        left, right = b - golden * (b - a), a + golden * (b - a)
        if nll(outputs * left, labels) <= nll(outputs * right, labels):
            b = right
        else:
            a = left
    return 2 / (a + b)


def summary(outputs: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> dict[str, Any]:
    """Every measure of one set of answers. ``outputs`` [N] are the model's, before the sigmoid."""
    scores = sigmoid(outputs / temperature)
    return {
        "answers": len(labels),
        "accuracy": accuracy(scores, labels),
        "auc": auc(scores, labels),
        "ece": ece(scores, labels),
        "bins": calibration_bins(scores, labels),
        "nll": nll(outputs / temperature, labels),
    }


def by_question(outputs: np.ndarray, labels: np.ndarray, questions: Sequence[str]) -> dict[str, Any]:
    """Means over questions. The AUC within a question tells how well the verifier chooses among its answers."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(questions):
        groups[name].append(row)
    scores = sigmoid(outputs)
    accuracies = [accuracy(scores[rows], labels[rows]) for rows in groups.values()]
    aucs = [auc(outputs[rows], labels[rows]) for rows in groups.values()]
    ranked = [value for value in aucs if value is not None]
    return {
        "questions": len(groups),
        "mean_accuracy": float(np.mean(accuracies)),
        "worst_accuracy": float(np.min(accuracies)),
        "questions_with_both_labels": len(ranked),
        "mean_auc_within": float(np.mean(ranked)) if ranked else None,
    }


def by_length(
    outputs: np.ndarray, labels: np.ndarray, lengths: np.ndarray, temperature: float = 1.0
) -> list[dict[str, Any]]:
    """The summary of each quartile of the answers by length in tokens, without quartiles that ties leave empty."""
    edges = np.quantile(lengths, [0.25, 0.5, 0.75])
    place = np.searchsorted(edges, lengths, side="left")
    return [
        {
            "tokens": [int(lengths[mask].min()), int(lengths[mask].max())],
            **summary(outputs[mask], labels[mask], temperature),
        }
        for mask in (place == quarter for quarter in range(4))
        if mask.any()
    ]
