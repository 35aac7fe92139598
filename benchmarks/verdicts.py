"""Count the rows of MBPP and HumanEval whose tests are passed by a program that computes nothing.

    python benchmarks/verdicts.py --mbpp mbpp.jsonl --humaneval humaneval.jsonl --out benchmarks/results/verdicts.json

For each row it grades, as the task does, these programs:

- ``constant``: one value for all arguments, which is each literal of the first hidden test that the question does not
  show, or True, False or None;
- ``identity``: the first argument;
- ``shown``: what the reference solution returns for the calls that stand in the question, and otherwise a constant or
  the first argument.

It lists the rows that each kind passes (``constant``, ``identity``, ``shown``), those that the task finds by reading
their tests (``found``, :func:`maporl.datasets.programs.proves_little`), and those in which the two differ: ``missed``
are passed and not found, ``blamed`` are found and not passed by any of these programs. It runs for a minute or two.
"""

import argparse
import ast
import json
import platform
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from machine import processor

from maporl.datasets.programs import MBPP, HumanEval, Programs, hidden_tests, proves_little
from maporl.sandbox.pool import SandboxPool
from maporl.tasks.base import examples_of, read_rows
from maporl.types import Example

KINDS = ("constant", "identity", "shown")


def calls_of(text: str, name: str) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Each statement of a test, with its calls of the function."""
    for node in ast.parse(text).body:
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and ast.unparse(part.func) == name:
                yield node, part


def calls(example: Example) -> Iterator[tuple[ast.AST, ast.Call, bool]]:
    """The calls of all tests, and whether the question shows them, however they are spaced and quoted."""
    name, said = example.meta["entry_point"], "".join(example.question.split()).replace("'", '"')
    yield from ((node, call, True) for node, call in calls_of(example.meta["hidden_setup"], name))
    for text in example.meta["tests"]:
        for node, call in calls_of(text, name):
            yield node, call, "".join(ast.unparse(call).split()).replace("'", '"') in said


def constants(example: Example) -> list[str]:
    """The values that a program without arguments could return: the literals of one test that is not shown."""
    found = {"True": None, "False": None, "None": None}
    node, call = next(((node, call) for node, call, told in calls(example) if not told), (None, None))
    inside = set(ast.walk(call)) if call else set()
    for part in ast.walk(node) if node else ():
        if isinstance(part, ast.expr) and part not in inside:
            try:
                found[repr(ast.literal_eval(part))] = None
            except (ValueError, TypeError):
                continue
    return list(found)


def table(example: Example) -> list[str]:
    """The arguments of the calls that the question shows, as Python writes them."""
    found = []
    for _, call, told in calls(example):
        try:
            values = tuple(ast.literal_eval(value) for value in call.args)
        except (ValueError, TypeError):
            continue
        if told and not call.keywords:
            found.append(repr(values))
    return found


def programs(example: Example) -> Iterator[tuple[str, str]]:
    """Programs that compute nothing, with their kinds."""
    name, reference = example.meta["entry_point"], example.meta["reference"]
    known = (
        f"space = {{}}\nexec({reference!r}, space)\ndef {name}(*values):\n"
        f"    if repr(values) in {table(example)!r}: return space[{name!r}](*values)\n"
    )
    for value in constants(example):
        yield "constant", f"def {name}(*values): return {value}"
        yield "shown", f"{known}    return {value}"
    yield "identity", f"def {name}(*values): return values[0]"
    yield "shown", f"{known}    return values[0]"


def measure(kind: type[Programs], sources: list[str], pool: SandboxPool) -> dict:
    """Grade the programs for all rows of a data set."""
    examples = [e for path in sources for e in examples_of(read_rows(path, "train"), path, kind._example)]
    work = [(example, name, code) for example in examples for name, code in programs(example)]
    outcomes = pool.run_tests([hidden_tests(example, code) for example, _, code in work])
    passed = {(e.id, name) for (e, name, _), o in zip(work, outcomes, strict=True) if all(one.ok for one in o)}
    lists = {name: [e.id for e in examples if (e.id, name) in passed] for name in KINDS}
    anyhow = {one for ids in lists.values() for one in ids}
    found = [example.id for example in examples if proves_little(example)]
    lists |= {
        "found": found,
        "missed": [e.id for e in examples if e.id in anyhow - {*found}],
        "blamed": [one for one in found if one not in anyhow],
    }
    return {"rows": len(examples), "programs": len(work), **{f"{k}_count": len(v) for k, v in lists.items()}, **lists}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbpp", nargs="+", default=[], help=".jsonl files of MBPP")
    parser.add_argument("--humaneval", nargs="+", default=[], help=".jsonl files of HumanEval")
    parser.add_argument("--out", type=Path, help="where the result is written; otherwise the counts are printed only")
    options = parser.parse_args()
    pool = SandboxPool()
    result: dict = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, Python {platform.python_version()}",
    }
    for name, kind in (("mbpp", MBPP), ("humaneval", HumanEval)):
        if sources := getattr(options, name):
            result[name] = measure(kind, sources, pool)
            counts = {key: value for key, value in result[name].items() if isinstance(value, int)}
            print(json.dumps({"data": name, **counts}))
    pool.close()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
