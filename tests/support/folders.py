"""The folders that tests read."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
SUPPORT = ROOT / "tests/support"
"""What several tests share, and the programs that they start."""
GOLDEN = ROOT / "tests/golden"
"""Numbers of other programs, and excerpts of data sets."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
