"""The folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
SUPPORT = ROOT / "tests/support"
"""What several tests share, and the programs that they start."""
GOLDEN = ROOT / "tests/golden"
"""Numbers of other programs, and excerpts of data sets."""
