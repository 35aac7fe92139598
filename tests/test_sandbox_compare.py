"""Programs judged by literals that never enter their process: honest ones pass, and ones that are equal to all fail."""

import pytest

from maporl.sandbox.compare import judge
from maporl.sandbox.sandbox import Limits, Sandbox

TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
ALWAYS = "    def __eq__(self, other): return True\n    __hash__ = None\n"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(Limits(cpu_seconds=1, wall_seconds=5), cache=False) as made:
        yield made


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
    assert judge(sandbox, code, "", TESTS) == passes


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
    assert judge(sandbox, f"def f(): return {expression}", "", [f"assert f() == {literal}"]) == [passes]


def test_subclasses_of_plain_kinds_count_as_the_kind(sandbox):
    code = "from collections import Counter\ndef f(): return Counter('aab')"
    assert judge(sandbox, code, "", ["assert f() == {'a': 2, 'b': 1}"]) == [True]


@pytest.mark.parametrize(
    "test", ["assert f(1)", "assert f(1) == g(2)", "assert f(1) < 3", "assert f(1) == b'x'", "f(("]
)
def test_other_forms_are_not_judged(sandbox, test):
    assert judge(sandbox, "def f(x): return 1", "", [test, "assert f(0) == 1"]) == [None, True]


def test_the_setup_follows_the_code(sandbox):
    assert judge(sandbox, "def f(x): return x", "g = f", ["assert g(4) == 4"]) == [True]
