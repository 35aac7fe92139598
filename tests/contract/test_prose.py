"""Every public function, method and class has a docstring, whose ``Raises:`` section names the exceptions that the code
raises itself."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from folders import ROOT

PACKAGES = ["maporl", "trl_ext", "reward_server"]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Found = tuple[str, Definition, ast.ClassDef | None]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def definitions(path: Path) -> Iterator[Found]:
    """The public functions, classes and methods of a module: name, definition, and the class around it."""
    place = path.relative_to(ROOT).as_posix()

    def walk(node: ast.AST, above: str, around: ast.ClassDef | None) -> Iterator[Found]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Definition) or is_private(child):
                continue
            yield f"{place}: {above}{child.name}", child, around
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{above}{child.name}.", child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "", None)


def is_private(node: Definition) -> bool:
    return node.name.startswith("_") and node.name not in ("__init__", "__post_init__", "__call__")


def is_command(node: Definition) -> bool:
    """Whether the function is a command, whose docstring is its help page."""
    return any(isinstance(decorator, ast.Name) and decorator.id == "command" for decorator in node.decorator_list)


@cache
def documented_methods() -> dict[str, tuple[set[str], set[str]]]:
    """For every class by name: the names of its base classes, and of the methods that have a docstring there.

    Classes of the same name are taken together.
    """
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in (path for package in PACKAGES for path in modules(package)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                above, documented = found.setdefault(node.name, (set(), set()))
                above |= {re.sub(r"\[.*", "", ast.unparse(base)).rsplit(".", 1)[-1] for base in node.bases}
                documented |= {c.name for c in node.body if isinstance(c, Definition) and ast.get_docstring(c)}
    return found


def inherits_docstring(method: str, owner: str, classes: dict[str, tuple[set[str], set[str]]]) -> bool:
    above = classes.get(owner, (set(), set()))[0]
    return any(
        method in classes.get(base, (set(), set()))[1] or inherits_docstring(method, base, classes) for base in above
    )


def own_raises(node: ast.AST) -> Iterator[str]:
    """What the body of a function raises by name, without the functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(raised).rsplit(".", 1)[-1]
            if name[0].isupper() and name != "NotImplementedError":  # an exception that is raised again has no name
                yield name
        if not isinstance(child, Definition):
            yield from own_raises(child)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_has_a_docstring(package):
    classes, bare, seen = documented_methods(), [], 0
    for path in modules(package):
        for name, node, around in definitions(path):
            seen += 1
            inherited = around is not None and inherits_docstring(node.name, around.name, classes)
            if not ast.get_docstring(node) and not node.name.startswith("__") and not inherited:
                bare.append(name)
    assert bare == [] and seen > 50


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_what_is_raised(package):
    silent, seen = [], 0
    for path in modules(package):
        for name, node, around in definitions(path):
            if isinstance(node, ast.ClassDef) or is_command(node):
                continue
            # a class's docstring speaks for its construction
            speaker = around if around is not None and node.name in ("__init__", "__post_init__") else node
            section = (ast.get_docstring(speaker) or "").partition("Raises:")[2]
            raised = list(dict.fromkeys(own_raises(node)))
            seen += len(raised)
            silent += [f"{name}: {error}" for error in raised if error not in section]
    assert silent == [] and seen > 3
