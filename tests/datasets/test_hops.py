"""The task tiny_hops: its facts, its questions, and what a pupil writes."""

import random
from collections import Counter

import pytest

from maporl import TinyHops
from maporl.datasets.hops import names_in
from maporl.datasets.search import QuestionSearch
from maporl.errors import ConfigError
from maporl.tasks import build_task


def rng():
    return random.Random(0)


class TestWhoLikesWhom:
    def test_a_question_of_two_facts(self):
        example = TinyHops(people=4)[1]
        facts = {one["title"]: one["text"] for one in example.meta["paragraphs"]}
        start, end = example.question[:2], example.answer
        assert example.question == f"{start}>>" and len(facts) == 4
        assert facts[facts[start].removeprefix(f"{start}>")].endswith(f">{end}")

    def test_facts_differ_from_question_to_question_and_splits_have_their_own(self):
        train, held_out = TinyHops(), TinyHops(split="eval")
        likes = {(p["title"], p["text"]) for e in train for p in e.meta["paragraphs"]}
        assert len(train) == len(held_out) == 4096
        assert len({title for title, _ in likes}) == 64 and len(likes) > 4000, "nearly all of 64 x 63 pairs"
        assert len({(e.question, str(e.meta["paragraphs"])) for e in [*train, *held_out]}) == 8192
        assert train[0] == TinyHops()[0] and train[0] != TinyHops(seed=1)[0]

    def test_hops_are_equally_frequent(self):
        assert Counter(e.question.count(">") for e in TinyHops(hops=(1, 3), size=100)) == {1: 50, 3: 50}

    def test_nobody_is_the_answer_to_a_question_about_themselves(self):
        assert all(e.answer != e.question[:2] for e in TinyHops(people=3))

    @pytest.mark.parametrize(
        ("text", "answer", "right"),
        [
            ("kr", "kr", True),
            ("It is kr.", "kr", True),
            ("kr, no: bd", "bd", False),
            ("krs", None, False),
            ("", None, False),
        ],
    )
    def test_the_last_name_is_the_answer(self, text, answer, right):
        from maporl.types import Example

        grade = TinyHops().grade(Example("e", "bd>", "kr"), text)
        assert (grade.answer, grade.correct) == (answer, right)

    def test_a_search_for_a_name_finds_the_own_paragraph_first(self):
        pytest.importorskip("bm25s", reason="needs the extra search")
        for example in TinyHops(size=50):
            library = QuestionSearch(k=1)
            library.reset(0, example.meta)
            (tool,) = library.tools("ann")
            start = example.question[:2]
            assert names_in(tool.run(query=start).text)[:2] == [start, start]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"people": 2}, "people: expected at least 3, got 2"),
            ({"hops": [6]}, r"hops: expected numbers from 1 to 5, below people, got \[6\]"),
            ({"hops": []}, "hops: expected numbers from 1 to 5"),
            ({"size": 0}, "size: expected at least 1, got 0"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            build_task({"name": "tiny_hops", **options}, "train", 0)
