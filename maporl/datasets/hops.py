"""Who likes whom: questions that a tiny model can answer only by looking facts up, once or several times in a row."""

import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from maporl.tasks.base import Task
from maporl.tasks.lessons import Lessons
from maporl.types import Call, Example, Grade
from trl_ext.ppo.options import Positive, option

LETTERS = "bdgkmprt"
"""A name is two of these letters. Without vowels no name is a word that search engines leave out."""
_NAMES = [a + b for a in LETTERS for b in LETTERS]
_NAME = re.compile(rf"(?<![a-z])[{LETTERS}]{{2}}(?![a-z])")


def names_in(text: str) -> list[str]:
    """Return the names in a text, in order.

    >>> names_in("[2] bd: bd>kr"), names_in("The helper says: mt.")
    (['bd', 'bd', 'kr'], ['mt'])
    """
    return _NAME.findall(text)


@dataclass(frozen=True)
class TinyHops(Lessons, Task):
    """Questions such as ``bd>`` (whom does bd like?) and ``bd>>`` (whom does the one like whom bd likes?).

    Every question has its own ``people``, and its facts are drawn for it alone. So nobody can know them by heart. Each
    fact is a paragraph in ``meta.paragraphs``, with the title ``bd`` and the text ``bd>kr``. The environment ``bm25``
    searches them. Agents are shown the question only. A search for a name finds the person's own paragraph first. The
    answer is the last name in what an agent says.

    For warm starts, the task writes searches (``search``) and calls of other agents (``ask_NAME``), and what the
    ``router`` and the ``searcher`` of the protocol ``route`` say.

    Raises:
        ValueError: there are fewer than 3 people or more than 32, or a number of hops is below 1 or would lead back to
            the person asked about.
    """

    people: Annotated[int, Ge(3), Le(len(_NAMES) // 2)] = option(6, "Number of people of a question.")
    hops: tuple[int, ...] = option(
        (1, 2), "The numbers of facts in a row that questions ask for, which are equally frequent."
    )
    size: Positive = option(4096, "Number of questions of a split.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    name = "tiny_hops"
    answer_form = "<name>"
    roles = frozenset({"router", "searcher"})
    shown_meta = ("paragraphs",)

    def __post_init__(self):
        super().__post_init__()
        if not self.hops or not all(1 <= number < self.people for number in self.hops):
            raise ValueError(f"hops: expected numbers from 1 to {self.people - 1}, below people, got {list(self.hops)}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]

    @cached_property
    def _examples(self) -> list[Example]:
        rng = random.Random(f"{self.split} {self.seed}")
        return [self._drawn(rng, number) for number in range(self.size)]

    def _drawn(self, rng: random.Random, number: int) -> Example:
        circle = rng.sample(_NAMES, self.people)  # each person likes the next one
        hops = self.hops[number % len(self.hops)]
        facts = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
        paragraphs = [{"title": one, "text": f"{one}>{other}"} for one, other in facts.items()]
        rng.shuffle(paragraphs)
        return _example(f"hops-{number}", circle[0], hops, {"paragraphs": paragraphs})

    def grade(self, example: Example, text: str) -> Grade:
        """Right if the last name in ``text`` is the label."""
        names = names_in(text)
        if not names:
            return Grade(None, False, "no name")
        correct = names[-1] == example.answer
        return Grade(names[-1], correct, "equals the label" if correct else "differs from the label")

    def question_key(self, example: Example) -> str:
        """The question, with the facts that a search finds."""
        return f"{example.question} {example.meta['paragraphs']}"

    def solution(self, example: Example) -> str:
        """The name alone."""
        return example.answer

    def part(self, example: Example, asked: str, role: str | None) -> Example:
        """The question that a helper is asked, or the next fact that the searcher of the protocol ``route`` needs."""
        facts = _facts(example.meta)
        if role in self.roles:
            asked_facts = dict(pair for pair in facts.items() if ">".join(pair) in asked)
            name, left = example.meta["start"], example.meta["hops"]
            while left and name in asked_facts:
                name, left = asked_facts[name], left - 1
            return _example(example.id, name, left, example.meta)
        named = [name for name in names_in(asked) if name in facts]
        if not named:
            return example
        return _example(example.id, named[-1], max(1, asked.count(">")), example.meta)

    def write_answer(self, example: Example, rng: random.Random, right: bool) -> str:
        """The label, or another of the people, for warm starts."""
        others = [name for name in _facts(example.meta) if name not in (example.answer, example.meta["start"])]
        return example.answer if right else rng.choice(others)

    def write_reply(self, example: Example, rng: random.Random, right: bool, role: str | None) -> str:
        """What is said in ``role``: a verdict, a query, or an answer in any other role."""
        if role == "router":
            enough = (example.meta["hops"] == 0) == right
            return f"<verify>{'yes' if enough else 'no'}</verify>"
        if role == "searcher":
            return f"<search>{example.meta['start'] if right else rng.choice(list(_facts(example.meta)))}</search>"
        return self.write_answer(example, rng, right)

    def write_calls(
        self, example: Example, tools: Collection[str], made: Sequence[Call] = ()
    ) -> list[tuple[str, dict[str, Any]]]:
        """The next search, or the next question to the first helper: about whom the last call has named."""
        told = [names_in(call.result.text) for call in made if call.result is not None]
        name = example.meta["start"] if not made else told[-1][-1] if told and told[-1] else None
        helpers = sorted(tool for tool in tools if tool.startswith("ask_"))
        if name is None or len(made) >= example.meta["hops"]:
            return []
        if "search" in tools:
            return [("search", {"query": name})]
        return [(helpers[0], {"question": f"{name}>"})] if helpers else []


def _facts(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return whom each person likes."""
    return {one["title"]: one["text"].partition(">")[2] for one in meta["paragraphs"]}


def _example(name: str, start: str, hops: int, meta: dict[str, Any]) -> Example:
    """Return the question that asks for ``hops`` facts in a row, beginning with the person ``start``."""
    facts, answer = _facts(meta), start
    for _ in range(hops):
        answer = facts[answer]
    return Example(name, start + ">" * hops, answer, {**meta, "start": start, "hops": hops})
