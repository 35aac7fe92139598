"""Counts of a run's questions: labels that nobody can read, and held-out questions that are trained on. Imports no
torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from maporl.errors import Fault
from maporl.tasks.base import Task
from maporl.tasks.mixture import Mixture
from maporl.types import Example

MOST = 200_000
"""The first training questions that are counted. Toys and tasks of one's own may have any number."""


@dataclass(frozen=True)
class SplitCounts:
    """Counts of the questions of one split, or of one part of a mixture.

    Args:
        questions: the questions that were counted: the first :data:`MOST` of training, or those that evaluations ask.
        labels: how many of them have a label.
        graded: how many labels were graded: all, or so many, at equal distances, as the task says
            (:attr:`~maporl.Task.labels_graded`).
        unreadable: how many of these cannot be read, so that no answer is graded.
        unread: three of them, for people.
        duplicates: questions that stand earlier in the split too.
        conflicting: how many of these stand there with another label.
        overlap_equal_label: held-out questions that are also training questions, with the same label.
        overlap_other_label: the same, with another label.
    """

    questions: int
    labels: int
    graded: int
    unreadable: int
    unread: tuple[str, ...]
    duplicates: int
    conflicting: int
    overlap_equal_label: int
    overlap_other_label: int


def count_data(
    task: Task, held_out: Task | None = None, asked: int = 0, curriculum: Iterable[tuple[int, Task]] = ()
) -> dict[str, SplitCounts]:
    """Return the counts of each split: of "train", "eval", and "train from update N". A mixture has each part apart, as
    "train/NAME".

    Two questions are equal by :meth:`maporl.Task.question_key`, and two labels if blanks and case are left out.

    Args:
        task: the training split.
        held_out: the evaluation split, if there is one.
        asked: how many questions evaluations ask, the first ones.
        curriculum: the tasks that are trained on later, with the update from which each is.
    """
    trained: dict[str, set[str]] = {}
    counts = {}
    for split, some in [("train", task), *((f"train from update {update}", later) for update, later in curriculum)]:
        for name, part, examples in _parts(some, split, MOST):
            counts[name], labels = _counted(part, examples, {})
            for key in labels:
                trained.setdefault(key, set()).update(labels[key])
    for name, part, examples in [] if held_out is None else _parts(held_out, "eval", asked):
        counts[name], _ = _counted(part, examples, trained)
    return counts


def faults(counts: Mapping[str, SplitCounts], task: str, paid: bool) -> Iterator[Fault]:
    """Yield what the counts of a ``task`` of this name say. ``paid``: whether rewards read labels."""
    for split, count in counts.items():
        key = f"task {task}, {split}"
        if count.unreadable:
            of = "" if count.graded == count.labels else f" that were tried, of {count.labels:,} in all,"
            what = (
                f"{count.unreadable:,} of {count.graded:,} labels{of} cannot be read, so answers that differ from them "
            )
            what += f"are not graded: {', '.join(count.unread)}"
            remedy = "correct or remove them; the task math takes words for labels"
            yield Fault(key, what, remedy, "error" if paid and count.unreadable == count.graded else "warning")
        if count.conflicting:
            what = f"{count.conflicting:,} of {count.questions:,} questions stand there again with another label"
            yield Fault(key, what, "correct or remove them", "warning")
    if said := overlap(counts):
        what = said
        remedy = "hold others out (task.eval_source or task.held_out, where the task has it)"
        yield Fault(f"task {task}", what, remedy, "warning")


def totals(counts: Mapping[str, SplitCounts]) -> dict[str, int | str]:
    """Return the counts of all splits together, and what :func:`overlap` says of them, for the audit of a run."""
    return {
        "labels": sum(count.graded for count in counts.values()),
        "unreadable": sum(count.unreadable for count in counts.values()),
        "conflicting": sum(count.conflicting for count in counts.values()),
        "overlap": overlap(counts),
    }


def overlap(counts: Mapping[str, SplitCounts]) -> str:
    """Say how many held-out questions are also training questions, without a full stop, or "" if none is."""
    held_out = [count for split, count in counts.items() if split.startswith("eval")]
    asked, other = sum(count.questions for count in held_out), sum(count.overlap_other_label for count in held_out)
    both = other + sum(count.overlap_equal_label for count in held_out)
    labels = f", {other:,} of them with another label" if other else ""
    return f"{both:,} of {asked:,} held-out questions are also training questions{labels}" if both else ""


def _parts(task: Task, split: str, most: int) -> Iterator[tuple[str, Task, list[Example]]]:
    """Yield a split by name with its first ``most`` examples, or each part of a mixture, which repeats short ones."""
    examples = [task[index] for index in range(min(most, len(task)))] if task.has_questions else []
    if isinstance(task, Mixture):
        for name, part in task.parts.items():
            once = {example.id: example for example in examples if example.meta["task"] == name}
            yield f"{split}/{name}", part, list(once.values())
    elif examples:
        yield split, task, examples


def _counted(
    task: Task, examples: Sequence[Example], trained: Mapping[str, set[str]]
) -> tuple[SplitCounts, dict[str, set[str]]]:
    """Return the counts of some examples, and the labels of each question. ``trained`` has those of training."""
    seen: dict[str, set[str]] = {}
    duplicates = conflicting = equal = other = 0
    for example in examples:
        key, label = task.question_key(example), " ".join(example.answer.split()).casefold()
        labels = seen.setdefault(key, set())
        duplicates += bool(labels)
        conflicting += bool(labels - {label})
        labels.add(label)
        equal += label in trained.get(key, ())
        other += key in trained and label not in trained[key]
    labelled = [example for example in examples if task.labelled and example.answer.strip()]
    graded = labelled[:: max(1, -(-len(labelled) // task.labels_graded))] if task.labels_graded else []
    unread = [example for example in graded if not task.reads_label(example)]
    shown = tuple(f"{example.answer!r:.60} ({example.id:.60})" for example in unread[:3])
    read = len(labelled), len(graded), len(unread), shown
    return SplitCounts(len(examples), *read, duplicates, conflicting, equal, other), seen
