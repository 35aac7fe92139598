"""How many small mistakes in the code of advantages, rewards, losses, sampling and grading the fast tests notice.

    python benchmarks/mutants.py [--mutants 200] [--seed 0] [--jobs 2] [--only FILE]

A mutant is the code with one mistake: another operator, another constant, or a statement that is left out. It is killed
if a fast test fails or takes too long, and it survives if none does. A survivor is either as right as the code, or a
test is missing.

Nothing is changed in the working tree: each job has a copy of it. The test files that import the mutated module come
first. Each is run once without a mutant, which says which of its tests pass and which lines each reaches; a mutant
meets the tests that reach its line, the quickest of a file first. Lines that only a process of its own runs are not
seen. A job forks from a process that has imported torch, but nothing of this package. The same command goes on where it
was stopped, if no tracked file has changed since; with another limit, survivors are tried again. Linux only.
"""

import argparse
import ast
import datetime
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from machine import processor

HERE = Path(__file__).resolve().parents[1]
MUTATED = (
    "maporl/advantages/",
    "maporl/rewards/",
    "maporl/grading/",
    "trl_ext/ppo/losses.py",
    "trl_ext/ppo/maths.py",
    "trl_ext/ppo/batch.py",
    "trl_ext/sampling/",
)
CODE = ("maporl/", "trl_ext/", "reward_server/", "tests/")
QUICK = "not slow and not gpu and not vllm"
IMPORTED_ONCE = [
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "numpy",
    "sympy",
    "jsonschema",
    "pytest",
]
IMPORTED_ONCE += ["transformers.models.llama.modeling_llama", "matplotlib", "pydantic", "rich", "typer", "httpx2"]
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("*",)),
    ast.Pow: ("**", ("*",)),
    ast.MatMult: ("@", ("*",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
SPEAKING = {"print", "warn", "debug", "info", "warning", "error", "exception", "log"}
TYPING = {"Literal", "Annotated", "Callable", "cast", "TypeVar", "NewType", "ParamSpec"}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """A file with one mistake. ``start`` and ``end`` are bytes of the file, between which ``text`` is written."""

    file: str
    line: int
    change: str
    start: int
    end: int
    text: str
    names: tuple[str, ...]
    """The function that has the line, and its class; or, outside of functions, what the statement defines."""
    span: tuple[int, int]
    """First and last line of the statement, without the body of an ``if``, a loop or a function."""
    uses: tuple[int, ...]
    """If the line runs when the module is imported: the lines that use what it defines."""
    imported: bool

    def applied(self, source: bytes) -> bytes:
        """Return the source of the file with the mistake. No line is moved."""
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass
class Test:
    """A test that passes without a mutant: how long it takes while its lines are followed, and the lines it reaches."""

    name: str
    file: str
    seconds: float
    lines: dict[str, frozenset[int]]


@dataclass
class Result:
    """What became of a mutant. ``tests`` met it; ``left_out`` more reach its line and had no time."""

    file: str
    line: int
    change: str
    outcome: str
    killed_by: str | None = None
    tests: int = 0
    left_out: int = 0
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)


class _Finder:
    """Finds every mutant of a file."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source = file, source
        self.tree = ast.parse(source)
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.stored: Counter[str] = Counter()
        self.used: dict[str, set[int]] = defaultdict(set)
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Name | ast.Attribute):
                        self.used[node.id if isinstance(node, ast.Name) else node.attr].add(node.lineno)

    def mutants(self) -> list[Mutant]:
        """Return the mutants in the order of the file. A few are not Python, or are the same program."""
        self._block(self.tree.body, (), False)
        return list(dict.fromkeys(self.found))

    def _block(self, body: list[ast.stmt], names: tuple[str, ...], inside: bool) -> None:
        for statement in body:
            self._statement(statement, names, inside)

    def _statement(self, statement: ast.stmt, names: tuple[str, ...], inside: bool) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal | ast.Pass):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return  # a docstring, or ...
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if {"abstractmethod", "overload"} & {word for d in statement.decorator_list for word in _words(d)}:
                return
            name = (*names, statement.name)
            if not inside:
                self.stored = Counter(
                    node.id
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                ) + Counter(node.arg for node in ast.walk(statement.args) if isinstance(node, ast.arg))
                # defaults: the lines of the body use them
                body = range(statement.body[0].lineno, (statement.end_lineno or 0) + 1)
                for default in [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]:
                    self._expression(default, statement, name, tuple(body), True)
            return self._block(statement.body, name, True)
        if isinstance(statement, ast.ClassDef):
            if "Protocol" not in {word for base in statement.bases for word in _words(base)}:
                self._block(statement.body, (statement.name,), False)
            return
        if isinstance(statement, ast.If) and {"TYPE_CHECKING", "__name__"} & set(_words(statement.test)):
            return
        uses: tuple[int, ...] = ()
        if not inside:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            defined = tuple(target.id for target in targets if isinstance(target, ast.Name))
            if "__all__" in defined or "__slots__" in defined:
                return
            names = defined or names
            uses = tuple(sorted({line for name in defined for line in self.used[name]}))
        if inside and isinstance(statement, DROPPED) and not _speaks(statement) and not self._only_store(statement):
            start, end = self._place(statement)
            old = self.source[start:end].decode()
            bare = isinstance(statement, ast.Return) and statement.value is None
            if not bare or statement is not self._last_of_function(statement):
                new = "pass" + "\n" * old.count("\n")
                self._add(statement, statement, start, end, new, names, uses, False, f"{' '.join(old.split())} -> pass")
        if isinstance(statement, ast.AugAssign) and type(statement.op) in ARITHMETIC:
            sign, others = ARITHMETIC[type(statement.op)]
            between = (self._place(statement.target)[1], self._place(statement.value)[0])
            changed = [f"{other}=" for other in others]
            self._operator(statement, statement, between, f"{sign}=", changed, names, uses, not inside)
        for part_name, value in ast.iter_fields(statement):
            if part_name in ("annotation", "returns", "decorator_list") or isinstance(statement, ast.Raise):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.stmt):
                    self._statement(part, names, inside)
                elif isinstance(part, ast.ExceptHandler | ast.match_case):
                    self._block(part.body, names, inside)
                elif isinstance(part, ast.expr):
                    self._expression(part, statement, names, uses, not inside)
                elif isinstance(part, ast.withitem):
                    self._expression(part.context_expr, statement, names, uses, not inside)

    def _only_store(self, statement: ast.stmt) -> bool:
        """Whether without the statement a name of the function has no value at all, which any run shows."""
        if not isinstance(statement, ast.Assign):
            return False
        parts = [part for target in statement.targets for part in ast.walk(target)]
        if any(isinstance(part, ast.Attribute | ast.Subscript) for part in parts):
            return False
        return any(self.stored[part.id] < 2 for part in parts if isinstance(part, ast.Name))

    def _last_of_function(self, statement: ast.stmt) -> ast.stmt | None:
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.body[-1] is statement:
                return statement
        return None

    def _expression(
        self, node: ast.expr, statement: ast.stmt, names: tuple[str, ...], uses: tuple[int, ...], imported: bool
    ) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call) and ({*_words(node.func)} & (SPEAKING | TYPING)):
            return
        if isinstance(node, ast.Subscript) and {*_words(node.value)} & TYPING:
            return
        given = (names, uses, imported)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                old, new = COMPARISONS[type(operator)]
                self._operator(node, statement, (self._place(left)[1], self._place(right)[0]), old, new, *given)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
            old, new = ARITHMETIC[type(node.op)]
            between = (self._place(node.left)[1], self._place(node.right)[0])
            self._operator(node, statement, between, old, new, *given)
        elif isinstance(node, ast.BoolOp):
            old, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                self._operator(node, statement, (self._place(left)[1], self._place(right)[0]), old, [other], *given)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            start, end = self._place(node)[0], self._place(node.operand)[0]
            text = self.source[start:end].decode()
            word = "not" if isinstance(node.op, ast.Not) else "-"
            self._add(node, statement, start, start + len(word), "", *given)
            assert text.startswith(word)
        elif isinstance(node, ast.Constant) and node.lineno == node.end_lineno:
            start, end = self._place(node)
            for constant in _other_constants(node.value):
                self._add(node, statement, start, end, constant, *given)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, statement, *given)
            elif isinstance(child, ast.keyword) and child.arg != "strict":  # of zip: a check of what is so anyway
                self._expression(child.value, statement, *given)
            elif isinstance(child, ast.comprehension):
                for part in (child.iter, *child.ifs):
                    self._expression(part, statement, *given)

    def _operator(
        self,
        node: ast.AST,
        statement: ast.stmt,
        between: tuple[int, int],
        old: str,
        new: list[str] | tuple[str, ...],
        *given: Any,
    ) -> None:
        text = self.source[between[0] : between[1]].decode()
        pattern = r"\s+".join(re.escape(word) for word in old.split())
        match = re.search(rf"\b{pattern}\b" if old[0].isalpha() else pattern, text)
        if match and "#" not in text[: match.start()]:
            start, end = (between[0] + len(text[:at].encode()) for at in match.span())
            for other in new:
                self._add(node, statement, start, end, other, *given)

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _add(
        self,
        node: ast.AST,
        statement: ast.stmt,
        start: int,
        end: int,
        text: str,
        names: tuple[str, ...],
        uses: tuple[int, ...],
        imported: bool,
        change: str | None = None,
    ) -> None:
        line = self.source[:start].count(b"\n") + 1
        if change is None:
            first, last = self.starts[line - 1], self.starts[self.source[:end].count(b"\n") + 1]
            pieces = (
                self.source[first:last].decode(),
                (self.source[first:start] + text.encode() + self.source[end:last]).decode(),
            )
            change = " -> ".join(" ".join(piece.split()) for piece in pieces)
        body = getattr(statement, "body", None) or getattr(statement, "cases", None)
        last_line = statement.end_lineno or statement.lineno
        if body:
            inner = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else body[0].lineno
            last_line = max(statement.lineno, inner - 1)
        span = (statement.lineno, last_line)
        self.found.append(Mutant(self.file, line, change, start, end, text, names, span, uses, imported))


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _speaks(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(value, ast.Call) and bool({*_words(value.func)} & SPEAKING)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        or (isinstance(side, ast.BinOp) and _is_text(side))
        for side in sides
    )


def _other_constants(value: object) -> list[str]:
    if isinstance(value, bool):
        return [str(not value)]
    if isinstance(value, int | float):
        return [repr(value + 1), *([repr(value * 2)] if value and math.isfinite(value) else [])]
    if isinstance(value, str) and not re.search(r"\s", value):  # a text with spaces is a message
        return [repr(value + "XX")]
    return []


def choose(files: list[str], seed: int) -> Iterator[Mutant]:
    """Give the mutants of ``files`` in a random order: one of each line that has any, then a second of each, and so on.

    So the first N are the same whatever N is.
    """
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    sources = {file: (HERE / file).read_bytes() for file in files}
    for file, source in sources.items():
        for mutant in _Finder(file, source).mutants():
            lines[(mutant.file, mutant.line)].append(mutant)
    chance = random.Random(seed)
    groups = list(lines.values())
    for group in groups:
        chance.shuffle(group)
    chance.shuffle(groups)
    for number in range(max(map(len, groups), default=0)):
        for group in groups:
            if number < len(group) and _differs(group[number], sources[group[number].file]):
                yield group[number]


def _differs(mutant: Mutant, source: bytes) -> bool:
    """Whether a mutant is Python, and another program."""
    try:
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class Tests:
    """Which test files import a module, and at how many steps."""

    def __init__(self, files: list[str]):
        self.files = {_module(file): file for file in files if file.endswith(".py") and file.startswith(CODE)}
        trees = {name: ast.parse((HERE / file).read_bytes()) for name, file in self.files.items()}
        self.passed_on = {name: dict(self._from(tree)) for name, tree in trees.items()}
        self.imports = {name: set(self._imports(tree)) for name, tree in trees.items()}
        self.texts = {
            file: (HERE / file).read_text()
            for file in self.files.values()
            if re.match(r"tests/(\w+/)*test_\w+\.py$", file)
        }

    def _from(self, tree: ast.Module) -> Iterator[tuple[str, str]]:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from ((alias.asname or alias.name, node.module) for alias in node.names)

    def _imports(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    # a package that passes a name on is not a step
                    yield (
                        whole
                        if whole in self.files
                        else self.passed_on.get(node.module, {}).get(alias.name, node.module)
                    )

    def ordered(self, mutant: Mutant, steps: int) -> list[str]:
        """Return the files whose tests may see a mutant: those closest to it first, and among those the shortest.

        The module comes first, for its doctests. A file is close if it imports the module directly, if it has the name
        of the module or of its folder, and if it mentions the function.
        """
        module = _module(mutant.file)
        distance, edge = {module: 0}, {module}
        while edge:
            edge = {name for name, found in self.imports.items() if name not in distance and found & edge}
            distance |= dict.fromkeys(edge, max(distance.values()) + 1)
        parts = {f"test_{part}.py" for part in module.split(".")[1:]}
        ranks = {}
        for file, text in self.texts.items():
            mentions = any(len(name) > 3 and re.search(rf"\b{re.escape(name)}\b", text) for name in mutant.names)
            far = distance.get(_module(file), steps + 1)
            named = Path(file).name in parts
            if far <= steps or mentions or named:
                ranks[file] = (far - mentions - named, len(text))
        doctests = [mutant.file] if ">>> " in (HERE / mutant.file).read_text() else []
        return doctests + sorted(ranks, key=lambda file: ranks[file])


def _module(file: str) -> str:
    """Return the name that a file is imported by. Tests import their helpers without the folders' names."""
    parts = Path(file).with_suffix("").parts
    parts = parts[-1:] if parts[0] == "tests" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Watch:
    """A pytest plugin that writes down what each test does, and the lines of ``followed`` files that it reaches."""

    def __init__(self, out: Path, root: Path, wanted: list[str] | None, followed: list[str]):
        self.out, self.root = out.open("a"), root
        self.chosen = wanted is not None
        self.order = {name: number for number, name in enumerate(wanted or [])}
        self.followed = {str(root / file): file for file in followed}
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.imported: set[str] = set()
        self.seconds, self.passed = 0.0, False

    def write(self, **row: object) -> None:
        print(json.dumps(row), file=self.out, flush=True)

    def follow(self) -> None:
        if self.followed:
            threading.settrace(self._called)
            sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code: CodeType = frame.f_code
        file = self.followed.get(code.co_filename)
        if file is None:
            return None
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or of a class
            self.imported.add(file)
            return None
        add = self.lines[file].add
        add(frame.f_lineno)

        def line(frame: FrameType, event: str, argument: object) -> Any:
            add(frame.f_lineno)
            return line

        return line

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(collection=report.nodeid)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.chosen:
            items[:] = [item for item in items if item.nodeid in self.order]
            items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.lines.clear()
        self.seconds, self.passed = 0.0, False
        self.write(begun=nodeid)
        self.follow()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if report.failed:
            self.write(failed=report.nodeid)
        if report.when == "call":
            self.passed = report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        lines = {file: sorted(lines) for file, lines in self.lines.items()}
        self.write(done=nodeid, passed=self.passed, seconds=self.seconds, lines=lines)


def _in_a_fork(root: str, out: str, log: str, files: list[str], wanted: list[str] | None, followed: list[str]) -> None:
    """Run tests in this process, which has imported nothing of the package yet."""
    os.setsid()
    place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(place, 1)
    os.dup2(place, 2)
    sys.path[:] = [root, *(path for path in sys.path if path and not path.startswith(str(HERE / "benchmarks")))]
    sys.path[1:] = [path for path in sys.path[1:] if path != str(HERE)]
    sys.argv[:] = ["pytest"]
    sys.dont_write_bytecode = True
    os.environ.update(SURROUNDINGS | {"PYTHONPATH": root})
    os.chdir(root)
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # what a fresh process has
    import pytest

    watch = _Watch(Path(out), Path(root), wanted, followed)
    options = ["-q", "-p", "no:cacheprovider", "-m", QUICK, f"--rootdir={root}", f"--basetemp={out}.tmp"]
    watch.follow()
    status = pytest.main([*options, *([] if wanted is None else ["-x"]), *files], plugins=[watch])
    sys.settrace(None)
    watch.write(status=int(status), imported=sorted(watch.imported))
    os._exit(0)


class Jobs:
    """Runs mutants, one in each copy of the checkout at a time."""

    def __init__(self, options: argparse.Namespace, folder: Path, tracked: list[str], followed: list[str], known: Path):
        self.options, self.folder, self.followed, self.known = options, folder, followed, known
        self.tests = Tests(tracked)
        self.forks = multiprocessing.get_context("forkserver")
        self.forks.set_forkserver_preload(IMPORTED_ONCE)
        self.lock = threading.Lock()
        self.locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self.running: set[BaseProcess] = set()
        self.runs = 0
        self.stopped = False
        self.passing: dict[str, tuple[list[str], list[Test]]] = {}
        for line in known.read_text().splitlines() if known.exists() else []:
            self._know(json.loads(line))
        for number in range(options.jobs):
            for file in tracked:
                (folder / str(number) / file).parent.mkdir(parents=True, exist_ok=True)
                if (HERE / file).is_file():
                    shutil.copy2(HERE / file, folder / str(number) / file)

    def _know(self, row: dict[str, Any]) -> None:
        tests = [
            Test(
                test["name"], row["file"], test["seconds"], {f: frozenset(lines) for f, lines in test["lines"].items()}
            )
            for test in row["tests"]
        ]
        self.passing[row["file"]] = (row["imported"], tests)

    def _run(
        self, job: int, files: list[str], wanted: list[str] | None, limit: float
    ) -> tuple[list[dict[str, Any]], bool]:
        """Run tests in a fork, and return what it wrote, and whether it ended in time."""
        with self.lock:
            if self.stopped:
                sys.exit()
            self.runs += 1
            out, log = self.folder / f"{self.runs}.jsonl", self.folder / f"{job}.log"
            followed = self.followed if wanted is None else []
            given = (str(self.folder / str(job)), str(out), str(log), files, wanted, followed)
            process = self.forks.Process(target=_in_a_fork, args=given)
            process.start()
            self.running.add(process)
        for _ in range(math.ceil(2 * limit)):  # if all of this is paused for a while, that time does not count
            process.join(0.5)
            if not process.is_alive():
                break
        ended = not process.is_alive()
        self.end(process)
        process.join()
        self.running.discard(process)
        if self.stopped:
            sys.exit()  # this thread, before it takes the end of the fork for a verdict
        rows = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")] if out.exists() else []
        shutil.rmtree(f"{out}.tmp", ignore_errors=True)
        out.unlink(missing_ok=True)
        return rows, ended

    def end(self, process: BaseProcess) -> None:
        """End a fork, and what its tests started and left."""
        try:
            os.killpg(process.pid or 0, signal.SIGKILL) if process.pid else None
        except ProcessLookupError:
            process.kill()

    def passing_tests(self, job: int, file: str) -> tuple[list[str], list[Test]]:
        """Return the followed files that a test file imports, and its tests that pass, once they have been run."""
        with self.lock:
            lock = self.locks[file]
        with lock:
            if file not in self.passing:
                rows, _ = self._run(job, [file], None, self.options.limit)
                failed = {row["failed"] for row in rows if "failed" in row}
                kept = [row for row in rows if row.get("passed") and row["done"] not in failed]
                tests = [{"name": row["done"], "seconds": row["seconds"], "lines": row["lines"]} for row in kept]
                imported = next((row["imported"] for row in rows if "imported" in row), self.followed)
                row = {"file": file, "imported": imported, "tests": tests}
                with self.lock:
                    self._know(row)
                    with self.known.open("a") as known:
                        print(json.dumps(row), file=known)
        return self.passing[file]

    def _reaching(self, job: int, mutant: Mutant, file: str) -> list[Test]:
        """Return the tests of a file that reach the mutant, those that surely do first."""
        imported, tests = self.passing_tests(job, file)
        lines = {*mutant.uses} if mutant.imported else {*range(mutant.span[0], mutant.span[1] + 1)}
        sure = [test for test in tests if lines & test.lines.get(mutant.file, frozenset())]
        others = [test for test in tests if test not in sure] if mutant.imported and mutant.file in imported else []
        return sorted(sure, key=lambda test: test.seconds) + sorted(others, key=lambda test: test.seconds)

    def judge(self, job: int, mutant: Mutant) -> Result:
        """Return what becomes of a mutant. The files that are closest to it are tried first, then more at a time."""
        result = Result(mutant.file, mutant.line, mutant.change, "survived")
        files = self.tests.ordered(mutant, self.options.steps)[: self.options.files]
        place = self.folder / str(job) / mutant.file
        source, left = place.read_bytes(), float(self.options.limit)
        while files and result.outcome == "survived":
            count = max(2, len(result.files))
            batch, files = files[:count], files[count:]
            result.files += batch
            chosen: list[Test] = []
            for test in (test for file in batch for test in self._reaching(job, mutant, file)):
                if sum(other.seconds for other in chosen) + test.seconds <= left:
                    chosen.append(test)
                else:
                    result.left_out += 1
            if not chosen:
                continue
            expected = sum(test.seconds for test in chosen)
            names = sorted({test.file for test in chosen}, key=batch.index)
            begun = time.monotonic()
            place.write_bytes(source if self.options.control else mutant.applied(source))
            try:
                rows, ended = self._run(job, names, [test.name for test in chosen], 3 * expected + 60)
            finally:
                place.write_bytes(source)
            took = time.monotonic() - begun
            left, result.seconds = left - expected, round(result.seconds + took, 1)
            result.tests += sum("done" in row for row in rows)
            broken = [
                row.get("failed") or row.get("collection") for row in rows if {"failed", "collection"} & row.keys()
            ]
            if broken:
                result.outcome, result.killed_by = "killed", broken[0]
            elif not ended or not any("status" in row for row in rows):
                begun_tests = [row["begun"] for row in rows if "begun" in row]
                why = "takes too long" if not ended else "ends the process"
                result.outcome, result.killed_by = "killed", f"{(begun_tests or ['the import'])[-1]} {why}"
        result.files = result.files if result.outcome == "survived" else []
        return result


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=HERE, check=True, capture_output=True, text=True).stdout


