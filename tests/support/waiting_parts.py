"""Parts of a run that wait for ever after three updates: they write the file ``WAITS_HERE``, beside the run's folder,
and block."""

import asyncio
import os
import time
from pathlib import Path

from maporl import Environment


def wait_for_ever():
    waits = Path(os.environ["WAITS_HERE"])
    metrics = waits.with_name("run") / "metrics.jsonl"
    if metrics.exists() and len(metrics.read_bytes().splitlines()) >= 3:
        waits.touch()
        time.sleep(3600)


def plain(completions, **columns):
    wait_for_ever()
    return [1.0] * len(completions)


async def awaited(completions, **columns):
    """Blocks in a thread that the end of the interpreter waits for."""
    await asyncio.to_thread(wait_for_ever)
    return [1.0] * len(completions)


class World(Environment):
    def reset(self, seed, row):
        wait_for_ever()

    def tools(self, agent):
        return []


class WorldThatCloses(Environment):
    def reset(self, seed, row):
        pass

    def tools(self, agent):
        return []

    def close(self):
        wait_for_ever()
