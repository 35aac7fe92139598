"""Public docstrings name the exceptions that their code raises."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = [
    "maporl/cli", "maporl/config/command_line.py", "maporl/environments", "maporl/report", "maporl/rewards/verifier",
    "maporl/sandbox", "maporl/storage", "maporl/tasks", "maporl/verifier", "reward_server",
]  # fmt: skip
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def own_raises(node: ast.AST) -> Iterator[str]:
    """What the body of a function raises by name, without the functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(raised).rsplit(".", 1)[-1]
            if name[0].isupper():  # what is raised again has no name
                yield name
        if not isinstance(child, Definition):
            yield from own_raises(child)


def undocumented(path: Path) -> Iterator[str]:
    """Public functions, methods and classes whose docstring does not name what they raise."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def walk(node: ast.AST, above: str, docstring: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Definition) or _is_private(child) or _is_command(child):
                continue
            name, own = f"{above}.{child.name}", ast.get_docstring(child) or ""
            if isinstance(child, ast.ClassDef):
                yield from walk(child, name, own)
                continue
            # a class's docstring speaks for its construction
            said = (docstring if child.name in ("__init__", "__post_init__") else own).partition("Raises:")[2]
            yield from (f"{name}: {error}" for error in dict.fromkeys(own_raises(child)) if error not in said)

    yield from walk(tree, path.relative_to(ROOT).as_posix(), "")


def _is_private(node: Definition) -> bool:
    return node.name.startswith("_") and node.name not in ("__init__", "__post_init__", "__call__")


def _is_command(node: Definition) -> bool:
    """The docstring of a command is its help page."""
    return any(isinstance(decorator, ast.Name) and decorator.id == "command" for decorator in node.decorator_list)


@pytest.mark.parametrize("room", ROOMS)
def test_public_docstrings_name_what_is_raised(room):
    place = ROOT / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files and [line for file in files for line in undocumented(file)] == []
