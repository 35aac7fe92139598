"""Reading JSONL files that somebody may be writing. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> Iterator[Any]:
    """Records of a JSONL file; a last line cut off by a crash is passed over, any other damage is an error."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:  # no JSON, or no UTF-8
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is damaged: {error}") from None
