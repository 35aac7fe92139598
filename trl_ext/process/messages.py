"""Lines for the user on standard error, each on a line of its own even beside a progress bar. Imports no torch."""

import sys
from contextlib import nullcontext


def tell(line: str) -> None:
    """Write ``line`` to standard error, above a bar that tqdm draws there."""
    bars = sys.modules.get("tqdm.std")  # which whoever draws a bar has imported
    with bars.tqdm.external_write_mode(file=sys.stderr) if bars else nullcontext():
        print(line, file=sys.stderr, flush=True)
