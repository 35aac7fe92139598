"""Several tasks at once, whose questions are mixed. Imports no torch."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from maporl.tasks.base import Task
from maporl.tasks.lessons import Lessons, lessons_of
from maporl.tasks.registry import build_task
from maporl.types import Call, Example, Grade, Message
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Mixture(Lessons, Task):
    """The questions of several tasks, asked and graded each as its own task does it.

    Raises:
        ValueError: there are fewer than two tasks, one of them is a mixture or has no questions, or only some have
            labels.
    """

    tasks: dict[str, dict[str, Any]] = option(
        help="The sections of the tasks, by a name of your choice: {sums: {name: toy_sum}, products: {name: "
        "toy_times}}. The name is the column `task`, by which advantages can be compared apart (AgentRL, arXiv "
        "2510.04206), and stands before the ids of questions."
    )
    balance: Literal["even", "size"] = option(
        "even",
        "How often each is asked: all equally often (even: shorter ones are repeated), or as many questions as each "
        "has (size).",
    )
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    mixed = True

    def __post_init__(self):
        super().__post_init__()
        if len(self.tasks) < 2:
            raise ValueError(f"tasks: expected at least two tasks by name, got {list(self.tasks)}")
        for name, task in self.parts.items():
            if task.mixed or not task.has_questions:
                what = "is a mixture itself" if task.mixed else "has no questions"
                raise ValueError(f"tasks.{name}: it {what}; name a task with questions")
        without = [name for name, task in self.parts.items() if not task.labelled]
        if without and len(without) < len(self.parts):
            raise ValueError(f"tasks.{without[0]}: its questions have no labels, others do; mix like with like")

    @cached_property
    def parts(self) -> dict[str, Task]:
        """The tasks by name."""
        return {
            name: build_task(section, self.split, self.seed, f"task.tasks.{name}")
            for name, section in self.tasks.items()
        }

    @property
    def labelled(self) -> bool:  # type: ignore[override]  # it follows from the parts
        """Whether answers can be right or wrong."""
        return all(task.labelled for task in self.parts.values())

    @property
    def answer_form(self) -> str:  # type: ignore[override]  # it follows from the parts
        """The forms in which agents are asked for a final answer."""
        return ", or ".join(dict.fromkeys(task.answer_form for task in self.parts.values()))

    @property
    def roles(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the parts
        """The roles of all parts."""
        return frozenset[str]().union(*(lessons_of(task).roles for task in self.parts.values()))

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for name, size in self._sizes.items():
            if index < size:
                task = self.parts[name]
                example = task[index % len(task)]
                return replace(example, id=f"{name}/{example.id}", meta={**example.meta, "task": name})
            index -= size
        raise AssertionError("the sizes add up to the length")

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """How many questions of each task there are."""
        sizes = {name: len(task) for name, task in self.parts.items()}
        return dict.fromkeys(sizes, max(sizes.values())) if self.balance == "even" else sizes

    def part_of(self, example: Example) -> Task:
        """The task of which ``example`` is a question."""
        return self.parts[example.meta["task"]]

    def grade(self, example: Example, text: str) -> Grade:
        """The grade of the example's own task."""
        return self.part_of(example).grade(example, text)

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """The grades of the examples' own tasks, each of which is called once."""
        grades: dict[int, Grade] = {}
        for name, task in self.parts.items():
            indices = [i for i, example in enumerate(examples) if example.meta["task"] == name]
            part_grades = (
                task.grade_many([examples[i] for i in indices], [texts[i] for i in indices]) if indices else []
            )
            grades |= dict(zip(indices, part_grades, strict=True))
        return [grades[i] for i in range(len(examples))]

    def question(self, example: Example) -> str:
        """The question as its own task puts it."""
        return self.part_of(example).question(example)

    def prompt(self, example: Example) -> str | list[Message]:
        """The prompt of its own task."""
        return self.part_of(example).prompt(example)

    def before_question(self, example: Example) -> list[Message]:
        """The messages that its own task puts before the question."""
        return self.part_of(example).before_question(example)

    def question_key(self, example: Example) -> str:
        """What tells the question from others of its own task."""
        return self.part_of(example).question_key(example)

    def columns(self, example: Example) -> dict[str, Any]:
        """What reward functions get about the example, and the name of its ``task``."""
        return {**self.part_of(example).columns(example), "task": example.meta["task"]}

    def show_meta(self, example: Example) -> dict[str, Any]:
        """What its own task shows of it, and the name of its ``task``."""
        return {**self.part_of(example).show_meta(example), "task": example.meta["task"]}

    def solution(self, example: Example) -> str:
        """A right answer in the form of its own task."""
        return self.part_of(example).solution(example)

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The answer of a student of its own task."""
        return lessons_of(self.part_of(example)).write_answer(example, rng, right)

    def write_reply(self, example: Example, rng: random.Random, right: bool, role: str | None) -> str:
        """The reply of a student of its own task in ``role``."""
        return lessons_of(self.part_of(example)).write_reply(example, rng, right, role)

    def write_agreeing(self, example: Example, rng: random.Random, words: str, role: str | None) -> str:
        """The reply of a student of its own task that agrees with ``words``."""
        return lessons_of(self.part_of(example)).write_agreeing(example, rng, words, role)

    def write_calls(
        self, example: Example, tools: Collection[str], made: Sequence[Call] = ()
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        """The calls that its own task teaches."""
        return lessons_of(self.part_of(example)).write_calls(example, tools, made)

    def part(self, example: Example, asked: str, role: str | None) -> Example:
        """The part of the example for which an agent is asked, as its own task finds it."""
        return lessons_of(self.part_of(example)).part(example, asked, role)
