"""Tests that run where the program does not: right programs pass, and a program learns nothing that it should
return."""

import pytest

from maporl.sandbox.outcomes import Ended, Outcome, decode
from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.sandbox import Limits, Sandbox

TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
ALWAYS = (
    "    def __eq__(self, other): return True\n    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = "
    "__eq__\n    __hash__ = None\n"
)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(Limits(cpu_seconds=1, wall_seconds=5), cache=False) as made:
        yield made


def passed(sandbox, code, tests, setup="", name=""):
    return [outcome.ok for outcome in sandbox.run_tests(code, tests, setup, name)]


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("def f(x): return x + 1", [True, True]),
        ("def f(x): return 2", [True, False]),
        ("f = lambda x: x + 1", [True, True]),
        (f"class E:\n{ALWAYS}def f(x): return E()", [False, False]),
        (f"class E(int):\n{ALWAYS}def f(x): return E(0)", [False, False]),
        (f"class E(type):\n{ALWAYS}class F(metaclass=E): pass\ndef f(x): return F", [False, False]),
        ("def f(x):\n    while x == 1: pass\n    return 3", [False, True]),
        ("def isinstance(*a): return True\ndef f(x): return 7", [False, False]),
        ("def f(x): raise SystemExit(0)", [False, False]),
        ("import os\ndef f(x): os._exit(0)", [False, False]),
        ("import sys\ndef f(x): return x + 1\nsys.exit(0)", [True, True]),
        ("def f(x): return x + 1\nexit()", [True, True]),
        ("import sys\ndef f(x): return x + 1\nsys.exit(1)", [False, False]),
        ("import sys\nsys.exit(0)\ndef f(x): return x + 1", [False, False]),
        ("def f(x): raise StopIteration", [False, False]),
        # answers written by hand
        ("import os\nfor n in range(9): os.write(5, b'\\0\\0\\0\\x0f{\"value\": true}')\ndef f(x): return 0", [False, False]),
        ("import os\nfor n in range(9): os.write(5, b'\\0\\0\\0\\x20{\"ended\": \"ok\", \"message\": \"ok\" }')", [False, False]),
        ("import os\nfor n in range(9): os.write(5, b'\\0\\0\\0\\x22{\"ended\": \"lost\", \"message\": \"ok\" } ')", [False, False]),
        ("import os\nfor n in range(9): os.write(5, b'\\xff\\xff\\xff\\xff')\ndef f(x): return 0", [False, False]),
        ("import os\nfor n in range(9): os.write(5, b'\\0\\0\\0\\1[')\ndef f(x): return 0", [False, False]),
        ("import os\nfor n in range(4, 64):\n    try: os.write(n, b'{\"reason\": \"ok\", \"value\": null, \"message\": \"\"}\\n' * 9)\n    except OSError: pass\n", [False, False]),
        ("import os\nos.write(3, b'{\"reason\": \"ok\", \"value\": null, \"message\": \"\"}\\n' * 3)\nos._exit(0)", [False, False]),
        # what the test process has is not here
        ("import sys, gc\ndef f(x): return next(int(t[-1]) for t in gc.get_objects() if isinstance(t, str) and 'asse' + 'rt f' in t)", [False, False]),
        ("import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        if 'asse' + 'rt f' in str(frame.f_locals) + str(frame.f_globals): return 2\n        frame = frame.f_back", [False, False]),
        ("import sandboxed.tests as t\nt.ENDINGS = ('ok',)\nt.tell('ok')\nt.tell('ok')\nt.tell('ok')\ndef f(x): return 0", [False, False]),
    ],
)  # fmt: skip
def test_only_the_right_value_passes(sandbox, code, passes):
    assert passed(sandbox, code, TESTS) == passes


