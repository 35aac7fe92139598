"""MBPP (Austin et al.

2021, arXiv 2108.07732) and HumanEval (Chen et al. 2021, arXiv 2107.03374): functions to write.
"""

import ast
import logging
import random
import re
import textwrap
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from maporl.sandbox.pool import shared_pool
from maporl.sandbox.triplets import same
from maporl.tasks.base import ReadTask, Task, TaskError, examples_of, meta_of, read_rows, source_of, text_of
from maporl.tasks.lessons import Lessons
from maporl.text import asked_with, code_of
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, option
from trl_ext.process.parsing import parsed

if TYPE_CHECKING:
    from maporl.sandbox.outcomes import Outcome

logger = logging.getLogger(__name__)


class ProgramTask(Lessons, Task):
    """Functions to write, which hidden tests grade in the sandbox.

    ``meta`` of an example has the ``entry_point`` (the function's name), the ``reference`` solution, the hidden
    ``tests``, and the ``setup`` that runs before tests of this function. It may have a ``hidden_setup``, which runs
    before the hidden tests in the place of ``setup``, and ``in_process``, which is true if they run in the program's
    own process. A test that the question shows stands at the end of ``hidden_setup``: a program that fails it passes
    no other, and to pass it alone is worth nothing. A program is the last fenced block of an answer that defines the
    function, and right if it passes all of the tests.

    Raises:
        SandboxError: the kernel of this machine cannot hold a program.
    """

    answer_form = "```python\n<the whole function>\n```"
    labels_graded = 0  # tests grade, and no label is read
    shown_meta = ("entry_point",)

    def __post_init__(self) -> None:
        super().__post_init__()
        from maporl.sandbox.sandbox import check_walls  # tasks that run no code are imported where no sandbox works

        check_walls()

    def grade(self, example: Example, text: str) -> Grade:
        """Run the program in ``text`` and the hidden tests."""
        return self.grade_many([example], [text])[0]

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """:meth:`grade` for each pair, on all cores."""
        codes = [code_of(text, example.meta["entry_point"]) for example, text in zip(examples, texts, strict=True)]
        programs = [hidden_tests(example, code) for code, example in zip(codes, examples, strict=True)]
        grades = []
        for code, outcomes in zip(codes, shared_pool().run_tests(programs), strict=True):
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
        """A tester writes a test that every function of the name passes, or one that none passes; others write
        programs."""
        if role != "tester":
            return self.write_answer(example, rng, right)
        return f"assert {example.meta['entry_point']} is {'not ' if right else ''}None"


def hidden_tests(example: Example, code: str) -> tuple[str, list[str], str, str]:
    """The hidden tests of a program, as :meth:`maporl.sandbox.pool.SandboxPool.tested` takes them.

    Tests that need the program's own process get it as a part of their setup, and so does whatever the program does
    there.
    """
    meta = example.meta
    setup = meta.get("hidden_setup", meta["setup"])
    if meta.get("in_process"):
        return "pass", meta["tests"], f"{code}\n{setup}", ""
    return code, meta["tests"], setup, meta["entry_point"]


