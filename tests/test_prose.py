"""Docstrings, comments and messages can be read aloud, as far as a machine can tell.

Every public function, method and class has a docstring. The docstring names the exceptions that the code raises itself. A few
patterns that make a reader stop do not occur.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["maporl", "trl_ext", "reward_server"]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
WITHOUT_DOCSTRING: set[str] = set()
"""Public definitions that need no docstring of their own, as ``path:Class.method``."""
RIDDLE = re.compile(r"\b(is|are|was|were) no(ne)?\b(?! longer)|had not to be|\banew\b")


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def definitions(path: Path) -> Iterator[tuple[str, Definition, ast.ClassDef | None]]:
    """The public functions, classes and methods of a module: name, definition, and the class around it."""
    place = path.relative_to(ROOT).as_posix()

    def walk(
        node: ast.AST, above: str, around: ast.ClassDef | None
    ) -> Iterator[tuple[str, Definition, ast.ClassDef | None]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Definition) or (child.name.startswith("_") and not child.name.startswith("__")):
                continue
            yield f"{place}:{above}{child.name}", child, around
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{above}{child.name}.", child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "", None)


def bases(package_files: list[Path]) -> dict[str, tuple[set[str], set[str]]]:
    """Of every class by name: the names of its bases, and of the methods that have a docstring there."""
    found = {}
    for path in package_files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                documented = {c.name for c in node.body if isinstance(c, Definition) and ast.get_docstring(c)}
                above = {re.sub(r"\[.*", "", ast.unparse(b)).rsplit(".", 1)[-1] for b in node.bases}
                found[node.name] = (above, documented)
    return found


def inherits_docstring(name: str, around: ast.ClassDef, classes: dict[str, tuple[set[str], set[str]]]) -> bool:
    """Whether a base class that is defined here documents the method ``name``."""
    waiting = set(classes[around.name][0])
    while waiting:
        above, documented = classes.get(waiting.pop(), (set(), set()))
        if name in documented:
            return True
        waiting |= above
    return False


def own_raises(node: ast.AST) -> Iterator[str]:
    """What the body of a function raises by name, without the functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(raised).rsplit(".", 1)[-1]
            if name[0].isupper() and name != "NotImplementedError":  # what is raised again has no name
                yield name
        if not isinstance(child, Definition):
            yield from own_raises(child)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_has_a_docstring(package):
    classes = bases([path for name in PACKAGES for path in files(name)])
    bare = [
        name
        for path in files(package)
        for name, node, around in definitions(path)
        if not ast.get_docstring(node)
        and not node.name.startswith("__")
        and name not in WITHOUT_DOCSTRING
        and not (around is not None and inherits_docstring(node.name, around, classes))
    ]
    assert bare == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_what_is_raised(package):
    silent = []
    for path in files(package):
        for name, node, around in definitions(path):
            if isinstance(node, ast.ClassDef):
                continue
            # a class's docstring speaks for its construction
            speaker = around if around is not None and node.name in ("__init__", "__post_init__") else node
            raises = (ast.get_docstring(speaker) or "").partition("Raises:")[2]
            silent += [f"{name}: {error}" for error in dict.fromkeys(own_raises(node)) if error not in raises]
    assert silent == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_riddles(package):
    riddles = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(package)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if RIDDLE.search(line)
    ]
    assert riddles == []