def test_what_the_sandbox_never_grants_is_an_error_that_a_program_can_catch(sandbox):
    refused = {
        "threads": "import threading; threading.Thread(target=print).start()",
        "threads of a pool": "import concurrent.futures as c; c.ThreadPoolExecutor().submit(print)",
        "coroutines": "import asyncio\n        async def g(): pass\n        asyncio.run(g())",
        "signals": "import signal; signal.signal(signal.SIGALRM, print)",
        "processes": "import multiprocessing; multiprocessing.Process(target=print).start()",
        "commands": "import subprocess; subprocess.run(['true'])",
        "files": "open('/etc/hostname')",
        "other packages": "import numpy",
    }
    for what, body in refused.items():
        code = f"def f(x):\n    try:\n        {body}\n    except (OSError, RuntimeError, ImportError): return 'refused'"
        assert passed(sandbox, code, ["assert f(1) == 'refused'"]) == [True], what


SECOND = "import os\nn = 0\ndef f(x):\n    global n\n    n += 1\n    if n == 2: {}\n    return x + 1"
LINE = '{{"reason": "{}", "value": null, "message": ""}}\n'


def frame_of(text, encoding="utf-8"):
    data = text.encode(encoding)
    return f"os.write(5, {len(data).to_bytes(4, 'big') + data!r})"


@pytest.fixture(scope="module")
def hurried():
    with Sandbox(Limits(cpu_seconds=1, wall_seconds=0.4), cache=False) as made:
        yield made


@pytest.fixture
def counted(monkeypatch, sandbox, hurried):
    """Runs tests of a program, and returns how they ended and how many processes of tests there were."""

    def run(code, tests):
        box, asked = hurried if "sleep(60)" in code + tests[0] else sandbox, []
        exchange = box._exchange
        monkeypatch.setattr(box, "_exchange", lambda order, *rest: asked.append(order) or exchange(order, *rest))
        return [outcome.reason for outcome in box.run_tests(code, tests)], asked.count(b"t")

    return run


@pytest.mark.parametrize(
    ("second", "reasons"),
    [
        ("__import__('time').sleep(60)", ["ok", "timeout"] * 3), ("__import__('os')._exit(0)", ["ok", "killed"] * 3),
        ("raise MemoryError", ["ok", "memory"] * 3), ("return 'x' * 1_100_000", ["ok", "output"] * 3), ("pass", ["ok"] * 10),
        ("os._exit(3)", ["ok", "killed"] * 3), ("__import__('ctypes').string_at(0)", ["ok", "killed"] * 3),
        ("from sandboxed.snippet import Unusable; raise Unusable('x')", ["ok", "syntax"] * 3),
        (frame_of('{"error": "MemoryError", "arguments": []}'), ["ok", "memory"] * 3), ("os.write(5, b'\\xff' * 4)", ["ok", "output"] * 3),
        *((frame_of(f'{{"ended": "{word}", "message": ""}}'), ["ok", reason] * 3) for word, reason in {
            "syntax": "syntax", "memory": "memory", "output": "output", "ok": "killed", "lost": "killed", "no_value": "killed",
        }.items()),
    ],
)  # fmt: skip
def test_a_program_that_ends_its_processes_is_given_three(counted, second, reasons):
    found, processes = counted(SECOND.format(second), [f"assert f({n}) == {n + 1}" for n in range(10)])
    assert found == reasons + [reasons[-1]] * (10 - len(reasons))
    assert processes == (1 if second == "pass" else 3)


@pytest.mark.parametrize(
    ("end", "reasons"),
    [
        ("os._exit(0)", ["killed"] * 8), ("os._exit(3)", ["killed"] * 8), ("raise MemoryError", ["memory"] * 8), ("exit(0)", ["error:SystemExit"] * 8),
        ("__import__('time').sleep(60)", ["timeout"] * 8),
        # a verdict written by hand: the test that follows one that is "ok" is not there to be asked
        (f"os.write(3, {LINE.format('ok').encode()!r}); os._exit(0)", ["ok", "killed"] * 3 + ["killed"] * 2),
        *((f"os.write(3, {LINE.format(word).encode()!r}); os._exit(0)", [reason] * 8) for word, reason in {
            "syntax": "syntax", "no_value": "no_value", "error:ValueError": "error:ValueError", "lost": "killed", "?": "killed",
        }.items()),
    ],
)  # fmt: skip
def test_tests_that_end_their_process_have_three_as_well_and_none_is_paid_for_it(counted, end, reasons):
    assert counted("def f(x): return x", [f"import os; {end}"] * 8) == (reasons, 1 if end == "exit(0)" else 3)


