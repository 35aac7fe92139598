"""Serve something on a free port of this machine while a measurement or a run goes on."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2


@contextmanager
def serving(log: Path, module: str, *options: object) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run ``python -m module OPTIONS --port P`` until the end, and yield its URL and its process once it is ready.

    What it prints is added to ``log``.

    Raises:
        RuntimeError: the server did not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, *map(str, options), "--port", str(port)]
    with log.open("a") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start; see {log} ({' '.join(command)})")
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready").is_success
    except httpx2.TransportError:
        return False
