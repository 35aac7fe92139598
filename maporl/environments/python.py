"""The tools ``python`` and ``run_tests``: programs of agents, which run in the sandbox. Imports no torch."""

from maporl.environments.base import Tool, Toolbox
from maporl.sandbox.outcomes import Outcome
from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.sandbox import Limits
from maporl.types import Result

WHY = {
    "source": "the code is blank or too long",
    "timeout": "the code took too long",
    "cpu": "the code took too long",
    "memory": "the code used too much memory",
    "output": "the code printed too much",
    "killed": "the code crashed",
}
"""What an agent is told about an outcome that has no error line of its own."""


class _Programs(Toolbox):
    """A toolbox with a pool of sandboxes, whose processes start with the first programs."""

    def __init__(
        self, cpu_seconds: int = 1, wall_seconds: float = 5.0, memory_mb: int = 256, workers: int | None = None
    ):
        self.pool = SandboxPool(Limits(cpu_seconds, wall_seconds, memory_mb), workers)

    def close(self) -> None:
        """End the sandboxes' processes."""
        self.pool.close()


class Python(_Programs):
    """The tool ``python(code)``: it runs a program in the sandbox and returns what it printed and its last error line.

    The program is a script: what stands under its main guard runs. It has Python's standard library, as far as that
    needs no file, network, thread or other process.

    ``cpu_seconds``, ``wall_seconds`` and ``memory_mb`` are the limits of a program. ``workers`` is how many run at
    once, by default one for each core. The result's ``value`` is ``{"reason": how it ended}``.

    Raises:
        SandboxError: the kernel of this machine cannot hold a program.
        ValueError: a limit is too small for any program, or ``workers`` is below 1.
    """

    def tools(self) -> list[Tool]:
        """Return the tool."""

        def python(code: str) -> Result:
            """Run a Python program. It returns what the program prints, and its error if it fails.

            Args:
                code: the program; it must print what it finds
            """
            with self.pool.one() as sandbox:
                outcome = sandbox.execute(code, "") if code.strip() else Outcome(None, "source")
            return Result(shown(outcome), {"reason": outcome.reason})

        return [Tool.of(python)]


class RunTests(_Programs):
    """The tool ``run_tests(code, asserts, setup, name)``, which the protocol ``code`` calls. The options are those of
    ``python``.

    Tests run in another process than the program (:meth:`maporl.sandbox.sandbox.Sandbox.run_tests`), which is imported
    there: what stands under its main guard does not run. The result's text has a line for each assert that fails. Its
    ``value`` is ``{"passed": [...], "why": [...]}``, with a truth value and a text for each assert.

    Raises:
        SandboxError: the kernel of this machine cannot hold a program.
        ValueError: a limit is too small for any program, or ``workers`` is below 1.
    """

    def tools(self) -> list[Tool]:
        """Return the tool."""

        def run_tests(code: str, asserts: list[str], setup: str = "", name: str = "") -> Result:
            """Run a Python program, and then tests of it.

            Args:
                code: the program
                asserts: the tests
                setup: what runs before the tests
                name: the function that is tested, which may have the name of one of Python's own
            """
            outcomes = self.pool.tested(code, asserts, setup, name)
            passed, why = [outcome.ok for outcome in outcomes], [failure(outcome) for outcome in outcomes]
            lines = [f"{test}: {text}" for test, text in zip(asserts, why, strict=True) if text]
            good = "all tests pass" if asserts else "no tests were given"
            return Result("\n".join(lines) or good, {"passed": passed, "why": why})

        return [Tool.of(run_tests)]


def shown(outcome: Outcome) -> str:
    """What an agent is shown of a program: what it printed, and then its error if it failed."""
    parts = [outcome.printed.rstrip("\n"), failure(outcome)]
    return "\n".join(part for part in parts if part) or "(nothing was printed)"


def failure(outcome: Outcome) -> str:
    """Why a program failed, in a line; an empty text if it ran to its end."""
    if outcome.ok:
        return ""
    said = " ".join(outcome.message.split())
    return said or WHY.get(outcome.reason) or outcome.reason.partition(":")[2]
