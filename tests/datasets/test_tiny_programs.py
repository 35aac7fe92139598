"""Tiny functions to write: the questions, what a pupil writes, what the sandbox says of it, and a run that plays
them."""

import random
from pathlib import Path

import pytest

from maporl.config.parse import read_yaml
from maporl.datasets.tiny_programs import TinyPrograms
from maporl.environments.python import RunTests
from maporl.environments.world import World
from maporl.methods.code import Code
from maporl.playground.teacher import play_teacher
from maporl.protocols import build_protocol
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks import build_task
from maporl.text import asserts_in, code_of
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

TASK = TinyPrograms()


def test_a_question_shows_values_and_its_hidden_tests_are_about_the_next_inputs():
    example = TASK[0]
    assert (example.id, example.question) == ("function 20", "f(0)=19,f(1)=20")
    assert example.meta == {
        "entry_point": "f",
        "reference": "def f(x):return 1*x+19",
        "tests": ["assert f(2)==21", "assert f(3)==22", "assert f(4)==23"],
        "setup": "",
        "hidden_setup": "assert f(0)==19\nassert f(1)==20",
        "tester_question": "f(0)=19,f(1)=20",
        "values": [19, 20],
    }


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("1*x+19", "1 of 1 tests pass"), ("21", "0 of 1 tests pass; AssertionError"), ("19+x*(x<2)", "0 of 1 tests pass; AssertionError"),
        ("19+x*(x>1)", "0 of 1 tests pass; AssertionError"),
    ],
)  # fmt: skip
def test_a_program_has_the_values_that_are_shown_and_those_that_are_not(body, reason):
    task = TinyPrograms(hidden=1, told=0)
    grade = task.grade(task[0], f"```def f(x):return {body}```")
    assert (grade.correct, grade.reason) == (reason == "1 of 1 tests pass", reason)


def test_a_coder_may_be_told_less_than_the_tester():
    for told, question in ((0, "f(0)=?,f(1)=?"), (1, "f(0)=19,f(1)=?"), (2, "f(0)=19,f(1)=20")):
        example = TinyPrograms(told=told)[0]
        assert (example.question, example.meta["tester_question"]) == (question, "f(0)=19,f(1)=20")
        solve, test = next(Code().play(example, ("ann", "bob")))
        assert question in solve.messages[0]["content"] and "f(0)=19,f(1)=20" in test.messages[0]["content"]


def test_each_function_is_in_one_split_and_each_option_changes_the_questions():
    ids = {split: [e.id for e in TinyPrograms(split=split)] for split in ("train", "eval")}
    assert (len(ids["train"]), len(ids["eval"])) == (80, 20)  # 4 * 25 functions
    assert len({*ids["train"], *ids["eval"]}) == 100
    sizes = {"factors": (3, 60), "terms": (9, 32), "held_out": (0.5, 50)}
    assert {name: len(TinyPrograms(**{name: value})) for name, (value, _) in sizes.items()} == {n: s for n, (_, s) in sizes.items()}  # fmt: skip
    everything = [{e.id for e in TinyPrograms(held_out=0, split=split)} for split in ("train", "eval")]
    assert everything == [{*ids["train"], *ids["eval"]}] * 2
    assert TinyPrograms(shown=3)[0].question == "f(0)=19,f(1)=20,f(2)=21"
    assert TinyPrograms(hidden=1)[0].meta["tests"] == ["assert f(2)==21"]
    assert TinyPrograms(seed=1)[0] != TASK[0]
    assert TinyPrograms(instruction="Write {question}!").question(TASK[0]) == "Write f(0)=19,f(1)=20!"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factors": 0}, "factors: expected a whole number of at least 1, got 0"), ({"terms": -1}, "terms: expected a whole number of at least 0"),
        ({"shown": 0}, "shown"), ({"hidden": 0}, "hidden"), ({"held_out": 1.0}, "held_out: expected 0, or a share"), ({"held_out": -0.1}, "held_out"),
        ({"held_out": 0.001}, "functions in both splits"), ({"told": 3}, "told: expected 0 to 2"),
        ({"instruction": "x"}, "instruction: expected the text to contain {question}"),
    ],
)  # fmt: skip
def test_numbers_of_which_no_task_can_be_made(options, message):
    with pytest.raises(ValueError, match=message):
        TinyPrograms(**options)