def test_a_test_that_ends_its_process_costs_the_others_nothing(counted):
    tests = ["assert f(1) == 1", "import os; os._exit(0)", "assert f(2) == 2", "assert f(3) == 4"]
    assert counted("def f(x): return x", tests) == (["ok", "killed", "ok", "error:AssertionError"], 2)


@pytest.mark.slow
def test_the_time_of_the_tests_before_is_not_held_against_a_test():
    slow, tests = "import time\ndef f(x): time.sleep({}); return x", [f"assert f({n}) == {n}" for n in range(5)]
    with Sandbox(Limits(cpu_seconds=1, wall_seconds=1), cache=False) as box:
        assert passed(box, slow.format(0.3), tests) == [True] * 5
        found = [outcome.reason for outcome in box.run_tests(slow.format(0.3), tests * 3)]
        assert found == ["ok"] * found.index("timeout") + ["timeout"] * (15 - found.index("timeout"))


@pytest.mark.parametrize(
    ("lines", "heard", "seconds", "mostly"),
    [
        (1, [(0.1, 10), (0.2, 20)], 1.0, True), (2, [(0.1, 10), (0.2, 20)], 1.0, True), (2, [(0.1, 10), (0.6, 20)], 1.0, False),
        (1, [(0.6, 20)], 1.0, False), (1, [(0.4, 10), (0.6, 20)], 1.0, True), (2, [(0.9, 20), (1.0, 25)], 1.0, False),
        (1, [(0.5, 10)], 1.0, False), (1, [(0.1, 4), (0.7, 10)], 1.0, False),
    ],
)  # fmt: skip
def test_the_time_after_a_verdict_counts_from_when_it_was_whole(lines, heard, seconds, mostly):
    ended = Ended(b"123456789\n" * 2 + b"12345", b"", (0, 0), True, False, tuple(heard), seconds)
    assert ended.mostly_after(lines) is mostly


def frame(text, encoding="utf-8"):
    return f"import os\ndef f(x): {frame_of(text, encoding)}"


def test_an_answer_is_json_in_utf_8_and_chooses_no_other_encoding(sandbox):
    tests = [
        "assert f(1) == 2",
        "import sys\nassert {'encodings.utf_16_be', 'encodings.utf_32_le'}.isdisjoint(sys.modules)",
    ]
    assert passed(sandbox, frame('{"value": 2}'), tests) == [True, True]
    for encoding in ("utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be", "utf-32-le", "utf-8-sig"):
        assert passed(sandbox, frame('{"value": 2}', encoding), tests) == [False, True]
        verdict = '{"reason": "ok", "value": 1, "message": ""}'
        assert decode(verdict.encode()) == Outcome(1, "ok")
        assert decode(verdict.encode(encoding)) == Outcome(None, "killed")


ENDLESS = "n = 0\ndef f(x):\n    global n\n    while True:\n        n += 1\n        yield n\ndef taken(): return n"


