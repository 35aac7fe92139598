"""Programs, inputs and outputs, one of them to be found (Absolute Zero, arXiv 2505.03335), and the tool ``triplet``.

It makes such a question of the program that a proposer writes. Imports no torch.
"""

import dataclasses
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

from maporl.environments.base import Tool, Toolbox
from maporl.sandbox.pool import SandboxPool, shared_pool
from maporl.sandbox.sandbox import Limits, check_walls
from maporl.sandbox.triplets import (
    INPUT_COUNT,
    LIMITS,
    arguments,
    checked,
    induced,
    induction,
    literal,
    pair,
    question,
    same,
    values,
)
from maporl.tasks.base import Task, TaskError, read_rows, text_of
from maporl.text import code_of, spoken
from maporl.types import Example, Grade, Result
from trl_ext.ppo.options import Positive, ProperShare, option
from trl_ext.process.waits import Threads, result

PROGRAMS = {
    "int": ["x + 7", "x * x - x", "x % 4", "[x] * (x % 3)", "str(x) + 'a'", "sum(range(x))", "x // 2 if x % 2 == 0 else 3 * x + 1", "bin(x)[2:]", "[i for i in range(x) if i % 3]"],  # noqa: E501
    "str": ["x[::-1]", "x.upper() + str(len(x))", "sorted(set(x))", "x.replace('a', 'b')", "[ord(c) % 7 for c in x]", "x[1:] + x[:1]", "{c: x.count(c) for c in x}", "x.count('o') > 0"],  # noqa: E501
    "list": ["sorted(x)", "sum(x) - max(x)", "[a + b for a, b in zip(x, x[1:])]", "x[::2]", "[i for i, a in enumerate(x) if a > 2]", "len(set(x))", "[a * a for a in x if a % 2]"],  # noqa: E501
}  # fmt: skip
"""What the function f returns for its argument x, by the kind of x."""
INPUTS = {
    "int": [str(number) for number in (0, 1, 2, 3, 5, 6, 8, 9, 11, 14)],
    "str": [repr(word) for word in ("a", "road", "kayak", "moon", "ab ba", "zoo", "banana", "echo", "level", "proof")],
    "list": [repr(row) for row in ([1], [2, 3], [3, 1, 2], [4, 4], [5, 0, 5], [1, 2, 3, 4], [9, 7, 5], [2, 2, 3], [6, 1], [0, 8, 3, 1])],  # noqa: E501
}  # fmt: skip
TELL = {
    "deduction": "Write a Python function f and arguments for it, so that it is hard to say which value f has for them.",  # noqa: E501
    "abduction": "Write a Python function f and arguments for it, so that it is hard to find arguments for which f has the same value.",  # noqa: E501
    "induction": "Write ten different arguments for this function, and a message that describes what the function does without "  # noqa: E501
    "its code, so that it is hard, but possible, to write the function from the message and five of the values.",
}
"""What a proposer is told, by what is to be found."""
HOW = {
    "deduction": "Put the function into a ```python block, and the arguments, as in a call, into an ```input block. The value must always be "  # noqa: E501
    "the same, and one that Python can write. Here are others, from which yours should differ:",
    "induction": "Put each argument, as in a call, into an ```input block of its own, and the message into a ```message block.",  # noqa: E501
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"^```\w*\s*\n?(.*?)\n?```$", re.DOTALL)


