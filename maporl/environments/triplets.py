"""The tool ``triplet``, which makes a question of the program that a proposer writes (Absolute Zero).

Imports no torch.
"""

import dataclasses

from maporl.environments.base import Tool, Toolbox
from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.sandbox import Limits
from maporl.sandbox.triplets import LIMITS, induction, pair
from maporl.types import Result


class TripletTool(Toolbox):
    """The tool ``triplet(said, kind, program)``, which the protocol ``propose`` calls with ``vouch: tool``.

    For deduction and abduction ``said`` has a ``python`` block with a function f, and an ``input`` block with its
    arguments. For induction it has ten ``input`` blocks for the given ``program``, and a ``message`` block that says
    what it does. The program is run twice in fresh processes, and must have the same values, which Python can write as
    literals. A program that reads the clock, or chance that the sandbox does not seed, is refused; it seeds Python's
    ``random``.

    ``cpu_seconds``, ``wall_seconds`` and ``memory_mb`` are the limits of a run, and ``workers`` is how many are run at
    once, by default one for each core. The question has the limits in ``meta.limits``, and the task ``triplets`` grades
    its answers under them, so that what the tool found valid can be answered.

    Source: Absolute Zero, arXiv 2505.03335, and its published code.

    Raises:
        SandboxError: the kernel of this machine cannot hold a program.
        ValueError: a limit is too small for any program, or ``workers`` is below 1.
    """

    def __init__(
        self,
        cpu_seconds: int = LIMITS.cpu_seconds,
        wall_seconds: float = LIMITS.wall_seconds,
        memory_mb: int = LIMITS.memory_mb,
        workers: int | None = None,
    ):
        self.limits = Limits(cpu_seconds, wall_seconds, memory_mb)
        self.pool = SandboxPool(self.limits, workers)

    def close(self) -> None:
        """End the sandboxes' processes."""
        self.pool.close()

    def tools(self) -> list[Tool]:
        """Return the tool."""

        def triplet(said: str, kind: str, program: str = "") -> Result:
            """Make a question of a program, its inputs and their outputs.

            Args:
                said: what the proposer says
                kind: deduction, abduction or induction
                program: the program whose inputs are proposed, for induction
            """
            made = induction(self.pool, said, program) if kind == "induction" else pair(self.pool, said, kind)
            made["meta"]["limits"] = dataclasses.asdict(self.limits)
            return Result("a valid triplet", made)

        return [Tool.of(triplet)]