def test_what_pupils_write_is_as_right_as_they_are():
    rng = random.Random(0)
    examples = [TASK[number] for number in range(0, 80, 4)]
    rights = TASK.grade_many(examples, [TASK.write_reply(e, rng, True, "solver") for e in examples])
    wrongs = TASK.grade_many(examples, [TASK.write_reply(e, rng, False, "solver") for e in examples])
    assert [grade.correct for grade in rights] == [True] * 20
    assert [grade.correct for grade in wrongs] == [False] * 20
    assert code_of(TASK.solution(TASK[0])) == "def f(x):return 1*x+19"
    tests = TASK.write_reply(TASK[0], rng, True, "tester")
    assert asserts_in(tests, "f") == ["assert f(0)==19", "assert f(1)==20"]
    for example in examples:
        asserts = asserts_in(TASK.write_reply(example, rng, False, "tester"), "f")
        right = asserts_in(TASK.write_reply(example, rng, True, "tester"), "f")
        assert len(asserts) == 2 and sum(a != b for a, b in zip(asserts, right, strict=True)) == 1


def test_the_configuration_of_the_page_can_be_checked_and_its_agents_read_what_they_are_shown(tmp_path):
    values = read_yaml(Path("configs/ppo/coder_tester.yaml")) | {"output_dir": str(tmp_path)}
    lines = check_run(from_dict(values))
    held_out = "warning: task tiny_programs: 20 of 20 held-out questions are also training questions"
    assert [line for line in lines if line.startswith("warning") and not line.startswith(held_out)] == []


def test_a_solver_that_gives_in_writes_a_program_that_passes_the_tests_it_is_shown():
    one = TinyPrograms(factors=1, terms=19, shown=1, told=0, held_out=0)
    rng = random.Random(0)
    assert one.write_agreeing(one[0], rng, "assert f(0)==17", "solver") == "```def f(x):return 1*x+17```"
    wide = {TASK.write_agreeing(TASK[0], rng, "assert f(1)==9\nassert f(2)==", "solver") for _ in range(200)}
    assert wide == {f"```def f(x):return {a}*x+{9 - a}```" for a in range(1, 5)}
    assert (
        TASK.write_agreeing(TASK[0], rng, "assert f(0)==5\nassert f(1)==7", "solver") == "```def f(x):return 2*x+5```"
    )
    impossible = {one.write_agreeing(one[0], rng, "assert f(0)==20", "solver") for _ in range(400)}
    assert impossible == {f"```def f(x):return 1*x+{b}```" for b in range(20)}, "any function of the task"
    assert one.write_agreeing(one[0], rng, "assert f(0)==17", "tester") == "assert f(0)==17", "a tester repeats"


@pytest.mark.slow
def test_the_warm_start_of_the_shipped_team_teaches_to_use_tests_and_to_write_wrong_ones():
    config = load("configs/ppo/coder_tester.yaml")
    task = build_task(config.task, "train", config.seed)
    names = ("coder", "tester")
    specs = {name: SpeakerSpec("scripted", (name,)) for name in names}
    (tool,) = RunTests().tools()
    world = World(tools={"run_tests": tool})
    try:
        examples = [task[i % len(task)] for i in range(200)]
        protocol = build_protocol(config.protocol, names)
        played = play_teacher(task, protocol, specs, config.warm_start, random.Random(0), examples, world)
    finally:
        world.close()
    first = [d.utterances[0].rewards["solved"] for d in played]
    tests = [u.rewards["tests"] for d in played for u in d.utterances if u.agent == "tester"]
    later = [(d.utterances[1], d.utterances[2]) for d in played if len(d.utterances) > 2]
    assert not any(first) and 0.23 < sum(tests) / len(tests) < 0.37 and len(later) > 150
    for test, program in later:
        value = int(test.text.partition("==")[2])
        assert program.text == f"```def f(x):return 1*x+{value}```" or value == 20  # no function of the task has 20
