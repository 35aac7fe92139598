"""Environments that count, block, crash and draw, for tests of ``isolate: process``."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from maporl import Environment, Result, Tool


class Stock(Environment):
    """Sells a stock that agents share."""

    forks = "replay"

    def __init__(self, pieces: int = 3):
        self.pieces = pieces

    def reset(self, seed, row):
        self.left, self.bought = self.pieces, {}
        self.drawn = random.randrange(10**9)
        return f" The shop has {self.left}."

    def tools(self, agent):
        def buy(count: int) -> Result:
            """Buy pieces.

            Args:
                count: how many
            """
            if count > self.left:
                raise ValueError(f"Only {self.left} left.")
            self.left -= count
            self.bought[agent] = self.bought.get(agent, 0) + count
            return Result(f"You have {self.bought[agent]}.", {"left": self.left}, reward=0.1 * count)

        async def draw() -> int:
            """Draw a number."""
            return self.drawn

        def hang() -> str:
            """Block for ever."""
            while True:
                time.sleep(1)

        def crash() -> str:
            """Kill the process."""
            os.kill(os.getpid(), signal.SIGKILL)

        def hoard() -> str:
            """Allocate too much."""
            raise MemoryError

        def leave() -> str:
            """Leave."""
            sys.exit("away")

        def shell() -> int:
            """Run another program."""
            return subprocess.run(["false"], check=False).returncode

        def where() -> int:
            """Tell the process number."""
            return os.getpid()

        return [Tool.of(f) for f in (buy, draw, hang, crash, hoard, leave, shell, where)]

    def observe(self, agent):
        return None if self.left == self.pieces else f" {self.left} are left."

    def state(self):
        return f"{self.left}"

    def over(self):
        return not self.left

    def reward(self):
        return {agent: float(count) for agent, count in self.bought.items()}


class BlocksAtReset(Stock):
    """Is never ready."""

    def reset(self, seed, row):
        threading.Event().wait()


class BlocksAtClose(Stock):
    """Does not close."""

    def close(self):
        if hasattr(self, "left"):
            threading.Event().wait()


class DiesAtReward(Stock):
    """Its process ends when it should pay."""

    def reward(self):
        os._exit(3)


class FailsAtReset(Stock):
    """Cannot begin."""

    def reset(self, seed, row):
        raise ValueError("no goods")


class Mute(Environment):
    """It pays nothing, neither by a reward nor by its tool."""

    def tools(self, agent):
        def look() -> str:
            """Look."""
            return "a shelf"

        return [Tool.of(look)]


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
