"""Code: a solver writes a function, a tester writes tests of it, and both are shown where the two disagree
(AT-GRPO)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from maporl.datasets.programs import hidden_tests
from maporl.errors import ConfigError
from maporl.protocols.base import Play, Protocol, seats
from maporl.text import asserts_in, code_of, text_option
from maporl.types import Act, Ask, Example, Result, Utterance
from trl_ext.ppo.options import Positive, option

SOLVE = "{question}\n\nWrite the function between ```python and ```."
TEST = "{question}\n\nWrite tests of this function. Each test is one line that begins with assert and calls {name}."
DISAGREE = (
    "Your program and the tests disagree:\n{failures}\n\nThe program:\n{code}\n\nCorrect what is yours, and write all "
    "of it."
)
SHOWN = 3


@dataclass(frozen=True)
class Code(Protocol):
    """The ``solver`` writes a function and the ``tester`` tests of it, for at most ``rounds`` rounds or until all tests
    pass.

    Code is the last fenced block that defines ``meta.entry_point``. Tests are the lines that begin with ``assert`` and
    name it. Both are shown up to three tests that fail. The tool ``run_tests`` runs them, with ``meta.setup``. A
    tester is asked ``meta.tester_question``, if the task has one, in place of the question.

    The protocol pays programs ``solved``, the share of ``meta.tests`` that they pass, or 0 if they fail a test that
    the question shows, and tests ``tests``, the share of them that ``meta.reference`` passes. It pays both
    ``team``, which is ``solved``, and ``agree``, the share of tests that pass. A program has its ``solved`` and
    ``team`` before anybody speaks again, and so have tests all of theirs. A branching can therefore compare candidates
    after each step. In turns, a program's ``agree`` comes later, and a tree does not count it.

    Raises:
        ValueError: ``rounds`` is below 1, or a text lacks a placeholder or has an unknown one.
    """

    rounds: Positive = option(5, "Most rounds.")
    solver: str | None = option(None, "The agent that writes the function. Default: the first one.")
    tester: str | None = option(None, "The agent that writes the tests. Default: the second one.")
    order: Literal["together", "turns"] = option(
        "together", "They speak together, or in turns, so that the tester sees the program."
    )
    solve: str = text_option(SOLVE, "What the solver is asked, with {question!} and {name}, that of the function.")
    test: str = text_option(TEST, "What the tester is asked, with {question!} and {name}.")
    disagree: str = text_option(DISAGREE, "The prompt of both if tests fail, with {failures!} and {code}.")
    roles = True
    players = 2
    pays = frozenset({"solved", "tests", "agree", "team"})
    uses_tools = frozenset({"run_tests"})

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of answers."""
        return self.rounds

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.solver, self.tester) if name is not None}

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome is the number of the round in which all tests passed, or None.

        Raises:
            ConfigError: the question is not a program to write.
        """
        solver, tester = seats(agents, self.solver, self.tester)
        if missing := {"entry_point", "reference", "setup", "tests"} - example.meta.keys():
            raise ConfigError(
                f"protocol code: question {example.id} has no {min(missing)}; use a task of programs, such as mbpp"
            )
        name = example.meta["entry_point"]
        told = example.meta.get("tester_question", example.question)
        texts = [self.solve.format(question=example.question, name=name), self.test.format(question=told, name=name)]
        parents: tuple[int, ...] = ()
        for number in range(1, self.rounds + 1):
            solve = Ask(solver, [{"role": "user", "content": texts[0]}], "solver", parents)
            test = Ask(tester, [{"role": "user", "content": texts[1]}], "tester", parents, answers=False)
            together = self.order == "together"
            program, *replies = yield ([solve, test] if together else [solve])
            code = code_of(program.text, name)
            run = partial(_run, setup=example.meta["setup"], name=name)
            (hidden,) = yield [_run(program, *hidden_tests(example, code))]
            program.rewards |= {"solved": _share(hidden), "team": _share(hidden)}
            if not together:
                seen = [{"role": "user", "content": f"{texts[1]}\n\nThe program:\n{code}"}]
                replies = yield [replace(test, messages=seen, parents=(*parents, program.id))]
            (tests,) = replies
            asserts = asserts_in(tests.text, name)
            tested, judged = yield [run(program, code, asserts), run(tests, example.meta["reference"], asserts)]
            agree = program.rewards["agree"] = _share(tested)
            tests.rewards |= {"tests": _share(judged), "team": _share(hidden), "agree": agree}
            if asserts and agree == 1:
                return number
            failures = "\n".join(tested.text.splitlines()[:SHOWN]) if asserts else "No tests were written."
            texts, parents = [self.disagree.format(failures=failures, code=code)] * 2, (program.id, tests.id)
        return None


def _run(said: Utterance, code: str, asserts: Sequence[str], setup: str, name: str) -> Act:
    """The act that runs a program and tests of it, for what was said."""
    asked = {"code": code, "asserts": list(asserts), "setup": setup, "name": name}
    return Act(said.agent, "run_tests", asked, of=said.id)


def _share(result: Result) -> float:
    """The share of tests that passed. Tests that were not run are worth nothing that anybody knows."""
    if result.value is None:
        raise ConfigError(
            f"protocol code: run_tests failed ({result.error}: {result.text}); allow it more seconds or workers"
        )
    return sum(result.value["passed"]) / max(1, len(result.value["passed"]))