class Programs(ProgramTask, ReadTask):
    """Functions to write that are read from rows. Rows whose reference solution does not pass its tests are left out.

    So are training rows whose tests are weak: a program passes them that computes nothing, and returns what the
    question shows, and otherwise always the same value, or always its first argument. They are listed, and taken with
    ``weak_tests``. Evaluations take them always.

    Tests run where the program does not. A few cannot: a test may pass a function to the program, or look at the list
    that it changed. Such rows are left out and listed, because a program can read such a test, and pass it without
    solving anything. With ``in_process_tests`` they are taken, and their tests run in the program's process.
    """

    source: str
    split: Literal["train", "eval"]
    in_process_tests: bool
    weak_tests: bool

    @abstractmethod
    def _rows(self) -> Sequence[dict[str, Any]]: ...

    @staticmethod
    @abstractmethod
    def _example(row: dict[str, Any], number: int) -> Example: ...

    @property
    def dropped(self) -> dict[str, int]:
        """How many rows of this split were left out: by how their reference solutions ended, ``in_process``, or
        ``weak``."""
        return self._checked[1]

    @property
    def in_process(self) -> list[str]:
        """The ids of the rows whose tests can only run in the program's own process."""
        return self._checked[2]

    @property
    def weak(self) -> list[str]:
        """The ids of the rows whose tests prove little, because a program that computes nothing passes them."""
        return self._checked[3]

    def remark(self) -> str:
        """How many rows were left out, and why, and which ones have tests that a program can read, or that prove
        little, as a line for people."""
        line = (
            f"{self.name}: {self.split}: {len(self)} rows, {sum(self.dropped.values())} left out {_why(self.dropped)}"
        )
        return "; ".join([line, *self._doubts(self.in_process, self.weak)])

    def _doubts(self, in_process: list[str], weak: list[str]) -> list[str]:
        """What people are told of rows whose tests could pay a program that solves nothing."""
        doubts = []
        if in_process:
            tests = f"tests of {len(in_process)} rows can only run in the program's own process"
            how = "where a program can pass them without solving anything, and do so"
            left = "and these rows are left out; task.in_process_tests=true takes them"
            doubts.append(f"{tests}, {how if self.in_process_tests else left} ({_some(in_process)})")
        if weak:
            how = "what the question shows passes them, with one value or the first argument for all else"
            left = "and these rows are left out; task.weak_tests=true takes them"
            taken = "and these rows are taken"
            doubts.append(
                f"tests of {len(weak)} rows prove little: {how}, {left if self._leaves_weak else taken} ({_some(weak)})"
            )
        return doubts

    @property
    def _leaves_weak(self) -> bool:
        return self.split == "train" and not self.weak_tests

    @property
    def _examples(self) -> list[Example]:
        return self._checked[0]

    @cached_property
    def _checked(self) -> tuple[list[Example], dict[str, int], list[str], list[str]]:
        examples = examples_of(self._rows(), self.source, self._example)
        outside = [_failed(outcomes) for outcomes in self._references(examples)]
        doubtful = [replace(e, meta=e.meta | {"in_process": True}) for e, f in zip(examples, outside, strict=True) if f]
        inside = {
            e.id: (e, _failed(outcomes)) for e, outcomes in zip(doubtful, self._references(doubtful), strict=True)
        }
        taken, dropped = [], Counter[str]()
        for example, failed in zip(examples, outside, strict=True):
            if failed and (reason := inside[example.id][1]):
                dropped[reason] += 1
            elif failed and not self.in_process_tests:
                dropped["in_process"] += 1
            else:
                taken.append(inside[example.id][0] if failed else example)
        weak = [example.id for example in taken if proves_little(example)]
        if weak and self._leaves_weak:
            taken = [example for example in taken if example.id not in weak]
            dropped["weak"] = len(weak)
        in_process = [name for name, (_, failed) in inside.items() if not failed]
        doubts = self._doubts(in_process, weak)
        if not taken:
            raise TaskError(
                f"{self.name}: {self.source}: none of {len(examples)} rows can be taken, {_why(dropped)}; "
                + "; ".join(doubts or ["look at the data"])
            )
        for doubt in doubts:
            logger.warning("%s: %s: %s", self.name, self.split, doubt)
        return taken, dict(dropped.most_common()), in_process, weak

    @staticmethod
    def _references(examples: Sequence[Example]) -> "list[list[Outcome]]":
        return shared_pool().run_tests([hidden_tests(example, example.meta["reference"]) for example in examples])


