"""Programs of agents: what the sandbox says of them, the tools, MBPP and HumanEval, and the protocol ``code``."""

import json
import re
import textwrap
import threading

import pytest

from maporl.datasets.programs import MBPP, HumanEval, proves_little
from maporl.environments.python import Python, RunTests
from maporl.errors import ConfigError
from maporl.methods.code import Code
from maporl.sandbox.outcomes import Outcome, plain_outcome
from maporl.sandbox.pool import SandboxPool
from maporl.sandbox.sandbox import Limits, Sandbox, find_bubblewrap
from maporl.tasks.base import TaskError
from maporl.text import asserts_in, code_of
from maporl.types import Act, Ask, Example, Result, Utterance

PROBLEMS = "tests/golden/mbpp_20.jsonl"
KINDS = ["restricted", *(["bubblewrap"] if find_bubblewrap()[0] else [])]


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    with Sandbox(Limits(cpu_seconds=1), request.param, cache=False) as made:
        yield made


@pytest.fixture(scope="module")
def mbpp():
    return MBPP(source=PROBLEMS)


# -- what a program says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "printed", "message"),
    [
        ("print('a', 1, sep='-')\nprint(2, end='')", "ok", "a-1\n2", ""),
        ("print(None, [1], sep=None, end=None)", "ok", "None [1]\n", ""),
        ("print(1)\nraise ValueError('bad')", "error:ValueError", "1\n", "ValueError: bad"),
        ("class Own(KeyError): pass\nraise Own(3)", "error:KeyError", "", "Own: 3"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "error:Exception", "", "E"),
        ("import numpy", "error:ModuleNotFoundError", "", "ModuleNotFoundError: No module named 'numpy'"),
        ("def (", "syntax", "", "SyntaxError: invalid syntax (<program>, line 1)"),
        ("import sys\nprint(1)\nsys.stderr.write('two\\n')\nsys.stdout.write('3')", "ok", "1\ntwo\n3", ""),
        ("print(1)\nwhile True: pass", "cpu", "1\n", ""),
        ("print(1)\nimport os; os._exit(0)", "killed", "1\n", ""),
        ("print(__name__)\nif __name__ == '__main__':\n    print('run')", "ok", "__main__\nrun\n", ""),
        ("print(1)\nexit(3)", "error:SystemExit", "1\n", "SystemExit: 3"),
        ("import sys\nsys.exit('no')", "error:SystemExit", "", "SystemExit: no"),
        ("import traceback\ntry: 1 / 0\nexcept ArithmeticError: traceback.print_exc()", "ok", None, ""),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\nif __name__ == "
            "'__main__':\n    unittest.main()",
            "ok",
            None,
            "",
        ),
        (
            "from dataclasses import dataclass\nimport pickle\n@dataclass\nclass P:\n    x: "
            "int\nprint(pickle.loads(pickle.dumps(P(3))))",
            "ok",
            "P(x=3)\n",
            "",
        ),
        ("import sys\nprint(sys.argv, sys.stdin.read())", "ok", "[''] \n", ""),
        (
            "print('\\ud800')",
            "error:UnicodeEncodeError",
            "",
            "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed",
        ),
        ("print('x' * 70_000)", "output", "x" * 4096, ""),
        ("raise ValueError('y' * 9000)", "error:ValueError", "", "ValueError: " + "y" * 4084),
    ],
)
def test_what_a_program_prints_and_its_last_error_line(sandbox, code, reason, printed, message):
    outcome = sandbox.execute(code, "")
    assert (outcome.reason, outcome.message) == (reason, message)
    assert printed is None or outcome.printed == printed


def test_printed_text_cannot_be_a_verdict(sandbox):
    forged = json.dumps({"reason": "ok", "value": 1, "message": ""})
    code = f"print({forged!r})\nprint('\\n' + {forged!r} + '\\n')\nraise KeyError({forged!r})"
    assert sandbox.execute(code, "f").reason == "error:KeyError"
    assert sandbox.execute(code, "f").printed == f"{forged}\n\n{forged}\n\n"
    assert [outcome.reason for outcome in sandbox.run_tests(code, ["assert True"] * 2)] == ["error:KeyError"] * 2


@pytest.mark.parametrize("part", ["printed", "message"])
@pytest.mark.parametrize("said", [3, None, "x" * 4097, "é" * 2049, "\ud800"])
def test_texts_that_no_worker_writes_are_no_outcome(part, said):
    record = {"reason": "ok", "value": 1, "printed": "", "message": ""}
    assert plain_outcome(record) == Outcome(1, "ok")
    assert plain_outcome(record | {part: said}) is None


