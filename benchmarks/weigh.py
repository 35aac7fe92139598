"""Count the lines of code of each package, and compare them with the budgets of docs/budget.yaml.

    python benchmarks/weigh.py [CHECKOUT]

A line counts if it is not blank, a comment, a docstring or an import. Tests, pages, examples and benchmarks do not
count. The status is 1 if a package has no budget, or is above it.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
COUNTED = ("maporl", "trl_ext", "reward_server")
KINDS = ("companion", "core", "extension")
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens that make no line one of code."""


class Budget(NamedTuple):
    """What ``docs/budget.yaml`` says of a package: its kind, and how many lines of code it may have."""

    kind: str
    lines: int


def budgets(root: Path = ROOT) -> dict[str, Budget]:
    """Return the budget of each package by its path, in the order of the file."""
    kinds = yaml.safe_load((root / "docs/budget.yaml").read_text(encoding="utf-8"))
    return {path: Budget(kind, lines) for kind in KINDS for path, lines in kinds[kind].items()}


def lines_of_code(text: str) -> int:
    """Return how many lines of a module are code: no blank, comment, docstring or import. A text of several lines
    counts whole."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_for_types(node):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if (words := _docstring(node)) is not None:
            code.difference_update(range(words.lineno, (words.end_lineno or words.lineno) + 1))
    return len(code)


def _is_for_types(node: ast.AST) -> bool:
    """Whether a statement is ``if TYPE_CHECKING``, below which are imports."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _docstring(node: ast.AST) -> ast.stmt | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None


def package_of(path: str, packages: tuple[str, ...]) -> str:
    """Return the innermost of ``packages`` that has the file ``path``. For a file that none has, it is the package that
    a budget is missing for."""
    holders = [package for package in packages if path == package or path.startswith(f"{package}/")]
    return max(holders, key=len, default="/".join(path.split("/")[:2]))


def weigh(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of code of each package, by its path; a package without modules is missing."""
    named, counted = tuple(budgets(root)), {}
    for top in COUNTED:
        for file in sorted((root / top).rglob("*.py")):
            package = package_of(file.relative_to(root).as_posix(), named)
            counted[package] = counted.get(package, 0) + lines_of_code(file.read_text(encoding="utf-8"))
    return counted


def faults(root: Path = ROOT) -> list[str]:
    """Return what is wrong: packages above their budget or without one, and budgets of nothing."""
    allowed, counted = budgets(root), weigh(root)
    record = "with a decision record that says what became smaller"
    found = [
        f"{package}: its budget is {allowed[package].lines} lines of code, and it has {lines}; make it smaller, "
        f"or raise the budget in docs/budget.yaml {record}"
        for package, lines in counted.items()
        if package in allowed and lines > allowed[package].lines
    ]
    found += [
        f"{package}: it has {lines} lines of code and no budget; "
        f"give it one in docs/budget.yaml, below its kind, {record}"
        for package, lines in counted.items()
        if package not in allowed
    ]
    return found + [
        f"{package}: it has no module, and docs/budget.yaml gives it {allowed[package].lines} lines of code; "
        "remove its budget"
        for package in allowed
        if package not in counted
    ]


def sums(counted: Mapping[str, int], root: Path = ROOT) -> dict[str, tuple[int, int, int]]:
    """Return for each kind, and for ``"all"``, how many packages, lines of code and lines of budget there are."""
    rows = [(kind, counted.get(package, 0), lines) for package, (kind, lines) in budgets(root).items()]
    chosen = {kind: [row for row in rows if row[0] == kind] for kind in KINDS} | {"all": rows}
    return {kind: (len(of), sum(row[1] for row in of), sum(row[2] for row in of)) for kind, of in chosen.items()}


if __name__ == "__main__":
    checkout = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    lines = weigh(checkout)
    for package, budget in budgets(checkout).items():
        print(f"{budget.kind:10} {package:28} {lines.get(package, 0):6,} of {budget.lines:6,}")
    for kind, (packages, code, most) in sums(lines, checkout).items():
        print(f"{kind:10} {packages:20} packages {code:5,} of {most:6,}")
    wrong = faults(checkout)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))
