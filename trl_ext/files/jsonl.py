"""Read JSONL files that another process may be writing. No torch."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trl_ext.errors import UserError


class DamagedRecord(UserError, RuntimeError):
    """A complete line is not JSON. The message names the file and the line."""


def whole_lines(
    path: Path, start: int = 0, damaged: Callable[[int, DamagedRecord], None] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield the position after each line of a JSONL file and the line's record, from byte ``start`` on.

    A last line without a line break is skipped, because a crash has cut it off or it is still being written. Another
    line that is not JSON is left out, and ``damaged`` is given the position after it and an error that names it.

    Raises:
        DamagedRecord: a line is not JSON, and ``damaged`` is None.
    """
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            start += len(line)
            if line == b"\n":
                continue
            try:
                yield start, json.loads(line)
            except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or values within values without end
                if not line.endswith(b"\n"):
                    continue
                fault = DamagedRecord(f"{path}: line {number} is damaged: {error}; repair it, or remove it")
                if damaged is None:
                    raise fault from None
                damaged(start, fault)