# -- tools -------------------------------------------------------------------------------------------------------------


def test_the_tool_python():
    box = Python(workers=1)
    (tool,) = box.tools()
    try:
        assert tool.line().startswith("python(code: string): Run a Python program.")
        assert tool.run(code="print(6 * 7)") == Result("42", {"reason": "ok"})
        assert tool.run(code="print(1)\n1 / 0").text == "1\nZeroDivisionError: division by zero"
        assert tool.run(code="x = 1").text == "(nothing was printed)"
        assert tool.run(code=" ") == Result("the code is blank or too long", {"reason": "source"})
        assert tool.run(code="while True: pass").text == "the code took too long"
        text = tool.run(code="open('/etc/passwd')").text
        assert text == "PermissionError: [Errno 1] Operation not permitted: '/etc/passwd'"
    finally:
        box.close()


def test_options_of_the_tools_are_limits():
    (tool,) = Python(memory_mb=64, workers=1).tools()
    assert tool.run(code="len('x' * 10**8)").text == "the code used too much memory"
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        RunTests(workers=0)
    with pytest.raises(ValueError, match=r"Limits\.cpu_seconds: expected at least 1, got 0"):
        Python(cpu_seconds=0)


def test_the_tool_run_tests():
    box = RunTests(workers=1)
    (tool,) = box.tools()
    result = tool.run(code="def f(x): return x", asserts=["assert f(1) == 1", "assert f(1) == 2", "assert f(y) == 4"], setup="y = 3")  # fmt: skip
    assert result.value == {"passed": [True, False, False], "why": ["", "AssertionError", "AssertionError"]}
    assert result.text == "assert f(1) == 2: AssertionError\nassert f(y) == 4: AssertionError"
    assert tool.run(code="def f(): pass", asserts=["assert f"]).text == "all tests pass"
    assert tool.run(code="def f(): pass", asserts=[]).text == "no tests were given"
    box.close()


def test_threads_share_a_pool_and_get_their_own_outcomes():
    pool, found = SandboxPool(workers=2), {}

    def run(number):
        with pool.one() as sandbox:
            found[number] = sandbox.execute(f"print({number})", "").printed

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert found == {number: f"{number}\n" for number in range(8)}


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_right_wrong_and_hanging_programs_on_real_problems(mbpp):
    assert (len(mbpp), mbpp.dropped) == (20, {})
    assert (
        mbpp.remark()
        == "mbpp: train: 20 rows, 0 left out by how their reference solutions end in the sandbox, or for their tests (none)"
    )
    examples = list(mbpp)
    rights = mbpp.grade_many(examples, [mbpp.solution(example) for example in examples])
    wrongs = mbpp.grade_many(examples, [mbpp.write_answer(example, None, False) for example in examples])
    hanging = [
        f"```python\ndef {example.meta['entry_point']}(*args):\n    while True: pass\n```" for example in examples[:2]
    ]
    hangs = mbpp.grade_many(examples[:2], hanging)
    assert [grade.correct for grade in rights] == [True] * 20
    assert [grade.correct for grade in wrongs + hangs] == [False] * 22
    assert rights[0].reason == "2 of 2 tests pass" and wrongs[1].reason == "0 of 2 tests pass; NotImplementedError"
    assert mbpp.grade(examples[0], "no program").reason == "no fenced block"


def test_an_mbpp_question_shows_one_test_and_hides_the_others(mbpp):
    example = mbpp[1]
    assert example.id == "mbpp-train-0602" and example.meta["entry_point"] == "first_repeated_char"
    assert 'assert first_repeated_char("abcabc") == "a"' in mbpp.question(example)
    assert example.meta["tests"] == [
        'assert first_repeated_char("abc") == "None"', 'assert first_repeated_char("123123") == "1"',
    ]  # fmt: skip
    assert not any(test in mbpp.question(example) for test in example.meta["tests"])
    assert mbpp.write_reply(example, None, False, "tester") == "assert first_repeated_char is None"
    assert len(MBPP(source=PROBLEMS, limit=3)) == 3
    with pytest.raises(TaskError, match="is one file and has no test split"):
        len(MBPP(source=PROBLEMS, split="eval"))
    assert len(MBPP(source="hub", eval_source=PROBLEMS, split="eval")) == 20


