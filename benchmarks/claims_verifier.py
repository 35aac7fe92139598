"""A verifier for the claims: made by the project's own commands, and served by HTTP in another process."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import serving

URLS_VARIABLE = "MAPORL_VERIFIER_URLS"
"""The environment variable that tells a run where its verifier is served."""
LEARN = ("--learning-rate", 2e-3, "--batch-size", 64)


def _maporl(*command: object) -> None:
    subprocess.run([sys.executable, "-m", "maporl", *map(str, command)], check=True, stdout=subprocess.DEVNULL)


def make_verifier(world: Path, seed: int, sets: list[str], folder: Path) -> Path:
    """Make a verifier, unless ``folder`` holds it, from answers of the agents of ``world`` with the overrides ``sets``.

    The ``seed`` decides what is held out. No label of a held-out question is used.
    """
    if (folder / "verifier").is_dir():
        return folder / "verifier"
    shutil.rmtree(folder, ignore_errors=True)
    own = [part for line in [*sets, f"seed={seed}"] for part in ("--set", line)]
    frozen = ("--set", "agents.bob.trainable=false", "--set", f"seed={seed}")
    # ann learns the answers, and becomes the verifier
    _maporl("sft", world, "--output", folder / "teacher", *frozen, "--epochs", 16, *LEARN, "-q")
    counts = ("--per-question", 4, "--batch-size", 512)
    _maporl("verifier", "generate", world, *own, "--output", folder / "samples", *counts)
    _maporl("verifier", "balance", folder / "samples", "--output", folder / "balanced.jsonl")
    options = ("--model", folder / "teacher/ann", "--output", folder / "verifier", "--epochs", 6, "--use-cpu")
    _maporl("verifier", "train", folder / "balanced.jsonl", *options, *LEARN)
    return folder / "verifier"


@contextmanager
def served(verifier: Path) -> Iterator[str]:
    """Serve ``verifier`` on a free port of this machine, and yield the server's URL. The server is stopped at the end.

    Raises:
        RuntimeError: the server did not start.
    """
    options = ("serve", "--model", verifier, "--device", "cpu")
    with serving(verifier.parent / "server.log", "maporl", *options) as (url, _):
        yield url
