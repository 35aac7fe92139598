"""Write the table of rooms in house.md: the order is the page's own, and what a room is for is the first line of its docstring.

    python docs/make_house.py

tests/contract/test_floors.py reads the same table, so that the map, the docstrings and the rule of imports are one fact.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/house.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/.]+)` \| (.*) \|$", re.M)


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
    """Return the first line of a room's docstring, as it stands in the table.

    Raises:
        ValueError: the room has no docstring.
    """
    file = ROOT / path if path.endswith(".py") else ROOT / path / "__init__.py"
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not words:
        raise ValueError(f"{file.relative_to(ROOT)}: begin it with a docstring whose first line says what it is for")
    return re.sub(r":\w+:`([\w.]+)`", r"`\1`", words.split("\n")[0]).replace("``", "`")


def text() -> str:
    """Return the page with the purposes of today."""
    page = PAGE.read_text(encoding="utf-8")
    return ROW.sub(lambda row: f"| {row[1]} | `{row[2]}` | {purpose(row[2])} |", page)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