@dataclass(frozen=True)
class Triplets(Task):
    """Questions on a program, an input and its output, of which one is to be found.

    An output and an input are right if the program says so, and a program if it gives all outputs, shown and hidden.
    Programs are run in the sandbox. What the tool ``triplet`` makes is graded under the limits of that tool, and the
    task's own questions under its default ones: 1 second of CPU time, 5 on the clock and 256 MiB. An answer stands
    between ``<answer>`` and ``</answer>``.

    The prompt of a proposer (``{document}``) says what kind of question to write, with ``references`` triplets of the
    split, or for induction the program.

    Raises:
        SandboxError: the kernel of this machine cannot hold a program.
        TaskError: the source cannot be read, or a program in it fails.
        ValueError: a number is out of its range.
    """

    kind: Literal["deduction", "abduction", "induction"] = option(
        "deduction",
        "What is asked for: the output (deduction), an input that gives the output (abduction), or the program "
        "(induction), of which a message and half of ten input-output pairs are shown.",
    )
    source: str | None = option(
        None,
        "A file of rows with a `program` that defines f, ten `inputs` and a `message`. Default: short programs that "
        "come with maporl.",
    )
    references: Positive = option(6, "Number of triplets that a proposer is shown.")
    held_out: ProperShare = option(0.25, "The share of the programs that is the evaluation split.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    answer_form = "<answer>...</answer>"
    labels_graded = 0  # what programs return is compared, and was read when questions were made

    def __post_init__(self) -> None:
        super().__post_init__()
        check_walls()

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    @cached_property
    def _programs(self) -> list[tuple[str, list[str], list[str], str]]:
        """The programs of the split, each with ten inputs, their outputs and a message."""
        programs = _built_in() if self.source is None else _read(self.source)
        random.Random(self.seed).shuffle(programs)
        held_out = max(1, round(self.held_out * len(programs)))
        programs = programs[:held_out] if self.split == "eval" else programs[held_out:]
        if not programs:
            raise TaskError(f"triplets: {self.source} leaves no program to train on; give more, or a smaller held_out")
        return programs

    @cached_property
    def _examples(self) -> list[Example]:
        programs = self._programs
        if self.kind == "induction":
            made = [induced(*one) for one in programs]
        else:
            made = [question(self.kind, p, *io) for p, ins, outs, _ in programs for io in zip(ins, outs, strict=True)]
        examples = []
        for number, one in enumerate(made):
            told = self._told(one["meta"], random.Random(f"{self.seed}/{number}"))
            examples.append(
                Example(f"{self.kind}-{number}", one["question"], one["answer"], one["meta"] | {"document": told})
            )
        return examples

    def _told(self, meta: dict[str, Any], rng: random.Random) -> str:
        """Return what a proposer is told."""
        if self.kind == "induction":
            return f"{TELL[self.kind]}\n\n```python\n{meta['program']}\n```\n\n{HOW[self.kind]}"
        every = [(p, i, o) for p, ins, outs, _ in self._programs for i, o in zip(ins, outs, strict=True)]
        chosen = rng.sample(every, min(self.references, len(every)))
        shown = "\n\n".join(f"```python\n{p}\n```\n```input\n{i}\n```\n```output\n{o}\n```" for p, i, o in chosen)
        return f"{TELL[self.kind]}\n\n{HOW['deduction']}\n\n{shown}"

    def solution(self, example: Example) -> str:
        """The answer in its tags, as a block if it is a program."""
        program = example.meta["kind"] == "induction"
        said = f"```python\n{example.answer}\n```" if program else example.answer
        return f"<answer>{said}</answer>"

    def grade(self, example: Example, text: str) -> Grade:
        """Run the program where that is needed, and compare values."""
        answers, meta = _ANSWER.findall(spoken(text)), example.meta
        if not answers:
            return Grade(None, False, "no final answer")
        said = answers[-1].strip()
        if meta["kind"] == "induction":
            program = code_of(said, "f")
            pairs = [*meta.get("shown", []), *meta["hidden"]]
            outputs = values(_pool(meta), program, [one for one, _ in pairs]) if program else None
            right = outputs is not None and all(same(a, b) for a, (_, b) in zip(outputs, pairs, strict=True))
            return Grade(program or said, right, "gives the outputs" if right else "does not give the outputs")
        said = fence[1].strip() if (fence := _FENCE.match(said)) else said
        if meta["kind"] == "deduction":
            right = same(said, meta["output"])
            return Grade(
                said, right, "is the output" if right else "is not the output" if literal(said) else "is not a literal"
            )
        inputs = arguments(said)
        outputs = None if inputs is None else values(_pool(meta), meta["program"], [inputs])
        right = outputs is not None and same(outputs[0], meta["output"])
        return Grade(said, right, "gives the output" if right else "does not give the output")

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """:meth:`grade` for each pair, on all cores."""
        with Threads(os.cpu_count() or 1, "grades triplets") as threads:
            waiting = [threads.submit(self.grade, *both) for both in zip(examples, texts, strict=True)]
            return [result(one) for one in waiting]


def _pool(meta: dict[str, Any]) -> SandboxPool:
    """Return where the programs of a question are run, under the limits with which it was made."""
    return shared_pool(Limits(**meta["limits"]) if "limits" in meta else LIMITS)


@cache
def _run(program: str, inputs: tuple[str, ...]) -> list[str]:
    return checked(shared_pool(LIMITS), program, inputs)


def _built_in() -> list[tuple[str, list[str], list[str], str]]:
    programs = []
    for kind, bodies in PROGRAMS.items():
        for body in bodies:
            program = f"def f(x):\n    return {body}"
            programs.append((program, INPUTS[kind], _run(program, tuple(INPUTS[kind])), f"A function of one {kind}."))
    return programs


def _read(source: str) -> list[tuple[str, list[str], list[str], str]]:
    programs = []
    for number, row in enumerate(read_rows(source, "train")):
        program, inputs = row.get("program"), row.get("inputs")
        texts = [one if isinstance(one, str) else repr(one) for one in inputs] if isinstance(inputs, list) else []
        parsed = [arguments(one) for one in texts]
        valid = [one for one in parsed if one is not None]
        if not isinstance(program, str) or len(parsed) != INPUT_COUNT or valid != parsed:
            wrong = f"input {texts[parsed.index(None)]!r:.60}" if None in parsed else f"{len(parsed)} inputs"
            raise TaskError(
                f"triplets: {source}: row {number + 1}: expected a program that defines f, and {INPUT_COUNT} inputs as "
                "in a call, such as "
                f"\"'a', 3\", got the columns {sorted(row)}, a program of the type {type(program).__name__} and {wrong}"
            )
        try:
            message = text_of(row.get("message"), "message")
            outputs = _run(program, tuple(valid))
        except ValueError as error:
            raise TaskError(f"triplets: {source}: row {number + 1}: {error}") from None
        programs.append((program, valid, outputs, message or "A function."))
    return programs


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
