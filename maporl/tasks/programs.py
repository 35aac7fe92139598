"""MBPP (Austin et al. 2021, arXiv 2108.07732) and HumanEval (Chen et al. 2021, arXiv 2107.03374): functions to write."""

import ast
import random
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

from maporl.tasks.base import ReadTask, Task, TaskError, examples_of, is_file, read_rows
from maporl.text import code_of
from maporl.types import Example, Grade

if TYPE_CHECKING:
    from maporl.sandbox.pool import SandboxPool

_PASSES = "the_reference_passes"


class ProgramTask(Task):
    """Functions to write, which hidden tests grade in the sandbox.

    ``meta`` of an example has the ``entry_point`` (the function's name), the ``reference`` solution, the hidden
    ``tests``, and the ``setup`` that runs between a program and the tests. A program is the last fenced block of an
    answer, and right if it passes all of the tests.
    """

    answer_form = "```python\n<the whole function>\n```"

    def grade(self, example: Example, text: str) -> Grade:
        """Run the program in ``text`` and the hidden tests."""
        return self.grade_many([example], [text])[0]

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """:meth:`grade` for each pair, on all cores."""
        codes = [code_of(text) for text in texts]
        programs = [
            (code, example.meta["tests"], example.meta["setup"]) for code, example in zip(codes, examples, strict=True)
        ]
        grades = []
        for code, outcomes in zip(codes, _pool().run_tests(programs), strict=True):
            failed = [outcome for outcome in outcomes if not outcome.ok]
            share = f"{len(outcomes) - len(failed)} of {len(outcomes)} tests pass"
            reason = share if not failed else f"{share}; {failed[0].message or failed[0].reason}"
            grades.append(Grade(code or None, not failed, reason if code else "no fenced block"))
        return grades

    def solution(self, example: Example) -> str:
        """The reference solution as an agent writes it."""
        return f"```python\n{example.meta['reference'].rstrip()}\n```"

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The reference solution, or a function that always fails."""
        if right:
            return self.solution(example)
        return f"```python\ndef {example.meta['entry_point']}(*args):\n    raise NotImplementedError\n```"

    def write_reply(self, example: Example, rng: random.Random, right: bool, role: str | None) -> str:
        """A tester writes a test that every function of the name passes, or one that none passes; others write programs."""
        if role != "tester":
            return self.write_answer(example, rng, right)
        return f"assert {example.meta['entry_point']} is {'not ' if right else ''}None"


class Programs(ReadTask, ProgramTask):
    """Functions to write that are read from rows. Rows whose reference does not pass in the sandbox are left out."""

    source: str
    split: Literal["train", "eval"]

    @abstractmethod
    def _rows(self) -> Sequence[dict[str, Any]]: ...

    @staticmethod
    @abstractmethod
    def _example(row: dict[str, Any], number: int) -> Example: ...

    @property
    def dropped(self) -> dict[str, int]:
        """How many rows of this split were left out, by how the sandbox ended their reference solutions."""
        return self._checked[1]

    def remark(self) -> str:
        """How many rows were left out, and why, as a line for people."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items())
        count = sum(self.dropped.values())
        return f"{self.name}: {self.split}: {len(self)} rows, {count} left out, because the sandbox refuses their reference solutions ({reasons or 'none'})"

    @property
    def _examples(self) -> list[Example]:
        return self._checked[0]

    @cached_property
    def _checked(self) -> tuple[list[Example], dict[str, int]]:
        from maporl.sandbox.sandbox import Sandbox  # tasks that run no code are imported where no sandbox works

        examples = examples_of(self._rows(), self.source, self._example)
        with Sandbox() as sandbox:
            outcomes = sandbox.run_many([_reference_program(example) for example in examples], _PASSES)
        dropped = Counter(outcome.reason for outcome in outcomes if not outcome.ok)
        kept = [example for example, outcome in zip(examples, outcomes, strict=True) if outcome.ok]
        if not kept:
            raise TaskError(
                f"{self.name}: {self.source}: no reference solution of {len(examples)} rows passes its tests in the sandbox "
                f"({', '.join(f'{reason} {count}' for reason, count in dropped.items())}); look at the data"
            )
        return kept, dict(dropped.most_common())