@dataclass(frozen=True)
class MBPP(Programs):
    """Short Python functions to write (MBPP).

    The question shows the first test, because the text names no function. The others are hidden.
    """

    source: str = option(
        "google-research-datasets/mbpp:full",
        "The hub's google-research-datasets/mbpp:full, or a .jsonl file of rows with `text` or `question`, `code` or "
        "`answer`, `test_list`, and perhaps `test_setup_code`, at the top or in `meta`.",
    )
    eval_source: str | None = option(
        None, "What evaluations ask, in the same form. Default: the test split of the data set on the hub."
    )
    limit: Positive | None = option(None, "Take the first rows only, so many.")
    in_process_tests: bool = option(
        False, "Take rows whose tests can only run in the process of the program, where it can read them."
    )
    weak_tests: bool = option(False, "Train on rows with weak tests, which a program that computes nothing passes.")
    instruction: str = asked_with("{question}\n\nWrite the whole function between ```python and ```.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    def _rows(self) -> Sequence[dict[str, Any]]:
        return _first(read_rows(source_of(self), "train" if self.split == "train" else "test"), self.limit)

    @staticmethod
    def _example(row: dict[str, Any], number: int) -> Example:
        row = {**row, **meta_of(row)}
        code = text_of(row.get("code") or row.get("answer"), "code")
        tests = row.get("test_list")
        if not isinstance(tests, list) or len(tests) < 2 or not all(isinstance(test, str) for test in tests):
            raise ValueError(f"has test_list={tests!r:.80}, expected a list of two tests or more, each a text")
        name = next((n for n in re.findall(r"^def\s+(\w+)", code, re.MULTILINE) if _uses(tests[0], n)), None)
        if name is None:
            raise ValueError(f"has a first test, {tests[0]!r:.80}, that calls no function of its code")
        question = text_of(row.get("text") or row.get("question"), "text")
        shown = f"{question}\nYour function must pass this test:\n{tests[0]}" if question.strip() else ""
        imports = row.get("test_imports") or []
        setup = "\n".join([*map(str, imports), str(row.get("test_setup_code") or "")]).strip("\n")
        hidden_setup = "\n".join([_helpers(code, name, "\n".join([setup, *tests])), setup, tests[0]]).strip("\n")
        meta = {
            "entry_point": name, "reference": code, "tests": tests[1:], "setup": setup, "hidden_setup": hidden_setup
        }  # fmt: skip
        return Example(str(row.get("id", f"mbpp-{row.get('task_id', number)}")), shown, code, meta)


@dataclass(frozen=True)
class HumanEval(Programs):
    """Python functions to complete from a signature and a docstring (HumanEval).

    The data set has 164 problems and one split. Each assert of ``check`` is a hidden test, and so is each loop with
    asserts; where other statements depend on the program, the whole of ``check`` is one. A function of the prompt that
    the tests use is the reference's.

    Raises:
        ValueError: ``held_out`` or ``limit`` is below 1, or ``instruction`` has no place for the question.
    """

    source: str = option(
        "openai/openai_humaneval",
        "The hub's openai/openai_humaneval, or a .jsonl file of rows with `prompt` or `question`, "
        "`canonical_solution` or `answer`, `test` and `entry_point`, at the top or in `meta`.",
    )
    held_out: Positive = option(64, "Number of rows for evaluation, the last ones. The others are for training.")
    limit: Positive | None = option(None, "Take the first rows of either split only, so many.")
    in_process_tests: bool = option(
        False, "Take rows whose tests can only run in the process of the program, where it can read them."
    )
    weak_tests: bool = option(False, "Train on rows with weak tests, which a program that computes nothing passes.")
    instruction: str = asked_with(
        "{question}\n\nWrite the whole function, with what it imports, between ```python and ```."
    )
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    def _rows(self) -> Sequence[dict[str, Any]]:
        rows = _first(read_rows(self.source, "test"), None)
        if len(rows) <= self.held_out:
            raise TaskError(f"{self.source}: held_out={self.held_out} leaves none of {len(rows)} rows; lower it")
        return _first(rows[: -self.held_out] if self.split == "train" else rows[-self.held_out :], self.limit)

    @staticmethod
    def _example(row: dict[str, Any], number: int) -> Example:
        row = {**row, **meta_of(row)}
        name, test = str(row.get("entry_point") or ""), str(row.get("test") or "")
        if not name.isidentifier() or "def check" not in test:
            raise ValueError("lacks entry_point, or a test that defines check(candidate)")
        prompt = text_of(row.get("prompt") or row.get("question"), "prompt")
        reference = prompt + text_of(row.get("canonical_solution") or row.get("answer"), "canonical_solution")
        tests, hidden_setup = _rewritten(test, name, reference)
        meta = {"entry_point": name, "reference": reference, "tests": tests, "setup": "", "hidden_setup": hidden_setup}
        return Example(str(row.get("id", f"humaneval-{row.get('task_id', number)}")), prompt, reference, meta)


def _why(dropped: Mapping[str, int]) -> str:
    """Why rows were left out."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    return f"by how their reference solutions end in the sandbox, or for their tests ({reasons or 'none'})"


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:20]) + (", ..." if len(ids) > 20 else "")


def proves_little(example: Example) -> bool:
    """Whether a program that computes nothing passes the hidden tests: it returns what the question shows for the calls
    that stand there, and for all others one value, or the first argument.

    Tests are read and not run. Only single ``assert`` statements with one call of the function are looked into.
    """
    name, told = example.meta["entry_point"], _squeezed(example.question)
    expected: list[str] = []
    first = True
    try:
        for test in example.meta["tests"]:
            (node,) = parsed(test).body
            if not isinstance(node, ast.Assert):
                return False
            (call,) = [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name]  # fmt: skip  # noqa: E501
            text, asked = ast.unparse(node.test), ast.unparse(call)
            if _squeezed(asked) not in told:
                value = text.removeprefix(f"{asked} == ").replace(asked, name)
                expected += [] if any(value == other or same(value, other) for other in expected) else [value]
                first = first and bool(call.args) and same(value, ast.unparse(call.args[0]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return len(expected) < 2 or first


def _squeezed(text: str) -> str:
    """The text without blanks, and with one kind of quotation marks."""
    return "".join(text.split()).replace("'", '"')


def _failed(outcomes: "Sequence[Outcome]") -> str:
    """The reason of the first test that failed, or an empty text if all passed."""
    return next((outcome.reason for outcome in outcomes if not outcome.ok), "")


def _rewritten(test: str, name: str, reference: str) -> tuple[list[str], str]:
    """The tests in the body of ``check``, with the function's name for ``candidate``, and what runs before them."""
    try:
        tree = parsed(test)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"has a test that is not Python: {error}") from None
    check = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check" and n.args.args), None)
    if check is None:
        raise ValueError("has a test that does not define check(candidate)")
    # the function under its own name is the reference's: a program is not compared with itself
    reference_name = f"reference_{name}"
    tree = _Renamed({name: reference_name}).visit(tree)
    outer = [node for node in tree.body if node is not check]
    before, tests = _parts(check, check.args.args[0].arg, name)
    if not tests:
        raise ValueError("has a check(candidate) that tests nothing")
    text = ast.unparse(ast.Module([*outer, *before], []))
    helpers = _helpers(reference, name, "\n".join([text, *tests]), reference_name)
    return tests, f"{helpers}\n{text}".strip("\n")


