"""Tiny functions to write: the questions, what a pupil writes, what the sandbox says of it, and a run that plays them."""

import random
from pathlib import Path

import pytest

from maporl.config.parse import read_yaml
from maporl.tasks import TinyPrograms
from maporl.text import asserts_in, code_of
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

TASK = TinyPrograms()


def test_a_question_shows_values_and_its_hidden_tests_are_about_others():
    example = TASK[0]
    assert (example.id, example.question) == ("4x+5 at 0,1", "f(0)=5,f(1)=9")
    assert example.meta == {
        "entry_point": "f",
        "reference": "def f(x):return 4*x+5",
        "tests": ["assert f(5)==25", "assert f(8)==37", "assert f(9)==41"],
        "setup": "",
        "shown": [[0, 5], [1, 9]],
    }
    for example in TASK:
        shown = {x for x, _ in example.meta["shown"]}
        hidden = {int(test[len("assert f(") : test.index(")")]) for test in example.meta["tests"]}
        assert len(hidden) == 3 and len(shown) == 2 and not hidden & shown


def test_both_splits_have_every_question_once_and_each_option_changes_them():
    ids = {split: [e.id for e in TinyPrograms(split=split)] for split in ("train", "eval")}
    assert (len(ids["train"]), len(ids["eval"])) == (1440, 360)  # 4 * 10 functions with 45 pairs of inputs
    assert len({*ids["train"], *ids["eval"]}) == 1800
    sizes = {"factors": (3, 1080), "terms": (4, 720), "inputs": (6, 672), "shown": (1, 320), "held_out": (0.5, 900)}
    assert {name: len(TinyPrograms(**{name: value})) for name, (value, _) in sizes.items()} == {n: s for n, (_, s) in sizes.items()}  # fmt: skip
    assert len(TinyPrograms(hidden=5)[0].meta["tests"]) == 5
    assert TinyPrograms(seed=1)[0] != TASK[0]
    assert TinyPrograms(instruction="Write {question}!").question(TASK[0]) == "Write f(0)=5,f(1)=9!"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factors": 0}, "factors: expected at least 1, got 0"), ({"terms": -1}, "terms: expected at least 0"),
        ({"shown": 0}, "shown"), ({"hidden": 0}, "hidden"), ({"held_out": 1.0}, "held_out: expected a share"),
        ({"inputs": 3}, "inputs: expected at least 4, because 2 values are shown and 3 others tested, got 3"),
        ({"instruction": "x"}, "instruction: expected the text to contain {question}"),
    ],
)  # fmt: skip
def test_numbers_of_which_no_task_can_be_made(options, message):
    with pytest.raises(ValueError, match=message):
        TinyPrograms(**options)


def test_what_pupils_write_is_as_right_as_they_are():
    rng = random.Random(0)
    examples = [TASK[number] for number in range(0, 400, 20)]
    rights = TASK.grade_many(examples, [TASK.write_reply(e, rng, True, "solver") for e in examples])
    wrongs = TASK.grade_many(examples, [TASK.write_reply(e, rng, False, "solver") for e in examples])
    assert [grade.correct for grade in rights] == [True] * 20
    assert [grade.correct for grade in wrongs] == [False] * 20
    assert code_of(TASK.solution(TASK[0])) == "def f(x):return 4*x+5"
    tests = TASK.write_reply(TASK[0], rng, True, "tester")
    assert asserts_in(tests, "f") == ["assert f(0)==5", "assert f(1)==9"]
    for example in examples:
        asserts = asserts_in(TASK.write_reply(example, rng, False, "tester"), "f")
        right = asserts_in(TASK.write_reply(example, rng, True, "tester"), "f")
        assert len(asserts) == 2 and sum(a != b for a, b in zip(asserts, right, strict=True)) == 1


def test_the_configuration_of_the_page_can_be_checked_and_its_agents_read_what_they_are_shown(tmp_path):
    values = read_yaml(Path("configs/ppo/coder_tester.yaml")) | {"output_dir": str(tmp_path)}
    lines = check_run(from_dict(values))
    assert not [line for line in lines if line.startswith("warning")]
