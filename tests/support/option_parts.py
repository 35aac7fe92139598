"""Parts of a user's own, which runs that try one option after another name as ``option_parts:NAME``."""

import asyncio
import threading

from maporl import Environment, Tool, Toolbox


def spread(dialogues, task):
    """Return a score from 0 to 1 of each answer that depends on all its characters, so that answers differ."""
    return [[sum(map(ord, u.text)) % 7 / 7 for u in d.utterances] for d in dialogues]


async def double(n: int) -> str:
    """Double a number.

    Args:
        n: the number
    """
    await asyncio.sleep(0.3 * (n == 7))
    if n == 9:
        raise RuntimeError("no")
    return str(2 * n) * 12


class Counter(Environment):
    """Counts up by a step. It takes long to count to 2."""

    def __init__(self, step=1):
        self.step = step

    def reset(self, seed, row):
        self.count = 0
        return "c"

    def tools(self, agent):
        async def up() -> int:
            """Count up."""
            self.count += self.step
            await asyncio.sleep(0.3 * (self.count == 2))
            return self.count

        return [Tool.of(up)]

    def reward(self):
        return float(self.count)


class Doors(Counter):
    """Says whether another one was opened at the same time."""

    both = threading.Barrier(2)

    def reset(self, seed, row):
        super().reset(seed, row)
        try:
            self.both.wait(timeout=0.5)
        except threading.BrokenBarrierError:
            self.both.reset()
            return "alone"
        return "together"


class Shop:
    """A class as TRL's ``environment_factory`` takes it, with two numbers that may be its reward."""

    def reset(self, **row):
        self.sold, self.asked = 0, 0
        return " sale"

    def buy(self, count: int) -> str:
        """Buy pieces.

        Args:
            count: how many
        """
        self.sold, self.asked = self.sold + count, self.asked - 1
        return f"{self.sold} sold"


class Twice(Counter):
    """Counts up by twice as much."""

    def __init__(self, step=1):
        super().__init__(2 * step)


def treble(n: int) -> str:
    """Treble a number.

    Args:
        n: the number
    """
    return str(3 * n)


class Finder(Toolbox):
    """Has one tool, which says a prefix."""

    def __init__(self, prefix: str):
        self.prefix = prefix

    def tools(self):
        def find(what: str) -> str:
            """Find something.

            Args:
                what: what to find
            """
            return self.prefix + what

        return [Tool.of(find)]