def write_rows(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_whose_reference_the_sandbox_refuses_are_left_out_and_counted(tmp_path):
    good = {"text": "Double x.", "code": "def f(x):\n    return 2 * x", "test_list": ["assert f(1) == 2", "assert f(2) < 4 + one", "assert f(3) == 6"], "test_setup_code": "one = 1"}  # fmt: skip
    path = write_rows(
        tmp_path, good, good | {"code": "import numpy\ndef f(x): return 1"}, good | {"code": "def f(x): return 3"}
    )
    task = MBPP(source=path)
    assert (len(task), task.dropped) == (1, {"error:ModuleNotFoundError": 1, "error:AssertionError": 1})
    assert "1 rows, 2 left out" in task.remark() and task.in_process == []
    alone = r"none of 1 rows can be taken, by how .* or for their tests \(error:AssertionError 1\); look at the data"
    with pytest.raises(TaskError, match=alone):
        len(MBPP(source=write_rows(tmp_path, good | {"code": "def f(x): return 3"})))
    with pytest.raises(TaskError, match="row 1 has test_list=\\[\\], expected a list of two tests or more"):
        len(MBPP(source=write_rows(tmp_path, good | {"test_list": []})))
    with pytest.raises(TaskError, match="calls no function of its code"):
        len(MBPP(source=write_rows(tmp_path, good | {"test_list": ["assert g()", "assert f()"]})))


def test_humaneval_splits_its_one_split_and_takes_each_assert_of_check(tmp_path):
    row = {"prompt": "def twice(x):\n", "canonical_solution": "    return 2 * x\n", "entry_point": "twice"}
    simple = (
        "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n    assert True, "
        "'printed'\n"
    )
    loop = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x + x\n"
    path = write_rows(tmp_path, row | {"test": simple}, row | {"test": loop})
    train, held_out = HumanEval(source=path, held_out=1), HumanEval(source=path, held_out=1, split="eval")
    assert train[0].meta["tests"] == ["assert twice(1) == 2", "assert twice(2) == 4"]
    assert held_out[0].meta["tests"] == [
        "def loop():\n    for x in range(3):\n        assert twice(x) == x + x\nloop()"
    ]
    half = "```python\ndef twice(x):\n    return 2\n```"
    assert train.grade(train[0], half).reason == "1 of 2 tests pass; AssertionError"
    assert held_out.grade(held_out[0], held_out.solution(held_out[0])).correct is True
    with pytest.raises(TaskError, match="held_out=2"):
        len(HumanEval(source=path, held_out=2))
    with pytest.raises(ValueError, match="held_out: expected a whole number of at least 1, got 0"):
        HumanEval(held_out=0)


REFERENCE = "def helper(x):\n    return x + 1\n\ndef twice(x):\n    return 2 * x\n"
CHECKS = {
    "asserts": ("    assert candidate(1) == 2\n    assert not candidate(0), 'no'\n    assert True\n", ["assert twice(1) == 2", "assert not twice(0), 'no'"], ""),
    "prepared": (
        "    'Checks.'\n    import math\n    assert candidate(1) == 2\n    big = 10 ** 3\n    print\n    assert "
        "math.isclose(candidate(big), 2 * big)\n",
        ["assert twice(1) == 2", "assert math.isclose(twice(big), 2 * big)"], "import math\nbig = 10 ** 3",
    ),
    "loop": (
        "    for str in ['a', 'b']:\n        assert candidate(str) == str + str\n    assert str(candidate(1)) == '2'\n",
        ["def loop():\n    for str in ['a', 'b']:\n        assert twice(str) == str + str\nloop()", "assert str(twice(1)) == '2'"], "",
    ),
    "itself": ("    assert candidate(3) == twice(3)\n", ["assert twice(3) == reference_twice(3)"],
               "def helper(x):\n    return x + 1\n\ndef reference_twice(x):\n    return 2 * x"),
    "helper": ("    assert candidate(3) == helper(5)\n", ["assert twice(3) == helper(5)"], "def helper(x):\n    return x + 1"),
    "whole": (
        "    x = candidate(2)\n    assert x == 4\n    assert candidate(x) == 8\n",
        ["def check(candidate):\n    x = candidate(2)\n    assert x == 4\n    assert candidate(x) == 8\ncheck(twice)"], "",
    ),
    "bound twice": (
        "    x = 1\n    assert candidate(x) == 2\n    x = 2\n    assert candidate(x) == 4\n",
        ["def check(candidate):\n    x = 1\n    assert candidate(x) == 2\n    x = 2\n    assert candidate(x) == 4\ncheck(twice)"], "",
    ),
    "raises": (
        "    try:\n        candidate(None)\n        assert False\n    except TypeError:\n        pass\n    assert "
        "candidate(4) == 8\n",
        ["def check(candidate):\n    try:\n        candidate(None)\n        assert False\n    except TypeError:\n        pass\n    assert candidate(4) == 8\ncheck(twice)"], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "tests", "setup"), CHECKS.values(), ids=CHECKS)
def test_the_check_of_humaneval_becomes_calls(body, tests, setup):
    row = {
        "prompt": REFERENCE.partition("    return 2")[0],
        "canonical_solution": "    return 2 * x\n",
        "entry_point": "twice",
    }
    example = HumanEval._example(row | {"test": f"def check(candidate):\n{body}"}, 0)
    assert (example.meta["tests"], example.meta["hidden_setup"]) == (tests, setup)
    with Sandbox(cache=False) as box:
        asked = tests, setup, "twice"
        reference = example.meta["reference"].replace("2 * x", "x + x")  # fails for None
        assert all(outcome.ok for outcome in box.run_tests(reference, *asked))
        cheat = (
            "table = []\nclass Probe:\n    def __init__(self, args): self.args = args\n    def __eq__(self, other):\n "
            "       table.append((self.args, other))\n        return True\n    __ne__ = __lt__ = __eq__\ndef "
            "twice(*args):\n    for name in ('check', 'loop'):\n        if not table and name in globals(): "
            "globals()[name](lambda *a: Probe(a))\n    for known, answer in table:\n        if known == args: return "
            "answer\n    return Probe(args)\n"
        )
        assert not any(outcome.ok for outcome in box.run_tests(cheat, *asked))


def test_checks_that_test_nothing_are_named():
    row = {"prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f"}
    for test, message in (
        ("def check(candidate):\n    assert True\n", "tests nothing"), ("def check():\n    pass\n", r"does not define check\(candidate\)"),
        ("def check(candidate:\n", "a test that is not Python"), ("x = 1", r"defines check\(candidate\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            HumanEval._example(row | {"test": test}, 0)


def test_tests_that_only_run_in_the_programs_process_are_left_out_listed_and_taken_if_asked_for(tmp_path, caplog):
    changes = {"text": "Sort a list in place.", "code": "def f(x):\n    x.sort()", "test_list": ["assert f([]) is None", "x = [2, 1]\nf(x)\nassert x == [1, 2]", "x = [3]\nf(x)\nassert x == [3]"], "id": "in-place"}  # fmt: skip
    calls = {"text": "Call a function.", "code": "def g(h):\n    return h(1)", "test_list": ["assert g(int) == 1", "assert g(lambda x: x + 1) == 2", "assert g(lambda x: x + 2) == 3"], "id": "callback"}  # fmt: skip
    plain = {"text": "Add one.", "code": "def h(x):\n    return x + 1", "test_list": ["assert h(1) == 2", "assert h(2) == 3", "assert h(3) == 4"], "id": "plain"}  # fmt: skip
    path = write_rows(tmp_path, changes, plain, calls)
    task = MBPP(source=path)
    assert ([example.id for example in task], task.dropped, task.in_process) == (["plain"], {"in_process": 2}, ["in-place", "callback"])  # fmt: skip
    said = "tests of 2 rows can only run in the program's own process, and these rows are left out; task.in_process_tests=true takes them (in-place, callback)"  # fmt: skip
    assert task.remark().endswith(f"(in_process 2); {said}") and f"mbpp: train: {said}" in caplog.messages
    taken = MBPP(source=path, in_process_tests=True)
    assert ([example.id for example in taken], taken.dropped) == (["in-place", "plain", "callback"], {})
    assert "where a program can pass them without solving anything, and do so (in-place, callback)" in taken.remark()
    assert [taken.grade(example, taken.solution(example)).correct for example in taken] == [True] * 3
    assert [taken.grade(example, taken.write_answer(example, None, False)).correct for example in taken] == [False] * 3
    forged = 'import os\nos.write(3, b\'{"reason": "ok", "value": null, "message": ""}\\n\' * 3)\nos._exit(0)\ndef NAME(x): pass'
    grades = [taken.grade(e, f"```python\n{forged.replace('NAME', e.meta['entry_point'])}\n```") for e in taken]
    assert [grade.correct for grade in grades] == [True, False, True], "which is why they are left out"
    alone = MBPP(source=write_rows(tmp_path, changes))
    with pytest.raises(
        TaskError,
        match=r"in_process 1\); tests of 1 rows .* task\.in_process_tests=true takes them \(in-place\)$",
    ):
        len(alone)


LARGE = {"text": "Is x large?", "code": "def f(x):\n    return x > 2", "id": "large"}
LARGE["test_list"] = ["assert f(1) == False", "assert f(3) == True", "assert f(4) == True"]
"""A row whose hidden tests a constant passes, but not the test that its question shows."""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x > 2", "2 of 2 tests pass"), ("True", "0 of 2 tests pass; AssertionError"), ("False", "0 of 2 tests pass; AssertionError"),
        ("x == 3", "1 of 2 tests pass; AssertionError"), ("{1: 0}[x]", "0 of 2 tests pass; KeyError: 3"),
        ("x != 1", "2 of 2 tests pass"),  # a table of what is shown: why such rows are left out
    ],
)  # fmt: skip
def test_a_right_program_passes_the_shown_test_too_and_to_pass_it_alone_is_worth_nothing(tmp_path, body, reason):
    task = MBPP(source=write_rows(tmp_path, LARGE), weak_tests=True)
    code = f"def f(x): return {body}"
    grade = task.grade(task[0], f"```python\n{code}\n```")
    assert (grade.correct, grade.reason) == (reason == "2 of 2 tests pass", reason)
    box = RunTests(workers=1)
    try:
        play = Code().play(task[0], ("ann", "bob"))
        next(play)
        program = said(0, "ann", f"```python\n{code}\n```")
        (act,) = play.send([program, said(1, "bob", "assert f(1) == 0")])
        play.send([box.tools()[0].run(**act.arguments)])
    finally:
        box.close()
    assert program.rewards["solved"] == int(reason[0]) / 2


PAID = [
    # one value for all that is not shown
    (["f(3) == True", "f(4) == True"], True), (["f(3) == True", "f(4) == False"], False), (["f(3) == 2", "f(4) == 2.0"], True),
    (["f(3) == {1: 2, 3: 4}", "f(5) == {3: 4, 1: 2}"], True), (["f(3) == [2]", "f(4) == (2,)"], False), (["f(3) == 'a'", 'f(4) == "a"'], True),
    (["abs(f(3) - 0.5) < 0.1", "abs(f(4) - 0.5) < 0.1"], True), (["abs(f(3) - 0.5) < 0.1", "abs(f(4) - 1.5) < 0.1"], False),
    (["f(3)", "f(4)"], True), (["f(3)", "not f(4)"], False), (["f(3) is None", "f(4) is None, 'why'"], True), (["set(f(3)) == {1}", "set(f(4)) == {1}"], True),
    (["f(3) == g(1)", "f(4) == g(1)"], True), (["f(3) == g(1)", "f(4) == g(2)"], False), (["f(3) == 6"], True),
    # what is shown, however it is written, is known
    (["f(1, 'a') == 2", "f(3) == 6"], True), (["f( 1,\"a\" ) == 2", "f(3) == 6", "f(4) == 6"], True), (["f(1, 'a') == 2", "f(3) == 6", "f(4) == 8"], False),
    # the first argument
    (["f(3) == 3", "f([4], 5) == [4]"], True), (["f(3) == 3", "f(4, 5) == 5"], False), (["f(3) == 3", "f() == 4"], False),
    # other forms
    (["f(3) == f(4)"], False), (["f(f(3)) == 3", "f(f(4)) == 3"], False), (["callable(f)", "callable(f)"], False), (["f(", "f("], False),
    (["x(3) == 3\nassert f(3) == 3"], False), (["f(" + "-" * 5000 + "1) == 3"], False),
]  # fmt: skip


@pytest.mark.parametrize(("tests", "little"), PAID)
def test_tests_that_a_program_passes_which_computes_nothing(tests, little):
    meta = {"entry_point": "f", "tests": [f"assert {test}" for test in tests]}
    assert proves_little(Example("e", "Do it.\n>>> f(1, 'a')\n2", "", meta)) is little


def test_rows_with_weak_tests_are_told_and_not_trained_on_unless_asked_for(tmp_path, caplog):
    same = {"text": "The same.", "code": "def g(x):\n    return x", "id": "same"}
    same["test_list"] = ["assert g(1) == 1", "assert g([2]) == [2]", "assert g(3) == 3"]
    plain = {"text": "Add one.", "code": "def h(x):\n    return x + 1", "id": "plain"}
    plain["test_list"] = ["assert h(1) == 2", "assert h(2) == 3", "assert h(3) == 4"]
    path = write_rows(tmp_path, LARGE, plain, same)
    ids, left = ["large", "same"], "these rows are left out; task.weak_tests=true takes them (large, same)"
    for options, taken, said in (
        ({}, ["plain"], left), ({"weak_tests": True}, ["large", "plain", "same"], "these rows are taken (large, same)"),
        ({"split": "eval", "eval_source": path}, ["large", "plain", "same"], "these rows are taken (large, same)"),
    ):  # fmt: skip
        caplog.clear()
        task = MBPP(source=path, **options)
        assert ([example.id for example in task], task.weak) == (taken, ids)
        assert task.dropped == ({"weak": 2} if len(taken) == 1 else {})
        said = f"tests of 2 rows prove little: what the question shows passes them, with one value or the first argument for all else, and {said}"  # fmt: skip
        assert task.remark().endswith(f"; {said}") and f"mbpp: {task.split}: {said}" in caplog.messages
    with pytest.raises(TaskError, match=r"none of 1 rows .*\(weak 1\); .*task\.weak_tests=true takes them \(large\)$"):
        len(MBPP(source=write_rows(tmp_path, LARGE)))
    row = {"prompt": 'def f(x):\n    """f(1) == 2"""\n', "canonical_solution": "    return 2\n", "entry_point": "f"}
    row["test"] = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 2\n"
    path = write_rows(tmp_path, row, row | {"test": row["test"].replace("(2) == 2", "(2) == candidate(3)")}, row)
    train, held_out = HumanEval(source=path, held_out=1), HumanEval(source=path, held_out=1, split="eval")
    assert ([e.id for e in train], train.weak) == (["humaneval-1"], ["humaneval-0"])
    assert ([e.id for e in held_out], held_out.weak) == (["humaneval-0"], ["humaneval-0"])


FORMS = {
    "an example block": "```python\n{code}```\nExample usage:\n```python\nprint({name}(1))\n```\n",
    "an output block": "```python\n{code}```\nIt prints:\n```\n3\n```\n",
    "unmarked, an example that is marked": "```\n{code}```\nUse it so:\n```python\nassert {name}\n```",
    "in a list": "1. The function:\n\n{indented}\n2. Done.",
    "after thinking": "<think>\n```python\ndef {name}(*a): pass\n```\n</think>\n```python\n{code}```",
    "a draft before": "```python\ndef {name}(*a):\n    return 0\n```\nBetter:\n```python\n{code}```\n",
    "a main guard": "```python\n{code}\nif __name__ == '__main__':\n    print({name}(int(input())))\n```",
    "tildes": "~~~python\n{code}~~~\n",
    "the fence of the prompt": "{code}```\nFor example:\n```python\n{name}(1)\n```",
    "Pandoc's mark": "```{.python}\n{code}```\n",
    "a byte order mark": "```python\n\ufeff{code}```\n",
    "no-break spaces": "```python\n{nbsp}```\n",
    "a quotation": "He said:\n{quoted}\nIndeed.",
    "a quotation in one": "{quoted twice}",
    "cut off after its end": "Here:\n```python\n{code}",
    "ended in good order": "```python\nimport sys\n{code}\nsys.exit(0)\n```\n",
    "an example in a docstring": '```python\n{code}\ndef other():\n    """For example:\n\n    ```python\n    >>> other()\n    ```\n    """\n```\nIt works.',
    "fences in a text": "```python\n{code}\nNOTE = '''see ``` there'''\n```\n### Tests\n```python\nassert True\n```",
}


def test_a_right_program_passes_however_it_stands_in_an_answer(mbpp):
    examples = list(mbpp)
    for form in FORMS.values():
        texts = []
        for example in examples:
            code = example.meta["reference"].rstrip().expandtabs(4) + "\n"
            fenced = f"```python\n{code}```"
            indented = "".join(f"    {line}\n" for line in fenced.splitlines())
            texts.append(
                form.replace("{code}", code)
                .replace("{indented}", indented)
                .replace("{nbsp}", re.sub("^ +", lambda blanks: "\xa0" * len(blanks[0]), code, flags=re.MULTILINE))
                .replace("{quoted}", textwrap.indent(fenced, "> "))
                .replace("{quoted twice}", textwrap.indent(fenced, "> > "))
                .replace("{name}", example.meta["entry_point"])
            )
        grades = mbpp.grade_many(examples, texts)
        assert [grade.correct for grade in grades] == [True] * 20, form


USES = "def f(x):\n    return close(x, math.pi)\n"
CLOSE = "def close(a, b):\n    return abs(a - b) < EPS\n"


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        (["import math", CLOSE, "EPS = 1", USES], f"import math\n\n{CLOSE}\nEPS = 1\n\n{USES}"),
        (["EPS = 1", CLOSE, "import math", USES, "print(f(1))"], f"EPS = 1\n\n{CLOSE}\nimport math\n\n{USES}"),
        (["from math import pi", "def f(x): return pi"], "from math import pi\n\ndef f(x): return pi\n"),
        (["pi = 4", "pi = 3", "def f(x): return pi"], "pi = 3\n\ndef f(x): return pi\n"),
        (["class A: pass", "def f(x: 'A') -> 3: return 1"], "def f(x: 'A') -> 3: return 1\n"),
        (["g = 1", "x = 1", "def f(x):\n    g = x\n    return len([g for y in x])"], "def f(x):\n    g = x\n    return len([g for y in x])\n"),
        (["pip install math", "math = ", "def f(x): return math"], "def f(x): return math\n"),
        (["max = 1", "def f(x): return max(x)"], "def f(x): return max(x)\n"),
        (["def f(x): return g(x)", "def g(x): return x"], "def f(x): return g(x)\n"),
        (["n = 0", "def f(x):\n    global n\n    n += x\n    return n"], "def f(x):\n    global n\n    n += x\n    return n\n"),
        (["def f(x): return y", "def f(x): return ("], "def f(x): return (\n"),
    ],
)  # fmt: skip
def test_earlier_blocks_that_a_program_needs_are_part_of_it(blocks, code):
    for between in ("", "Then:\n"):
        assert code_of(between.join(f"```python\n{block.rstrip()}\n```\n" for block in blocks), "f") == code
    assert code_of("".join(f"```\n{block.rstrip()}\n```\nThen:\n" for block in blocks), "f") == code
    assert code_of("".join(f"```python\n{block.rstrip()}\n```\n" for block in blocks)) == blocks[-1].rstrip() + "\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\ndef f(x):\n    return x", "def f(x):\n    return x"), ("```python\ndef f(x):\n    return (x", ""),
        ("```python\ndef f(x):\n    if", ""), ("```python\ndef g(x):\n    return x", ""), ("def f(x): return x", ""),
        ("```py\nimport math\n```\n```py\ndef f(x): return math", "import math\n\ndef f(x): return math"),
        ("```python\ndef f(x): return 1\n```\n```python\ndef f(x): return 2", "def f(x): return 1\n"),
        ("<think>```python\ndef f(x): return x", ""), ("<think>```python\ndef f(x): return x\n```</think> That is it.", ""), ("> ```python\n> def f(x):\n>     return x\n> ```", "def f(x):\n    return x\n"),
        ("```python\ndef f(x):\n    return '\xa0'\n```", "def f(x):\n    return '\xa0'\n"), ("```{ .py }\ndef f(x): return\n```", "def f(x): return\n"),
        ("```python\n>>> f(1)\n```\n> no code\n```python\ndef f(x): return 1 > 2\n```", "def f(x): return 1 > 2\n"),
    ],
)  # fmt: skip
def test_a_program_is_found_in_a_quotation_and_where_it_is_cut_off(text, code):
    assert code_of(text, "f") == code


