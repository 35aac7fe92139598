"""Write the tables of packages in architecture.md, and the table of decisions in decisions/index.md.

    python docs/make_architecture.py

The order of the packages is the page's own. What a package is for is the first paragraph of its docstring, its kind and
its budget are those of budget.yaml, and who imports whom is read from the code. tests/contract/test_architecture.py
reads the same table, so that the page, the docstrings and the rule of imports are one fact. What stands above the table
of decisions is the page's own, and the rows are the first lines of the decisions.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # last: benchmarks/reward_server.py is no package
import weigh  # what counts lines of code, and reads the budgets

ROOT = weigh.ROOT
PAGE = ROOT / "docs/architecture.md"
ROW = re.compile(r"^\| (\d*) \|[\w ]*\| `([\w/.]+)` \|.*\|$", re.M)
SUM = re.compile(r"^\| (companion|core|extension|all) \| ([^|]*)\| ([^|]*)\|.*\|$", re.M)
LEFT = "| companion | what it imports of the core |\n|---|---|\n"
"""The head of the table of what companions import."""
INDEX = ROOT / "docs/decisions/index.md"
RULE = "|---|---|---|---|\n"
"""What stands between the head of the table of decisions and its rows."""
DECISION = re.compile(r"# (\d+)\. (.+)\n\nDate: (.+)\. Binds: (all packages|(?:`[\w/.]+`[,\s]*)+)\.\n")


class Package(NamedTuple):
    """A folder of modules, or a module that stands alone: its layer, 0 being the lowest, and its path.

    The modules whose names are loaded from all layers have None: nobody imports them.
    """

    layer: int | None
    path: str

    @property
    def module(self) -> str:
        """Its name in Python."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def packages() -> list[Package]:
    """Return the packages of the page's table, from the lowest layer up."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [Package(int(layer) if layer else None, path) for layer, path in rows]


class Import(NamedTuple):
    """One import; ``where`` is the file and the line."""

    module: str
    where: str
    imported: str


def module_name(path: Path) -> str:
    """Return the name in Python of a file of the checkout."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for top in weigh.COUNTED for path in sorted((ROOT / top).rglob("*.py"))}
"""The file of each module."""


@cache
def package_of(module: str) -> Package | None:
    """Return the innermost package of a module, or None for one that is missing on the page."""
    path = FILES[module].relative_to(ROOT).as_posix()
    named = {package.path: package for package in packages()}
    return named.get(weigh.package_of(path, tuple(named)))


def imports_of(module: str) -> Iterator[Import]:
    """Yield every import in a module's file, those inside functions included."""
    path = FILES[module]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            names = [
                f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in node.names if base != "__future__"
            ]
        else:
            continue
        for name in sorted(set(names)):
            yield Import(module, f"{path.relative_to(ROOT)}:{node.lineno}", name)


@cache
def all_imports() -> list[Import]:
    """Return every import of every module."""
    return [found for module in FILES for found in imports_of(module)]


@cache
def steps() -> list[tuple[Package, Package, Import]]:
    """Return the imports of modules of the checkout with the packages of both, where these are two with layers."""
    found = [(package_of(i.module), package_of(i.imported), i) for i in all_imports() if i.imported in FILES]
    return [
        (above, below, i)
        for above, below, i in found
        if above and below and above != below and None not in (above.layer, below.layer)
    ]


def purpose(path: str) -> str:
    """Return the first paragraph of a package's docstring, as it stands in the table.

    Raises:
        ValueError: the package has no docstring.
    """
    file = ROOT / path if path.endswith(".py") else ROOT / path / "__init__.py"
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not words:
        raise ValueError(
            f"{file.relative_to(ROOT)}: begin it with a docstring whose first paragraph says what it is for"
        )
    summary = " ".join(words.partition("\n\n")[0].split())
    return re.sub(r":\w+:`([\w.]+)`", r"`\1`", summary).replace("``", "`")


def text(counted: Mapping[str, int]) -> str:
    """Return the page with the purposes, kinds, budgets and imports of today, and the ``counted`` lines of code.

    Raises:
        ValueError: a package has no docstring or no budget.
    """
    budgets, sums = weigh.budgets(), weigh.sums(counted)

    def row(found: re.Match[str]) -> str:
        layer, path = found.groups()
        if path not in budgets:
            raise ValueError(f"docs/budget.yaml: give {path} a budget, below its kind")
        kind, most = budgets[path]
        return f"| {layer} | {kind} | `{path}` | {purpose(path)} | {most:,} | {counted.get(path, 0):,} |"

    def total(found: re.Match[str]) -> str:
        number, lines, most = sums[found[1]]
        return f"| {found[1]} | {found[2]}| {found[3]}| {number} | {most:,} | {lines:,} |"

    page = SUM.sub(total, ROW.sub(row, PAGE.read_text(encoding="utf-8")))
    above, _, below = page.partition(LEFT)
    return above + LEFT + left() + below[below.index("\n\n") + 1 :]


def left() -> str:
    """Return a row for each companion, with the core that it imports."""
    kinds = {package: weigh.budgets()[package.path].kind for package in packages() if package.layer is not None}
    rows = []
    for package in sorted(package for package, kind in kinds.items() if kind == "companion"):
        needed = {f"`{below.path}`" for above, below, _ in steps() if above == package and kinds[below] == "core"}
        rows.append(f"| `{package.path}` | {', '.join(sorted(needed)) or 'nothing'} |\n")
    return "".join(rows)


class Decision(NamedTuple):
    """The first lines of a page of ``docs/decisions``: number, title, days, and the packages that it binds; none means
    all."""

    file: Path
    number: int
    title: str
    packages: list[str]
    days: str


def decisions() -> list[Decision]:
    """Return the decisions in the order of their numbers.

    Raises:
        ValueError: a page does not begin with its number, title, days and packages.
    """
    pages = []
    for file in sorted(INDEX.parent.glob("[0-9]*.md")):
        begins = DECISION.match(file.read_text(encoding="utf-8"))
        if begins is None or not file.name.startswith(f"{int(begins[1]):03}-"):
            raise ValueError(
                f"{file.relative_to(ROOT)}: begin it with '# N. Title', where its name begins with N in three digits, "
                "an empty line, and 'Date: YEAR-MONTH-DAY. Binds: `package`, `package`.' or 'Binds: all packages.'"
            )
        pages.append(Decision(file, int(begins[1]), begins[2], re.findall(r"`(.+?)`", begins[4]), begins[3]))
    return pages


def index() -> str:
    """Return the page of decisions with the table of today."""
    above = INDEX.read_text(encoding="utf-8").partition(RULE)[0]
    rows = []
    for one in decisions():
        bound = ", ".join(f"`{package}`" for package in one.packages) or "all packages"
        rows.append(f"| {one.number} | [{one.title}]({one.file.name}) | {bound} | {one.days} |\n")
    return above + RULE + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(text(weigh.weigh()), encoding="utf-8")
    INDEX.write_text(index(), encoding="utf-8")
