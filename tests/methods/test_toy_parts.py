"""The task toy_parts: questions of several parts, each of which asks for a skill."""

import random

import pytest

from maporl import Parts
from maporl.errors import ConfigError
from maporl.tasks import build_task


def rng():
    return random.Random(0)


class TestParts:
    def test_a_question(self):
        task = Parts(skills=("next", "reversed", "previous"), parts=3)
        example = task.part(task[0], "47+36*90-", None)
        assert (example.question, example.answer) == ("47+36*90-", "58 63 89")
        assert example.meta["skills"] == ["next", "reversed", "previous"]

    def test_questions_have_different_numbers_and_splits_their_own(self):
        train, held_out = Parts(), Parts(split="eval")
        assert all(e.question[:2] != e.question[3:5] for e in train)
        assert train[0].question != held_out[0].question and train[0] == Parts()[0] != Parts(seed=1)[0]

    @pytest.mark.parametrize(
        ("text", "right"),
        [("58 63", True), ("58, 63", True), ("63 58", False), ("58", False), ("5863", False), ("", False)],
    )
    def test_all_numbers_count_in_their_order(self, text, right):
        assert Parts().grade(Parts().part(Parts()[0], "47+36*", None), text).correct is right

    def test_a_specialist_knows_one_skill(self):
        task = Parts()
        assert task.write_by_skill(task.part(task[0], "47*", "worker"), "next") == "58"
        wrong = task.write_answer(task.part(task[0], "47+36*", None), rng(), right=False)
        assert wrong != "58 63" and len(wrong) == 5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"skills": ["next", "next"]}, "skills: expected each once"),
            ({"digits": 1}, "digits: expected at least 2, got 1"),
            ({"parts": 10}, "parts: expected at most 9, got 10"),
            ({"size": 0}, "size: expected at least 1, got 0"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            build_task({"name": "toy_parts", **options}, "train", 0)