def _parts(check: ast.FunctionDef, candidate: str, name: str) -> tuple[list[ast.stmt], list[str]]:
    """What ``check`` prepares without the program, and its tests. Asserts of a constant are left out."""
    before: list[ast.stmt] = []
    tests: list[ast.stmt] = []
    for node in check.body:
        uses = any(isinstance(part, ast.Name) and part.id == candidate for part in ast.walk(node))
        asserts = any(isinstance(part, ast.Assert) for part in ast.walk(node))
        if isinstance(node, ast.Expr) and not any(isinstance(part, ast.Call) for part in ast.walk(node)):
            continue
        if isinstance(node, ast.Assert):
            tests += [] if isinstance(node.test, ast.Constant) else [node]
        elif isinstance(node, ast.For) and asserts and uses:
            tests.append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef) and not uses:
            before.append(node)
        else:
            return [], [f"{ast.unparse(check)}\ncheck({name})"]
    bound = [name for node in before for name in _bound(node)]
    if len(set(bound)) < len(bound):  # what stands before a test depends on where the test stands
        return [], [f"{ast.unparse(check)}\ncheck({name})"]
    renamed = [_Renamed({candidate: name}).visit(node) for node in tests]
    return before, [ast.unparse(node) if isinstance(node, ast.Assert) else _in_a_function(node) for node in renamed]


def _in_a_function(loop: ast.stmt) -> str:
    """The source of a loop in a function of its own, because the next test does not expect its variables."""
    return f"def loop():\n{textwrap.indent(ast.unparse(loop), '    ')}\nloop()"


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement outside of functions gives a meaning."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    return [part.id for part in ast.walk(statement) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]


def _helpers(reference: str, name: str, tests: str, alias: str = "") -> str:
    """A reference's functions, constants and imports that tests use beside ``name``, which they may call ``alias``."""
    # instances of its classes are inputs, and so the program's own
    try:
        body, used = parsed(reference).body, {n.id for n in ast.walk(parsed(tests)) if isinstance(n, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    kinds = ast.FunctionDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign
    nodes: list[ast.stmt] = [
        node for node in body if isinstance(node, kinds) and (name not in _bound(node) or alias in used)
    ]
    if not {*(alias,), *(bound for node in nodes for bound in _bound(node))} & used:
        return ""
    return ast.unparse(_Renamed({name: alias} if alias in used else {}).visit(ast.Module(nodes, [])))


class _Renamed(ast.NodeTransformer):
    """Gives names and functions of a tree other names."""

    def __init__(self, names: dict[str, str]):
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._names.get(node.name, node.name)
        return self.generic_visit(node)


def _uses(test: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\s*\(", test) is not None


def _first(rows: Any, limit: int | None) -> list[dict[str, Any]]:
    """The first ``limit`` rows of a file or a data set, or all."""
    return list(rows) if limit is None else [row for row, _ in zip(rows, range(limit), strict=False)]