def _commit() -> str:
    """Return the commit, and a number for what has changed since in tracked files."""
    changes = _git("diff", "HEAD")
    return _git("rev-parse", "HEAD").strip() + (
        f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    )


def scores(results: list[Result]) -> dict[str, dict[str, float]]:
    """Return the mutants of each folder, those killed, those whose line no test reached, and the share killed."""
    table = {}
    for folder in [*sorted({str(Path(result.file).parent) for result in results}), ""]:
        rows = [result for result in results if folder in ("", str(Path(result.file).parent))]
        killed = sum(row.outcome == "killed" for row in rows)
        unseen = sum(row.outcome == "survived" and not row.tests for row in rows)
        table[folder or "all"] = {
            "mutants": len(rows),
            "killed": killed,
            "unseen": unseen,
            "score": round(killed / max(1, len(rows)), 3),
        }
    return table


def write(path: Path, about: dict[str, Any], results: list[Result]) -> None:
    """Write all results, or leave the file as it was."""
    page = about | {"scores": scores(results), "mutants": [asdict(result) for result in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(page, indent=1) + "\n")
    beside.replace(path)


def main() -> None:
    """Judge the mutants that the output does not have yet, and print a line for each and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds of tests that a mutant meets at most, as measured without it"
    )
    parser.add_argument("--only", default="", help="part of the path of the files to mutate")
    parser.add_argument("--steps", type=int, default=3, help="steps of imports from a test file to the module")
    parser.add_argument("--files", type=int, default=40, help="test files that a mutant meets at most")
    parser.add_argument("--list", action="store_true", help="print the mutants and their test files, and run nothing")
    parser.add_argument("--control", action="store_true", help="change nothing: whatever is killed then, chance kills")
    parser.add_argument("--output", type=Path, default=HERE / "benchmarks/results/mutants.json")
    options = parser.parse_args()
    tracked = _git("ls-files", "-z").split("\0")[:-1]
    followed = [
        file for file in tracked if file.startswith(MUTATED) and file.endswith(".py") and (HERE / file).exists()
    ]
    wanted = (mutant for mutant in choose(followed, options.seed) if options.only in mutant.file)
    mutants = list(itertools.islice(wanted, options.mutants))
    if options.list:
        tests = Tests(tracked)
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.change}")
            print("    ", *tests.ordered(mutant, options.steps)[: options.files])
        return
    about: dict[str, Any] = {"commit": _commit(), "seed": options.seed, "control": options.control}
    effort = {"limit": options.limit, "files": options.files, "steps": options.steps}
    results: list[Result] = []
    if options.output.exists():
        before = json.loads(options.output.read_text())
        if about.items() <= before.items():
            results = [
                Result(**row)
                for row in before["mutants"]
                if effort.items() <= before.items() or row["outcome"] == "killed"
            ]
    about |= {
        "machine": f"{len(os.sched_getaffinity(0))} cores of {processor()}",
        "date": str(datetime.date.today()),
        **effort,
    }
    have = {(result.file, result.line, result.change) for result in results}
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        if (mutant.file, mutant.line, mutant.change) not in have:
            waiting.put(mutant)
    os.environ.update(SURROUNDINGS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the folder of copies is deleted
    known = Path(tempfile.gettempdir(), f"maporl-mutants-{about['commit'][:12]}{about['commit'][40:]}.jsonl")
    with tempfile.TemporaryDirectory(prefix="mut") as folder:
        jobs = Jobs(options, Path(folder), tracked, followed, known)

        def work(job: int) -> None:
            while True:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                result = jobs.judge(job, mutant)
                with jobs.lock:
                    results.append(result)
                    write(options.output, about, results)
                said = f"killed by {result.killed_by}" if result.killed_by else f"SURVIVED {result.tests} tests"
                print(f"{result.file}:{result.line}: {result.change}\n    {said}, {result.seconds} s", flush=True)

        threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in range(options.jobs)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            with jobs.lock:
                jobs.stopped = True
            for process in list(jobs.running):
                jobs.end(process)
            for thread in threads:
                thread.join()
    print(f"{'folder':28} {'mutants':>7} {'killed':>6} {'unseen':>6}  score")
    for name, row in scores(results).items():
        print(f"{name:28} {row['mutants']:7} {row['killed']:6} {row['unseen']:6} {row['score']:6.1%}")


if __name__ == "__main__":
    main()