def test_how_far_a_test_would_go_tells_the_program_nothing(sandbox):
    tests = [
        "assert 8 in f(3)",
        "assert any(x == 5 for x in f(3))",
        "for x in f(3): break",
        "a, b = zip(f(1), [1, 2])",
        "assert next(x for x in f(3) if x > 3)",
    ]
    found = sandbox.run_tests(ENDLESS, [*tests, "assert taken() == 5 * 100_001"])
    assert [outcome.reason for outcome in found] == ["error:RuntimeError"] * 5 + ["ok"]
    assert "more than 100000 values, or does not end" in found[0].message
    assert passed(sandbox, ENDLESS, ["g = f(1)\nassert [next(g), next(g)] == [1, 2] and taken() == 2"]) == [True]
    # by hand: a range of all numbers in the place of the values of an iterator
    forged = "import os\nclass F:\n    def __iter__(self):\n        {}\n        return iter(())\ndef f(x): return F()".format(
        frame_of('{"value": {"range": [0, 999999999, 1]}}')
    )
    assert passed(sandbox, forged, ["assert 8 in f(3)"]) == [False]
    assert passed(sandbox, forged.replace("999999999, 1]}", "9, 1]}"), ["assert 8 in f(3)"]) == [False]


def test_views_of_dictionaries_keep_their_order(sandbox):
    code = "d = {3: [1], 1: 2}\ndef f(x): return [d.keys(), d.items(), d.values()]"
    tests = [
        "k, i, v = f(1)\nassert list(k) == [3, 1] and list(i) == [(3, [1]), (1, 2)] and list(v) == [[1], 2]",
        "assert 3 in f(1)[0]",
        "assert f(1)[2] != [[1], 2]",
    ]
    assert passed(sandbox, code, tests) == [True] * 3


RECORDS = """
seen = []
class Probe:
    def __init__(self, args): self.args = args
    def note(self, other=None):
        seen.append((self.args, other))
        return True
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __sub__ = __rsub__ = __add__ = __call__ = note
    __hash__ = None
    __bool__ = note
def f(*args):
    for known, answer in seen:
        if known == args and answer is not None: return answer
    return Probe(args)
"""


def test_objects_that_record_what_they_are_compared_with_learn_nothing(sandbox):
    tests = [
        "assert f(1) == 77", "assert 77 == f(1)", "assert f(2) != 5 and f(2) == 6", "assert f(3) in [8, 9]", "assert 8 in f(3)",
        "assert abs(f(4) - 0.33) < 1e-6", "assert f(5) < 9 and f(5) == 8", "assert sorted(f(6)) == [1]", "assert f(7) is True",
        "assert tuple(f(8)) == (1, 2)", "assert (f(9), 1) == (3, 1)", "assert {f(10): 1} == {4: 1}", "assert f(1) == 77",
    ]  # fmt: skip
    assert passed(sandbox, RECORDS, tests * 2) == [False] * 26
    assert passed(sandbox, RECORDS, [*tests, "assert [other for _, other in seen if other is not None] == []"])[-1], (
        "nothing was compared with it"
    )