@dataclass(frozen=True)
class MBPP(Programs):
    """Short Python functions to write (MBPP).

    ``source``: the hub's ``google-research-datasets/mbpp:full``, or a ``.jsonl`` file of rows with ``text`` or
    ``question``, ``code`` or ``answer``, ``test_list``, and perhaps ``test_setup_code``, at the top or in ``meta``.

    The question shows the first test, because the text names no function. The others are hidden. The evaluation split
    comes from ``eval_source``, or else from the test split of the data set on the hub. ``limit`` takes the first rows only.
    """

    source: str = "google-research-datasets/mbpp:full"
    eval_source: str | None = None
    limit: int | None = None
    instruction: str = "{question}\n\nWrite the whole function between ```python and ```."
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def _rows(self) -> Sequence[dict[str, Any]]:
        if self.split == "train":
            return _first(read_rows(self.source, "train"), self.limit)
        if self.eval_source is None and is_file(self.source):
            raise TaskError(f"mbpp: {self.source} is one file and has no test split; set task.eval_source")
        return _first(read_rows(self.eval_source or self.source, "test"), self.limit)

    @staticmethod
    def _example(row: dict[str, Any], number: int) -> Example:
        row = {**row, **(row.get("meta") or {})}
        code = str(row.get("code") or row.get("answer") or "")
        tests = row.get("test_list")
        if not isinstance(tests, list) or len(tests) < 2 or not all(isinstance(test, str) for test in tests):
            raise ValueError(f"has test_list={tests!r:.80}, expected a list of two tests or more, each a text")
        name = next((n for n in re.findall(r"^def\s+(\w+)", code, re.MULTILINE) if _uses(tests[0], n)), None)
        if name is None:
            raise ValueError(f"has a first test, {tests[0]!r:.80}, that calls no function of its code")
        question = str(row.get("text") or row.get("question") or "")
        shown = f"{question}\nYour function must pass this test:\n{tests[0]}" if question.strip() else ""
        meta = {
            "entry_point": name,
            "reference": code,
            "tests": tests[1:],
            "setup": str(row.get("test_setup_code") or ""),
        }
        return Example(str(row.get("id", f"mbpp-{row.get('task_id', number)}")), shown, code, meta)


@dataclass(frozen=True)
class HumanEval(Programs):
    """Python functions to complete from a signature and a docstring (HumanEval).

    ``source``: the hub's ``openai/openai_humaneval``, or a ``.jsonl`` file of rows with ``prompt`` or ``question``,
    ``canonical_solution`` or ``answer``, ``test`` and ``entry_point``, at the top or in ``meta``.

    The data set has 164 problems and one split. The last ``held_out`` rows are for evaluation and the others for training.
    ``limit`` takes the first rows of either. Each assert of ``check`` is a hidden test, if nothing else stands there.

    Raises:
        ValueError: ``held_out`` or ``limit`` is below 1, or ``instruction`` has no place for the question.
    """

    source: str = "openai/openai_humaneval"
    held_out: int = 64
    limit: int | None = None
    instruction: str = "{question}\n\nWrite the whole function, with what it imports, between ```python and ```."
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.held_out < 1:
            raise ValueError(f"held_out: expected at least 1 row, got {self.held_out}")

    def _rows(self) -> Sequence[dict[str, Any]]:
        rows = _first(read_rows(self.source, "test"), None)
        if len(rows) <= self.held_out:
            raise TaskError(
                f"humaneval: {self.source} has {len(rows)} rows, and held_out={self.held_out} leaves none to train on; lower "
                "task.held_out"
            )
        return _first(rows[: -self.held_out] if self.split == "train" else rows[-self.held_out :], self.limit)

    @staticmethod
    def _example(row: dict[str, Any], number: int) -> Example:
        row = {**row, **(row.get("meta") or {})}
        name, test = str(row.get("entry_point") or ""), str(row.get("test") or "")
        if not name.isidentifier() or "def check" not in test:
            raise ValueError("lacks entry_point, or a test that defines check(candidate)")
        prompt = str(row.get("prompt") or row.get("question") or "")
        reference = prompt + str(row.get("canonical_solution") or row.get("answer") or "")
        meta = {"entry_point": name, "reference": reference, "tests": _asserts(test) or [f"check({name})"]}
        meta["setup"] = f"{test}\ncandidate = {name}"
        return Example(str(row.get("id", f"humaneval-{row.get('task_id', number)}")), prompt, reference, meta)


@cache
def _pool() -> "SandboxPool":
    from maporl.sandbox.pool import SandboxPool

    return SandboxPool()


def _reference_program(example: Example) -> str:
    """The reference with all of its tests, as a program whose last function is called."""
    meta = example.meta
    parts = [meta["reference"], meta["setup"], *meta["tests"], f"def {_PASSES}():\n    return True"]
    return "\n".join(parts)


def _asserts(test: str) -> list[str]:
    """The asserts of ``check``, if it has nothing else. Those of a constant test nothing and are left out."""
    tree = ast.parse(test)
    body = next(node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")
    if not all(isinstance(node, ast.Assert) for node in body):
        return []
    return [
        ast.unparse(node) for node in body if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)
    ]


def _uses(test: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\s*\(", test) is not None


def _first(rows: Any, limit: int | None) -> list[dict[str, Any]]:
    """The first ``limit`` rows of a file or a data set, or all."""
    return list(rows) if limit is None else [row for row, _ in zip(rows, range(limit), strict=False)]