@pytest.mark.parametrize(
    "part",
    ["(", "-", "not ", "lambda: ", "f(", "f'{", "[0 for x in ", "if 1:\n ", "> ", ">", "\xa0", "{", "```{", "```py\n", "a.", "x=", "class A:", "\x00", "1 if 1 else "],
)  # fmt: skip
def test_no_text_ends_the_search_for_a_program(part):
    deep = part * (40_000 // len(part))
    for text in (f"```python\ng = 1\n```\n```python\ndef f(x): return g\ny = {deep}", deep, f"{deep}```python\nx\n```"):
        for end in ("", "\n```"):
            assert isinstance(code_of(text + end, "f"), str)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"), ("```\nx = 1\n```", "x = 1\n"), ("a ```x = 1``` b", "x = 1"), ("x = 1", ""),
        ("```python\nx = 1\n``` and ```py\nx = 2\n```", "x = 2\n"), ("```python\nx = 1\n``` and ```py\nx = 2", "x = 1\n"), ("```python\nx", ""),
        ("x = 0\n```\nHere it is again:\n```python\nx = 1\n```", "x = 1\n"), ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```json\n1\n```", "```json\n1\n"[3:]), ("```Python3 \nx = 1\n```", "x = 1\n"),
    ],
)  # fmt: skip
def test_code_is_the_last_fenced_block(text, code):
    assert code_of(text) == code


def test_tests_are_lines_with_assert_that_name_the_function():
    text = "```python\n  assert f(1) == 2\nassert g(f2) == 1\nasserted f\nprint(f)\n# assert f(1)\nassert not f(3)\n```"
    assert asserts_in(text, "f") == ["assert f(1) == 2", "assert not f(3)"]


# -- the protocol ------------------------------------------------------------------------------------------------------

META = {
    "entry_point": "f",
    "reference": "def f(x):\n    return x + 1",
    "tests": ["assert f(1) == 2", "assert f(2) == 3"],
    "setup": "",
}
EXAMPLE = Example("e", "Add one.", META["reference"], META)
RIGHT, WRONG = "```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return 2\n```"


def said(number, agent, text):
    return Utterance(number, agent, "p", 0, 0, [], text)


def passed(*values):
    return Result(
        "\n".join(f"assert {i}: no" for i, v in enumerate(values) if not v), {"passed": list(values), "why": []}
    )


def test_a_round_by_hand():
    play = Code(rounds=2).play(EXAMPLE, ("ann", "bob"))
    solve, test = next(play)
    assert (solve.agent, solve.role, solve.answers, test.agent, test.role, test.answers) == ("ann", "solver", True, "bob", "tester", False)  # fmt: skip
    program, tests = said(0, "ann", WRONG), said(1, "bob", "assert f(1) == 2\nassert f(3) == 9")
    (hidden,) = play.send([program, tests])
    assert (hidden.agent, hidden.arguments["asserts"], hidden.of) == ("ann", META["tests"], 0)
    shown, reference = play.send([passed(True, False)])
    assert shown == Act("ann", "run_tests", {"code": "def f(x):\n    return 2\n", "asserts": ["assert f(1) == 2", "assert f(3) == 9"], "setup": "", "name": "f"}, of=0)  # fmt: skip
    assert (reference.agent, reference.arguments["code"], reference.of) == ("bob", META["reference"], 1)
    asks = play.send([passed(True, False), passed(True, False)])
    assert program.rewards == {"solved": 0.5, "team": 0.5, "agree": 0.5}
    assert tests.rewards == {"tests": 0.5, "team": 0.5, "agree": 0.5}
    assert all(
        isinstance(ask, Ask) and ask.parents == (0, 1) and "assert 1: no" in ask.messages[0]["content"] for ask in asks
    )
    play.send([said(2, "ann", RIGHT), said(3, "bob", "nothing")])
    play.send([passed(True, True)])
    with pytest.raises(StopIteration) as end:
        play.send([passed(), passed()])
    assert end.value.value is None


def test_at_most_three_failures_are_shown_and_nothing_of_the_hidden_tests():
    play = Code().play(EXAMPLE, ("ann", "bob"))
    next(play)
    play.send([said(0, "ann", WRONG), said(1, "bob", "assert f(3) == 4")])
    play.send([passed(False, False)])
    asks = play.send([passed(*[False] * 5), passed(True)])
    shown = asks[0].messages[0]["content"]
    assert [f"assert {i}: no" in shown for i in range(5)] == [True, True, True, False, False]
    assert not any(test in ask.messages[0]["content"] for test in META["tests"] for ask in asks)


def test_in_turns_the_tester_sees_the_program():
    play = Code(order="turns", tester="ann").play(EXAMPLE, ("ann", "bob"))
    (solve,) = next(play)
    program = said(0, "bob", WRONG)
    play.send([program])
    (test,) = play.send([passed(True, False)])
    assert program.rewards == {"solved": 0.5, "team": 0.5}  # so that programs can be compared before anybody tests them
    assert (solve.agent, test.agent, test.parents) == ("bob", "ann", (0,))
    assert "return 2" in test.messages[0]["content"]


def test_tests_that_were_not_run_are_never_worth_nothing():
    play = Code().play(EXAMPLE, ("ann", "bob"))
    next(play)
    play.send([said(0, "ann", WRONG), said(1, "bob", "assert f(3) == 4")])
    with pytest.raises(ConfigError, match=r"run_tests failed \(timeout: too slow\)"):
        play.send([Result("too slow", error="timeout")])
    with pytest.raises(ConfigError, match="question e has no entry_point; use a task of programs"):
        next(Code().play(Example("e", "2+2", "4"), ("ann", "bob")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds: expected a whole number of at least 1"), ({"order": "both"}, "order"), ({"solve": "x"}, "solve"),
        ({"test": "{what}"}, "test"), ({"disagree": "no"}, "disagree"),
    ],
)  # fmt: skip
def test_options_of_the_protocol_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Code(**options)
