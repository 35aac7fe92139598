"""A verifier for the claims: made by the project's own commands, and served by HTTP in another process."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

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
    taught = [
        folder / "teacher",
        "--set",
        "agents.bob.trainable=false",
        "--set",
        f"seed={seed}",
        "--epochs",
        16,
        *LEARN,
        "-q",
    ]
    _maporl("sft", world, "--output", *taught)  # ann learns the answers, and becomes the verifier
    _maporl(
        "verifier", "generate", world, *own, "--output", folder / "samples", "--per-question", 4, "--batch-size", 512
    )
    _maporl("verifier", "balance", folder / "samples", "--output", folder / "balanced.jsonl")
    options = ("--model", folder / "teacher/ann", "--output", folder / "verifier", "--epochs", 6, "--use-cpu")
    _maporl("verifier", "train", folder / "balanced.jsonl", *options, *LEARN)
    return folder / "verifier"


@contextmanager
def served(verifier: Path) -> Iterator[str]:
    """Serve ``verifier`` on a free port of 127.0.0.1, and yield the server's URL. The server is stopped at the end.

    Raises:
        RuntimeError: the server did not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "maporl",
        "serve",
        "--model",
        str(verifier),
        "--device",
        "cpu",
        "--port",
        str(port),
    ]
    with (verifier.parent / "server.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server of {verifier} did not start; see {verifier.parent / 'server.log'}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready").is_success
    except httpx2.TransportError:
        return False