@pytest.mark.parametrize(
    ("expression", "literal", "passes"),
    [
        ("(1, 2)", "(1, 2)", True), ("[1, 2]", "(1, 2)", False), ("{3, 1}", "{1, 3}", True), ("frozenset({3})", "{3}", True),
        ("{1: None, 'a': [True]}", "{1: None, 'a': [True]}", True), ("__import__", "1", False), ("None", "None", True), ("1.0", "1", True),
        ("b'ab'", "b'ab'", True), ("bytearray(b'a')", "b'a'", True), ("1j", "1j", True), ("10 ** 5000", "10 ** 5000", True),
        ("-(2 ** 20000)", "-(2 ** 20000)", True), ("float('inf')", "float('inf')", True), ("float('nan')", "float('nan')", False),
        ("'\\ud800'", "'\\ud800'", True), ("range(3)", "range(3)", True), ("Fraction(1, 3)", "Fraction(1, 3)", True),
        ("Decimal('0.10')", "Decimal('0.1')", True), ("int", "int", True), ("True", "1", True), ("Counter('aab')", "{'a': 2, 'b': 1}", True),
        ("[{(1, 2): [{3}, None]}]", "[{(1, 2): [{3}, None]}]", True), ("{}", "{}", True), ("''", "''", True), ("str", "int", False),
        ("{3: 1, 2: 1}.keys()", "{2, 3}", True), ("{3: 1}.keys()", "[3]", False), ("{3: [1]}.items()", "{(3, 1)}", False), ("{3: 1}.items()", "{(3, 1)}", True),
        ("[range(20_000)[i] for i in range(20_000)]", "list(range(20_000))", True),
    ],
)  # fmt: skip
def test_values_keep_their_kind(sandbox, expression, literal, passes):
    head = "from fractions import Fraction\nfrom decimal import Decimal\nfrom collections import Counter\n"
    code = f"{head}def f(x=None): return {expression}\ndef g(x): return x == {literal}"
    assert passed(sandbox, code, [f"assert f() == {literal}"], head) == [passes]
    if passes:
        assert passed(sandbox, code, [f"assert g({literal})"], head) == [True], "and on its way in"


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("assert f(1)", "ok"), ("assert not f(0)", "ok"), ("assert f(1) is True", "error:AssertionError"), ("assert f(1) == g(2)", "error:NameError"),
        ("assert f(1) < 3", "ok"), ("assert abs(f(1) - 1.0000001) < 1e-6", "ok"), ("assert f(1) == b'x'", "error:AssertionError"),
        ("f((", "syntax"), ("assert " + "(" * 500, "syntax"), ("assert f(1) == 1 == 1", "ok"), ("assert f(f(f(2))) == 2", "ok"),
        ("for x in range(5):\n    assert f(x) == x", "ok"), ("assert all(f(x) == x for x in range(5))", "ok"), ("assert list(map(f, [1, 2])) == [1, 2]", "ok"),
        ("try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'below 0'", "ok"), ("assert f in [f]", "ok"),
        ("x = [f(1), f(2)]\nassert x == [1, 2]", "ok"), ("import math\nassert math.isclose(f(0.1), 0.1)", "ok"), ("assert f(x=4) == 4", "ok"),
        ("assert isinstance(f(1), int)", "ok"), ("assert f", "ok"), ("assert f is not None", "ok"), ("assert f is None", "error:AssertionError"),
        ("assert f.__name__ == 'f'", "ok"), ("assert callable(f)", "ok"), ("assert nothing is not None", "error:NameError"),
        ("assert f(lambda: 1)", "error:TypeError"), ("assert f(1) == 2, 'not two'", "error:AssertionError"), ("assert f(10 ** 6 * 'x')", "error:RuntimeError"),
    ],
)  # fmt: skip
def test_tests_of_every_form_run(sandbox, test, reason):
    code = (
        "def f(x):\n    if isinstance(x, (int, float)) and x < 0: raise ValueError('below 0')\n    if x == 10 ** 6 * "
        "'x': raise RuntimeError\n    return x"
    )
    found = sandbox.run_tests(code, [test, "assert f(0) == 0"])
    assert [outcome.reason for outcome in found] == [reason, "ok"]


