"""What a task teaches in a warm start that only defines some of the names of Lessons."""

import random

from maporl import Example, Grade, Mixture, Task
from maporl.tasks.lessons import lessons_of

SUM = Example("1+2", "1+2=", "3")


class Plain(Task):
    """A task of real data: it teaches nothing."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return SUM

    def grade(self, example, text):
        return Grade(text, text == example.answer, "")


class Answering(Plain):
    """A task of a user's own, which defines one of the names and a role."""

    roles = frozenset({"planner"})

    def write_answer(self, example, rng, right):
        return example.answer if right else "0"


def test_what_a_task_of_your_own_defines_is_taken_and_of_the_rest_the_default():
    lessons, rng = lessons_of(Answering()), random.Random(0)
    assert [lessons.write_answer(SUM, rng, right) for right in (True, False)] == ["3", "0"]
    assert lessons.write_reply(SUM, rng, True, "critic") == "3", "the default is an answer in every role"
    assert lessons.write_agreeing(SUM, rng, "words", None) == "words"
    assert (lessons.write_calls(SUM, ["add"]), lessons.part(SUM, "?", None), lessons.skills) == ((), SUM, ())
    assert lessons.roles == {"planner"}


def test_a_mixture_teaches_what_its_parts_define(monkeypatch):
    monkeypatch.setattr("maporl.tasks.mixture.build_task", lambda section, *rest: Answering())
    mixture = Mixture({"one": {}, "two": {}})
    example, rng = mixture[0], random.Random(0)
    assert (mixture.write_reply(example, rng, True, None), mixture.write_answer(example, rng, False)) == ("3", "0")
    assert mixture.roles == {"planner"} and mixture.write_calls(example, ["add"]) == ()
