"""A verifier for the claims: made by the project's own commands, and served by HTTP in another process."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving import serving

URLS_VARIABLE = "MAPORL_VERIFIER_URLS"
"""The environment variable that tells a run where its verifier is served."""
LEARN = ("--learning-rate", 2e-3, "--batch-size", 64)


@dataclass(frozen=True)
class Lore:
    """The answers that a verifier learns from: the options of each of the three commands that make it."""

    generate: tuple[object, ...]
    balance: tuple[object, ...]
    train: tuple[object, ...]


USUAL = Lore(("--per-question", 4), (), ("--epochs", 6))
"""With the temperatures and the filters that the commands have by default."""
VARIED = Lore(
    ("--per-question", 16, "--temperature-low", 1.3, "--temperature-high", 3.0, "--top-p", 1.0),
    ("--repeats", "--per-question", 8),
    ("--epochs", 3),
)
"""With temperatures at which the agents err in many ways."""


def _maporl(*command: object) -> None:
    subprocess.run([sys.executable, "-m", "maporl", *map(str, command)], check=True, stdout=subprocess.DEVNULL)


def make_verifier(world: Path, seed: int, sets: list[str], folder: Path, lore: Lore) -> Path:
    """Make a verifier, unless ``folder`` holds it, from answers of the agents of ``world`` with the overrides ``sets``.

    The ``seed`` decides what is held out. No label of a held-out question is used. Verifiers in folders side by side
    begin as the same model, which has learned the answers.
    """
    if (folder / "verifier").is_dir():
        return folder / "verifier"
    shutil.rmtree(folder, ignore_errors=True)
    own = [part for line in [*sets, f"seed={seed}"] for part in ("--set", line)]
    teacher = folder.parent / "teacher"
    if not (teacher / "ann").is_dir():
        shutil.rmtree(teacher, ignore_errors=True)
        frozen = ("--set", "agents.bob.trainable=false", "--set", f"seed={seed}")
        # ann learns the answers, and becomes the verifier
        _maporl("sft", world, "--output", teacher, *frozen, "--epochs", 16, *LEARN, "-q")
    _maporl(*("verifier", "generate", world, *own, "--output", folder / "samples", "--batch-size", 512, *lore.generate))
    _maporl("verifier", "balance", folder / "samples", "--output", folder / "balanced.jsonl", *lore.balance)
    options = ("--model", teacher / "ann", "--output", folder / "verifier", "--use-cpu", *LEARN)
    _maporl("verifier", "train", folder / "balanced.jsonl", *options, *lore.train)
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