@pytest.mark.parametrize(
    ("test", "reason", "message"),
    [
        ("assert f(1) == 2, 'not two'", "error:AssertionError", "AssertionError: not two"),
        ("assert f(1) == 2, g(1)", "error:NameError", "NameError: name 'g' is not defined"),
        ("assert f(0) == 2", "error:ZeroDivisionError", "ZeroDivisionError: division by zero"),
        ("assert h(1) == 2", "error:NameError", "NameError: name 'h' is not defined"),
        ("assert f == 2", "error:AssertionError", "AssertionError"),
        ("assert d(3) == 2", "error:KeyError", "KeyError: 3"),
        ("assert u() == 2", "error:UnicodeDecodeError", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("assert o() == 2", "error:KeyError", "KeyError: 'mine'"),
        ("assert f(f, f) == 2", "error:TypeError", "TypeError: f() takes 1 positional argument but 2 were given"),
        ("assert f(f) == 2", "error:TypeError", "TypeError: unsupported operand type(s) for /: 'int' and 'function'"),
        ("assert all(map(stop, [1]))", "error:RuntimeError", "RuntimeError"),
        ("assert f(lambda: 1) == 2", "error:TypeError", "TypeError: a function cannot go into the program, which runs in another process"),
    ],
)  # fmt: skip
def test_why_a_test_fails(sandbox, test, reason, message):
    code = (
        "def f(x): return 1 / x\ndef d(x): return {}[x]\ndef u(): return b'\\xff'.decode()\nclass Own(KeyError): pass\n"
        "def o(): raise Own('mine')\ndef stop(x): raise StopIteration"
    )
    (outcome,) = sandbox.run_tests(code, [test])
    assert (outcome.reason, outcome.message) == (reason, message)


def test_things_of_the_program_stay_there_and_can_be_used(sandbox):
    code = (
        "class Stack:\n    def __init__(self, *values): self.values, self.name = list(values), 'stack'\n    def "
        "push(self, value): self.values.append(value); return self\n    def pop(self): return self.values.pop()\n    "
        "def __len__(self): return len(self.values)\n    def __iter__(self): return iter(self.values)\n    def "
        "__getitem__(self, i): return self.values[i]\n    def __setitem__(self, i, v): self.values[i] = v\n    def "
        "__delitem__(self, i): del self.values[i]\n    def __str__(self): return 'Stack of %d' % len(self)\n    def "
        "__eq__(self, other): return True\ndef size(stack): return len(stack.values)\ndef count(n):\n    for i in "
        "range(n): yield i\n"
    )
    tests = [
        "s = Stack(1, 2)", "assert len(s) == 2 and s.pop() == 2 and s.push(5) is s", "assert list(s) == [1, 5] and size(s) == 2", "assert s[1] == 5",
        "s[0] = 9\nassert s.values == [9, 5]", "del s[0]\nassert str(s) == 'Stack of 1'", "s.name = 'mine'\nassert s.name == 'mine'",
        "assert size(Stack(1, [2])) == 2", "assert list(count(3)) == [0, 1, 2]", "g = count(2)\nassert (next(g), next(g), next(g, None)) == (0, 1, None)",
        "assert sum(count(4)) == 6 and 2 in count(4) and 7 not in count(4)", "assert bool(Stack()) is False", "assert s != Stack(5)", "assert s == [5]",
        "assert s == s", "assert [s] == [s]", "try:\n    s[9]\n    assert False\nexcept IndexError:\n    pass",
    ]  # fmt: skip
    found = passed(sandbox, code, tests)
    assert [test for test, ok in zip(tests, found, strict=True) if not ok] == ["assert s == [5]"]


def test_all_tests_of_a_program_run_in_one_process_in_their_order(sandbox):
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    tests = ["assert f(5) == 1", "assert f(5) > 1", "assert f(5) == 3", "assert seen == [5, 5, 5]", "assert f(5) == 9"]
    assert passed(sandbox, code, tests) == [True, True, True, True, False]


def test_names_of_pythons_own_are_pythons_unless_they_are_what_is_tested(sandbox):
    code = "def abs(x): return 0\ndef sum(a, b): return a + b\ndef f(x): return 5\nclass tuple: pass\ntrue = True"
    tests = ["assert abs(f(1) - 0.33) < 1e-6", "assert sum([1, 2]) == 3", "assert tuple([1]) == (1,)", "assert true"]
    assert passed(sandbox, code, tests) == [False, True, True, True]
    assert passed(sandbox, code, ["assert sum(10, 15) == 25", "assert abs(-3) == 3"], name="sum") == [True, True]
    assert passed(sandbox, "x = 1", ["assert sum([1, 2]) == 3"], name="sum") == [False], (
        "the program has no such function"
    )


def test_arguments_are_copies(sandbox):
    code = "def f(x):\n    x.append(3)\n    return x"
    assert passed(sandbox, code, ["x = [1]\nassert f(x) == [1, 3] and x == [1]"]) == [True]


def test_as_many_large_values_as_tests_are_read_and_one_that_is_too_large_ends_its_test(sandbox):
    tests = [f"assert f({number}) == {'x' * 60_000!r}" for number in range(6)]
    assert passed(sandbox, "def f(x): return 'x' * 60_000", tests) == [True] * 6
    found = sandbox.run_tests("def f(x): return 'x' * x", ["assert f(1) == 'x'", "f(1_100_000)", "assert f(2) == 'xx'"])
    assert [outcome.reason for outcome in found] == ["ok", "output", "ok"]


def test_the_setup_runs_before_the_tests_where_the_program_does_not(sandbox):
    assert passed(sandbox, "def f(x): return x", ["assert g(4) == 4 and secret == 5"], "g = f\nsecret = 5") == [True]
    assert passed(sandbox, "def f(x): return secret", ["assert f(4) == 5"], "secret = 5") == [False]
    assert passed(sandbox, "class Node:\n    def __init__(s, v): s.v, s.left = v, None\ndef depth(n): return 1 + depth(n.left) if n else 0",
                  ["assert depth(root) == 2"], "root = Node(1)\nroot.left = Node(2)") == [True]  # fmt: skip


def test_the_main_guard_of_a_tested_program_does_not_run(sandbox):
    for guarded in (
        "f = None",
        "import sys; sys.exit(1)",
        "input()",
        "while True: pass",
        "import unittest; unittest.main()",
    ):
        assert passed(sandbox, f"def f(x): return x + 1\nif __name__ == '__main__':\n    {guarded}", TESTS) == [
            True,
            True,
        ]


def test_the_same_program_with_the_same_tests_runs_once():
    pool = SandboxPool(workers=1)
    asked = []
    with pool.one() as only:
        run = only.run_tests
        only.run_tests = lambda *values: asked.append(values[0]) or run(*values)
    first = pool.tested("def f(): return 1", ["assert f() == 1"])
    first.clear()  # what the caller does with its list changes nothing
    assert [outcome.ok for outcome in pool.tested("def f(): return 1", ["assert f() == 1"])] == [True]
    assert pool.run_tests([("def f(): return 1", ["assert f() == 1"], "", "")] * 3)[2][0].ok
    assert len(asked) == 1
    for tests, setup, name in ((["assert f() == 2"], "", ""), (["assert f() == 1"], "x = 1", ""), (["assert f() == 1"] * 2, "", ""), (["assert f() == 1"], "", "f")):  # fmt: skip
        pool.tested("def f(): return 1", tests, setup, name)
    assert len(asked) == 5
    clock = "import time\ndef f(): return time.time()"
    assert all(pool.tested(clock, ["assert f() > 1"])[0].ok for _ in range(2)) and len(asked) == 7
    pool.close()


def test_the_workers_of_a_pool_go_on_after_a_round():
    pool = SandboxPool(workers=2)
    pool.run_tests([(f"x = {n}", ["assert x >= 0"], "", "") for n in range(8)])
    workers = [sandbox.worker for sandbox in pool._all]
    pool.run_tests([(f"x = {n}", ["assert x >= 0"], "", "") for n in range(8, 16)])
    assert all(worker.poll() is None for worker in workers if worker) and any(workers)
    pool.close()


def test_an_outcome_that_depends_on_the_machine_is_not_kept(monkeypatch):
    pool, found = SandboxPool(workers=1), iter(["timeout", "ok"])
    monkeypatch.setattr(Sandbox, "run_tests", lambda *asked: [Outcome(None, next(found))])
    assert [pool.tested("x", ["y"])[0].reason for _ in range(3)] == ["timeout", "ok", "ok"]


def test_the_outcomes_of_the_programs_that_came_last_are_kept(monkeypatch):
    pool, asked = SandboxPool(workers=1), []
    monkeypatch.setattr(Sandbox, "run_tests", lambda sandbox, code, *rest: asked.append(code) or [])
    monkeypatch.setattr("maporl.sandbox.pool.KEPT", 2)
    for code in "abacab":
        pool.tested(code, [])
    assert asked == ["a", "b", "c", "b"]
