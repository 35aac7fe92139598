"""The folders and files of tests, and what stands in them."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
SUPPORT = ROOT / "tests/support"
"""What several tests share, and the programs that they start."""
GOLDEN = ROOT / "tests/golden"
"""Numbers of other programs, and excerpts of data sets."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def tables(page):
    """The tables of a page, each a list of its rows: texts by the heads of their columns."""
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        yield [dict(zip(head, row, strict=True)) for row in rows]


@cache
def files_of_tests():
    """The files that have a test function, by the function's name."""
    files = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M):
            files.setdefault(name, []).append(path)
    return files


def file_of(name):
    """The file with the test function ``name``, which no other file has."""
    found = files_of_tests().get(name, [])
    assert len(found) == 1, f"{name}: " + (f"several files have this test: {found}" if found else "no such test")
    return found[0]
