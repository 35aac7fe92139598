"""What the labels of a set of answers are worth: how much the question alone tells of them, and how varied errors are.

Balancing is there to close the leak through the question.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from rich.table import Table

from maporl.verifier.data import Sample
from maporl.verifier.filters import same_text

FEATURES = 2048
"""The words of a question are hashed into so many columns."""


@dataclass(frozen=True)
class Balance:
    """How the labels are spread, and how well they can be predicted without reading an answer.

    ``both``: questions that have right and wrong answers. ``skew``: mean over questions of ``|share of right answers -
    1/2|``. ``words``: accuracy of a logistic regression on the words of the question. ``majority``: accuracy of each
    question's more frequent label. Both accuracies are measured on the answers they were fitted to, so that they say
    how much a verifier could learn from questions alone. ``errors``: the mean number of different wrong answers of the
    questions that have any. A verifier knows no other errors than these.
    """

    questions: int
    right: int
    wrong: int
    both: int
    skew: float
    words: float
    majority: float
    errors: float


def measure(samples: Sequence[Sample]) -> Balance:
    """The balance of ``samples``, of which there must be at least one."""
    counts: dict[str, Counter] = defaultdict(Counter)
    texts = {}
    errors: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        counts[sample.id][sample.correct] += 1
        texts[sample.id] = sample.question
        if not sample.correct:
            errors[sample.id].add(same_text(sample.answer))
    pairs = torch.tensor([[counts[name][True], counts[name][False]] for name in texts], dtype=torch.float32)
    total = pairs.sum(1)
    return Balance(
        len(texts),
        int(pairs[:, 0].sum()),
        int(pairs[:, 1].sum()),
        int((pairs > 0).all(1).sum()),
        float((pairs[:, 0] / total - 0.5).abs().mean()),
        words_accuracy(list(texts.values()), pairs),
        float(pairs.max(1).values.sum() / total.sum()),
        fmean(map(len, errors.values())) if errors else 0.0,
    )


def words_accuracy(questions: Sequence[str], counts: torch.Tensor) -> float:
    """Accuracy of a logistic regression of the label on the question's hashed words, on the answers it is fitted to.

    ``counts`` [Q, 2]: the numbers of right and wrong answers of each question. If the regression is undecided about a
    question, half of its answers count as predicted.
    """
    words = torch.zeros(len(questions), FEATURES)
    for row, question in enumerate(questions):
        hashes = Counter(zlib.crc32(word.encode()) % FEATURES for word in re.findall(r"\w+", question.lower()))
        for column, count in hashes.items():
            words[row, column] = float(count)
    words = torch.cat([torch.log1p(words), torch.ones(len(questions), 1)], 1)
    weights = torch.zeros(words.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        z = words @ weights
        softplus = torch.nn.functional.softplus
        value = (counts[:, 0] * softplus(-z) + counts[:, 1] * softplus(z)).sum() / counts.sum()
        value = value + 1e-4 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    z = (words @ weights).detach()
    hits = torch.where(z > 0, counts[:, 0], torch.where(z < 0, counts[:, 1], counts.sum(1) / 2))
    return float(hits.sum() / counts.sum())


def balance_table(before: Balance, after: Balance | None) -> Table:
    """Both side by side for a terminal. ``after`` is None if no answer is left."""
    table = Table(title="Labels before and after balancing")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    rows = {
        "questions": lambda b: str(b.questions),
        "right answers": lambda b: str(b.right),
        "wrong answers": lambda b: str(b.wrong),
        "share right": lambda b: f"{b.right / (b.right + b.wrong):.3f}",
        "questions with both labels": lambda b: str(b.both),
        "mean |share right - 1/2| by question": lambda b: f"{b.skew:.3f}",
        "accuracy from the question's words": lambda b: f"{b.words:.3f}",
        "accuracy from the question's majority": lambda b: f"{b.majority:.3f}",
        "different wrong answers by question": lambda b: f"{b.errors:.1f}",
    }
    for name, text in rows.items():
        table.add_row(name, text(before), "-" if after is None else text(after))
    return table


def source_lines(samples: Sequence[Sample]) -> list[str]:
    """A line for each source of answers. If right and wrong ones come from different sources, style tells the label."""
    counts = Counter((s.source, s.correct) for s in samples)
    return [
        f"{source}: {counts[source, True]} right, {counts[source, False]} wrong"
        for source in ("sample", "reference", "hint")
        if counts[source, True] + counts[source, False]
    ]
