"""Code triplets: a program, an input and its output, of which one is to be found (Absolute Zero). Imports no torch.

Questions are made of programs, and of what a proposer says, for the tool and the task. Right answers are found by
running programs in the sandbox.
"""

import re
from collections.abc import Sequence
from typing import Any

from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.repeatable import repeatable
from maporl.sandbox.sandbox import Limits
from maporl.text import code_of, spoken
from trl_ext.process.parsing import literal_of

KINDS = ("deduction", "abduction", "induction")
"""What is to be found: the output, an input, or the program."""
INPUT_COUNT = 10
"""How many inputs a question of induction is made of. Half of them are shown, and all grade the program."""
LIMITS = Limits(cpu_seconds=1, wall_seconds=5.0)
"""The limits of a run, where the tool ``triplet`` is given no others."""
LONGEST = 10_000
"""The most characters of a value or an input."""
_INPUT = re.compile(r"```input[ \t]*\n(.*?)```", re.DOTALL)
_MESSAGE = re.compile(r"```message[ \t]*\n(.*?)```", re.DOTALL)
DEDUCTION = (
    "```python\n{program}\n```\n\nWhich value does f({input}) have? Write it as Python does, between <answer> and "
    "</answer>."
)
ABDUCTION = (
    "```python\n{program}\n```\n\nFor which arguments does f have the value {output}? Write one possibility as in a "
    "call, without f and its parentheses, between <answer> and </answer>."
)
INDUCTION = (
    "{message}\n\n{shown}\n\nWrite the function f that does this, also for other arguments. Put it into a ```python "
    "block between <answer> and </answer>."
)


def pair(pool: SandboxPool, said: str, kind: str) -> dict[str, Any]:
    """Return the question of a proposal for deduction or abduction, with its ``answer`` and ``meta``.

    Raises:
        ValueError: the proposal is not valid. The message says why.
    """
    program, blocks = code_of(said, "f").strip("\n"), _INPUT.findall(spoken(said))
    if not program or not blocks:
        raise ValueError("expected a ```python block that defines f, and an ```input block")
    inputs = arguments(blocks[-1])
    if inputs is None:
        raise ValueError(f"the input {blocks[-1]!r:.80} has no arguments that are literals")
    return question(kind, program, inputs, checked(pool, program, [inputs])[0])


def question(kind: str, program: str, inputs: str, output: str) -> dict[str, Any]:
    """Return a question of deduction or abduction, with its answer."""
    meta = {"kind": kind, "program": program, "input": inputs, "output": output}
    text = DEDUCTION if kind == "deduction" else ABDUCTION
    return {
        "question": text.format(program=program, input=inputs, output=output),
        "answer": output if kind == "deduction" else inputs,
        "meta": meta,
    }


def induction(pool: SandboxPool, said: str, program: str) -> dict[str, Any]:
    """Return the question of a proposal for induction, with its ``answer`` and ``meta``.

    Raises:
        ValueError: the proposal is not valid. The message says why.
    """
    blocks, messages = _INPUT.findall(spoken(said)), _MESSAGE.findall(spoken(said))
    inputs = [text for text in map(arguments, blocks) if text is not None]
    if len(blocks) != INPUT_COUNT or len(inputs) != INPUT_COUNT or not messages or not messages[-1].strip():
        raise ValueError(f"expected {INPUT_COUNT} ```input blocks of literals, and a ```message block")
    return induced(program, inputs, checked(pool, program, inputs), messages[-1].strip())


def induced(program: str, inputs: Sequence[str], outputs: Sequence[str], message: str) -> dict[str, Any]:
    """Return a question of induction, which shows the first half of the inputs, with its answer."""
    pairs = [list(both) for both in zip(inputs, outputs, strict=True)]
    told, hidden = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    shown = "\n".join(f"f({one}) == {value}" for one, value in told)
    meta = {"kind": "induction", "program": program, "shown": told, "hidden": hidden, "message": message}
    return {"question": INDUCTION.format(message=message, shown=shown), "answer": program, "meta": meta}


def checked(pool: SandboxPool, program: str, inputs: Sequence[str]) -> list[str]:
    """Return the values of a program, which has the same ones in two processes.

    Raises:
        ValueError: it fails, has other values the second time, or its text says that it may.
    """
    if not repeatable(program):
        raise ValueError("the program reads the clock, or chance that nobody seeds")
    first, second = values(pool, program, inputs), values(pool, program, inputs)
    if first is None or second is None:
        raise ValueError("the program fails, or its value is not a literal")
    if any(not same(one, other) for one, other in zip(first, second, strict=True)):
        raise ValueError("the program has another value each time")
    return first


def values(pool: SandboxPool, program: str, inputs: Sequence[str]) -> list[str] | None:
    """Return what f returns for each of ``inputs``, as Python writes it, or None if one is not a literal or the program
    fails."""
    argument_tuples = [literal_of(f"({one},)") for one in inputs]
    code = f"{program}\n\ndef values_of_f():\n    return [repr(f(*given)) for given in {argument_tuples!r}]\n"
    with pool.one() as sandbox:
        results = sandbox.execute(code, "values_of_f").value
    if not isinstance(results, list) or len(results) != len(inputs):
        return None
    return results if all(isinstance(one, str) and literal(one) is not None for one in results) else None


def arguments(text: str) -> str | None:
    """Return the arguments of a call as Python writes them, or None if they are not literals.

    >>> arguments(" 'a',[1 ,2]"), arguments("3"), arguments("print(1)"), arguments("")
    ("'a', [1, 2]", '3', None, None)
    """
    parsed = literal(f"({text.strip()},)")
    if parsed is None or not isinstance(parsed[0], tuple):
        return None
    try:
        return ", ".join(map(repr, parsed[0]))
    except ValueError:  # Python writes no number of more than 4,300 digits, but reads one in hexadecimal
        return None


def same(text: str, other: str) -> bool:
    """Return whether two literals have equal values.

    >>> same("[1, 2]", "[1,2]"), same("'a'", '"a"'), same("1", "2"), same("f(1)", "f(1)")
    (True, True, False, False)
    """
    one, two = literal(text), literal(other)
    return one is not None and two is not None and bool(one[0] == two[0])


def literal(text: str) -> tuple[Any] | None:
    """Return the value of a Python literal, alone in a tuple, or None if the text is not one."""
    if len(text) > LONGEST:
        return None
    try:
        return (literal_of(text.strip()),)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
