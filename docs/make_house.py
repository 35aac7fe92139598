"""Write the table of rooms in house.md, and the table of decisions in decisions/index.md.

    python docs/make_house.py

The order of the rooms is the page's own, and what a room is for is the first paragraph of its docstring.
tests/contract/test_floors.py reads the same table, so that the map, the docstrings and the rule of imports are one
fact. What stands above the table of decisions is the page's own, and the rows are the first lines of the decisions.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/house.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/.]+)` \| (.*) \|$", re.M)
INDEX = ROOT / "docs/decisions/index.md"
RULE = "|---|---|---|---|\n"
"""What stands between the head of the table of decisions and its rows."""
DECISION = re.compile(r"# (\d+)\. (.+)\n\nDate: (.+)\. Binds: (all rooms|(?:`[\w/.]+`[,\s]*)+)\.\n")


class Room(NamedTuple):
    """A folder of modules, or a module that stands alone: its floor from the ground, 0, and its path."""

    floor: int
    path: str

    @property
    def module(self) -> str:
        """Its name in Python."""
        return self.path.removesuffix(".py").replace("/", ".")


def rooms() -> list[Room]:
    """Return the rooms of the page's table, from the ground up."""
    return [Room(int(floor), path) for floor, path, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def purpose(path: str) -> str:
    """Return the first paragraph of a room's docstring, as it stands in the table.

    Raises:
        ValueError: the room has no docstring.
    """
    file = ROOT / path if path.endswith(".py") else ROOT / path / "__init__.py"
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not words:
        raise ValueError(
            f"{file.relative_to(ROOT)}: begin it with a docstring whose first paragraph says what it is for"
        )
    summary = " ".join(words.partition("\n\n")[0].split())
    return re.sub(r":\w+:`([\w.]+)`", r"`\1`", summary).replace("``", "`")


def text() -> str:
    """Return the page with the purposes of today."""
    page = PAGE.read_text(encoding="utf-8")
    return ROW.sub(lambda row: f"| {row[1]} | `{row[2]}` | {purpose(row[2])} |", page)


class Decision(NamedTuple):
    """The first lines of a page of ``docs/decisions``: number, title, days, and the rooms that it binds; none means
    all."""

    file: Path
    number: int
    title: str
    rooms: list[str]
    days: str


def decisions() -> list[Decision]:
    """Return the decisions in the order of their numbers.

    Raises:
        ValueError: a page does not begin with its number, title, days and rooms.
    """
    pages = []
    for file in sorted(INDEX.parent.glob("[0-9]*.md")):
        begins = DECISION.match(file.read_text(encoding="utf-8"))
        if begins is None or not file.name.startswith(f"{int(begins[1]):03}-"):
            raise ValueError(
                f"{file.relative_to(ROOT)}: begin it with '# N. Title', where its name begins with N in three digits, "
                "an empty line, and 'Date: YEAR-MONTH-DAY. Binds: `room`, `room`.' or 'Binds: all rooms.'"
            )
        pages.append(Decision(file, int(begins[1]), begins[2], re.findall(r"`(.+?)`", begins[4]), begins[3]))
    return pages


def index() -> str:
    """Return the page of decisions with the table of today."""
    above = INDEX.read_text(encoding="utf-8").partition(RULE)[0]
    rows = []
    for one in decisions():
        rooms = ", ".join(f"`{room}`" for room in one.rooms) or "all rooms"
        rows.append(f"| {one.number} | [{one.title}]({one.file.name}) | {rooms} | {one.days} |\n")
    return above + RULE + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    INDEX.write_text(index(), encoding="utf-8")
