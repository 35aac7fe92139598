"""Reading JSONL files that somebody may be writing. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maporl.errors import UserError


class DamagedRecord(UserError, RuntimeError):
    """A line, not the last one, is no JSON; names the file and the line."""


def whole_lines(path: Path, start: int = 0) -> Iterator[tuple[int, Any]]:
    """(byte after it, record) of each line of a JSONL file, from byte ``start`` on. A last line cut off by a crash, or not yet
    written to its end, is passed over; any other damage is an error."""
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            start += len(line)
            if line == b"\n":
                continue
            try:
                yield start, json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                if line.endswith(b"\n"):
                    raise DamagedRecord(f"{path}: line {number} is damaged: {error}") from None
