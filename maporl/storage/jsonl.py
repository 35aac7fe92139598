"""Read JSONL files that another process may be writing. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maporl.errors import UserError


class DamagedRecord(UserError, RuntimeError):
    """A whole line is not JSON; names the file and the line."""


def whole_lines(path: Path, start: int = 0) -> Iterator[tuple[int, Any]]:
    """The records of a JSONL file from byte ``start`` on, each with the byte after its line.

    A last line without its end is passed over: a crash has cut it off, or somebody is still writing it.

    Raises:
        DamagedRecord: any other line is not JSON.
    """
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            start += len(line)
            if line == b"\n":
                continue
            try:
                yield start, json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                if line.endswith(b"\n"):
                    raise DamagedRecord(f"{path}: line {number} is damaged: {error}") from None
