"""Programs judged by literals that never enter their process: honest ones pass, and ones that are equal to all fail."""

import pytest

from maporl.sandbox.compare import judge
from maporl.sandbox.outcomes import Outcome
from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.sandbox import Limits, Sandbox

TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
ALWAYS = "    def __eq__(self, other): return True\n    __hash__ = None\n"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(Limits(cpu_seconds=1, wall_seconds=5), cache=False) as made:
        yield made


def passed(*asked):
    return [outcome.ok for outcome in judge(*asked)]


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("def f(x): return x + 1", [True, True]),
        ("def f(x): return 2", [True, False]),
        (f"class E:\n{ALWAYS}def f(x): return E()", [False, False]),
        (f"class E(int):\n{ALWAYS}def f(x): return E(0)", [False, False]),
        ("def f(x):\n    while x == 1: pass\n    return 3", [False, True]),
        ("def isinstance(*a): return True\ndef f(x): return 7", [False, False]),
        ("def maporl_value(): return ['value', 2]\ndef f(x): return 0\n'''", [False, False]),
        ("def f(x): raise SystemExit(0)", [False, False]),
    ],
)
def test_only_the_right_value_passes(sandbox, code, passes):
    assert passed(sandbox, code, TESTS) == passes


@pytest.mark.parametrize(
    ("expression", "literal", "passes"),
    [
        ("(1, 2)", "(1, 2)", True),
        ("[1, 2]", "(1, 2)", False),
        ("{3, 1}", "{1, 3}", True),
        ("{1: None, 'a': [True]}", "{1: None, 'a': [True]}", True),
        ("__import__", "1", False),
        ("None", "None", True),
        ("1.0", "1", True),
    ],
)
def test_values_keep_their_kind(sandbox, expression, literal, passes):
    assert passed(sandbox, f"def f(): return {expression}", [f"assert f() == {literal}"]) == [passes]


def test_subclasses_of_plain_kinds_count_as_the_kind(sandbox):
    code = "from collections import Counter\ndef f(): return Counter('aab')"
    assert passed(sandbox, code, ["assert f() == {'a': 2, 'b': 1}"]) == [True]


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("assert f(1)", "ok"), ("assert f(1) == g(2)", "error:NameError"), ("assert f(1) < 3", "ok"),
        ("assert f(1) == b'x'", "error:AssertionError"), ("f((", "syntax"), ("assert " + "(" * 500, "syntax"),
        ("assert f(1) == 1 == 1", "ok"),
    ],
)  # fmt: skip
def test_tests_of_other_forms_run_beside_the_program(sandbox, test, reason):
    found = judge(sandbox, "def f(x): return 1", [test, "assert f(0) == 1"])
    assert [outcome.reason for outcome in found] == [reason, "ok"]


@pytest.mark.parametrize(
    ("test", "reason", "message"),
    [
        ("assert f(1) == 2, 'not two'", "error:AssertionError", "AssertionError: not two"),
        ("assert f(1) == 2, g(1)", "error:AssertionError", "AssertionError"),
        ("assert f(0) == 2", "error:ZeroDivisionError", "ZeroDivisionError: division by zero"),
        ("assert h(1) == 2", "error:NameError", "NameError: name 'h' is not defined"),
        ("assert f == 2", "error:AssertionError", "AssertionError"),
        ("assert 1 + f == 2", "error:TypeError", "TypeError: unsupported operand type(s) for +: 'int' and 'function'"),
        ("assert f(1e-320) == 2", "error:AssertionError", "AssertionError"),
        ("assert (lambda: (yield))() == 2", "error:AssertionError", "AssertionError"),
    ],
)
def test_why_a_comparison_fails(sandbox, test, reason, message):
    (outcome,) = judge(sandbox, "def f(x): return 1 / x", [test])
    assert (outcome.reason, outcome.message) == (reason, message)


def test_all_tests_of_a_program_run_in_one_process_in_their_order(sandbox):
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    tests = ["assert f(5) == 1", "assert f(5) > 1", "assert f(5) == 3", "assert seen == [5, 5, 5]", "assert f(5) == 9"]
    assert passed(sandbox, code, tests) == [True, True, True, True, False]


def test_a_program_never_meets_the_literals_of_its_tests(sandbox):
    code = "class E:\n    def __eq__(self, other): raise KeyError(other)\ndef f(x): return E()"
    (literal, other) = judge(sandbox, code, ["assert f(1) == 77", "assert f(1) == 7 * 11"])
    assert (literal.message, other.message) == ("AssertionError", "KeyError: 77")


def test_as_many_large_values_as_tests_are_read(sandbox):
    tests = [f"assert f({number}) == {'x' * 60_000!r}" for number in range(6)]
    assert passed(sandbox, "def f(x): return 'x' * 60_000", tests) == [True] * 6


def test_the_setup_follows_the_code(sandbox):
    assert passed(sandbox, "def f(x): return x", ["assert g(4) == 4"], "g = f") == [True]


def test_the_same_program_with_the_same_tests_runs_once():
    pool = SandboxPool(workers=1)
    asked = []
    with pool.one() as only:
        run = only.run_asserts
        only.run_asserts = lambda *values: asked.append(values[0]) or run(*values)
    first = pool.tested("def f(): return 1", ["assert f() == 1"])
    first.clear()  # what the caller does with its list changes nothing
    assert [outcome.ok for outcome in pool.tested("def f(): return 1", ["assert f() == 1"])] == [True]
    assert pool.run_tests([("def f(): return 1", ["assert f() == 1"], "")] * 3)[2][0].ok
    assert len(asked) == 1
    for tests, setup in ((["assert f() == 2"], ""), (["assert f() == 1"], "x = 1"), (["assert f() == 1"] * 2, "")):
        pool.tested("def f(): return 1", tests, setup)
    assert len(asked) == 4
    pool.close()


def test_an_outcome_that_depends_on_the_machine_is_not_kept(monkeypatch):
    pool, found = SandboxPool(workers=1), iter(["timeout", "ok"])
    monkeypatch.setattr("maporl.sandbox.pool.judge", lambda *asked: [Outcome(None, next(found))])
    assert [pool.tested("x", ["y"])[0].reason for _ in range(3)] == ["timeout", "ok", "ok"]


def test_the_outcomes_of_the_programs_that_came_last_are_kept(monkeypatch):
    pool, asked = SandboxPool(workers=1), []
    monkeypatch.setattr("maporl.sandbox.pool.judge", lambda sandbox, code, *rest: asked.append(code) or [])
    monkeypatch.setattr("maporl.sandbox.pool.KEPT", 2)
    for code in "abacab":
        pool.tested(code, [])
    assert asked == ["a", "b", "c", "b"]
