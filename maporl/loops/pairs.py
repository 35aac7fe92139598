"""Builders of pairs, for DPO. No torch."""

import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from maporl.errors import RunError
from maporl.loops.builder import Builder, in_order, said, worth
from maporl.loops.rows import Comparison, Pair, Row
from maporl.rounding import exceeds
from maporl.sections import Finite, Positive, section
from maporl.types import Dialogue
from maporl.verifier.encoding import joint_text
from trl_ext.ppo.options import option


@section()
class Siblings(Builder):
    """Pairs of utterances that were sampled after the same words (MALT's data for DPO, arXiv 2412.01928).

    All such pairs of one parent are made, except pairs of equal completions.
    """

    above: Finite = option(
        0.5, "What the value of the chosen one is greater than, and that of the rejected one is not."
    )
    makes = "pairs"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Pair]:
        families: dict[tuple, list[Row]] = defaultdict(list)
        for row, parent in said(dialogues, roles):
            families[(*parent, row.agent)].append(row)
        return [
            Pair(chosen, rejected)
            for family in families.values()
            for chosen in family
            if exceeds(chosen.value, self.above)
            for rejected in family
            if not exceeds(rejected.value, self.above) and differ(chosen, rejected)
        ]


@section()
class Gap(Builder):
    """Pairs of dialogues of one question, of which one is worth more than the other (MADPO's joint answers, CoMLRL).

    The worth of a dialogue is the mean of its utterances' values. A pair of dialogues makes a pair of answers for each
    agent, unless both are equal.
    """

    select: Literal["reward_gap", "random", "first_right", "comparator_reward"] = option(
        "reward_gap",
        "Which pairs are taken. reward_gap: those with the largest difference in worth first. random: any. "
        "first_right: the first dialogue of the best against each that is worth less, in their order, if the best are "
        "worth at least 1 (SWEET-RL). comparator_reward: the k-th dialogue of the first half against the k-th of the "
        "second half, the comparator's; those whose comparator is worth most first, and of equal ones those with the "
        "largest difference (the iterated forms of MADPO and MARLHF).",
    )
    per_question: Positive | None = option(16, "Most pairs of dialogues. None: all.")
    makes = "pairs"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Pair]:
        """Return the pairs.

        Raises:
            RunError: an agent spoke more than once in a dialogue, or was shown something else in another one.
        """
        return [
            Pair(answer, other)
            for _, played, better, worse, _ in self.compared(dialogues)
            for answer, other in _answers(played[better], played[worse], roles)
            if differ(answer, other)
        ]

    def compared(self, dialogues: Sequence[Dialogue]) -> Iterator[tuple[int, list[Dialogue], int, int, float]]:
        """Yield the chosen pairs: the number of the question, its dialogues, the numbers of both in them, and the
        gap."""
        questions: dict[int, list[tuple[Dialogue, float]]] = defaultdict(list)
        for dialogue in in_order(dialogues):
            value = worth(dialogue)
            if value is not None:
                questions[dialogue.prompt].append((dialogue, value))
        for prompt, rated in questions.items():
            played, values = [dialogue for dialogue, _ in rated], [value for _, value in rated]
            for better, worse in self.chosen(values, f"{prompt}/{played[0].example.id}"):
                yield prompt, played, better, worse, values[better] - values[worse]

    def chosen(self, values: Sequence[float], name: str) -> list[tuple[int, int]]:
        """Return the selected pairs of numbers of ``values``, the larger value first. ``name`` decides chance."""
        numbers, half = range(len(values)), len(values) // 2
        if self.select == "first_right":
            best = next((a for a in numbers if not any(exceeds(value, values[a]) for value in values)), 0)
            pairs = [(best, b) for b in numbers if not exceeds(1.0, values[best]) and exceeds(values[best], values[b])]
            return pairs[: self.per_question]
        compared = self.select == "comparator_reward"
        met = [(k, half + k) for k in range(half)] if compared else list(itertools.combinations(numbers, 2))
        pairs = [pair for a, b in met for pair in ((a, b), (b, a)) if exceeds(values[pair[0]], values[pair[1]])]
        if compared:
            gaps = {pair: round(values[pair[0]] - values[pair[1]], 9) for pair in pairs}
            pairs.sort(key=lambda pair: (-round(values[max(pair)], 9), -gaps[pair], min(pair)))
        else:
            pairs.sort(key=lambda pair: (values[pair[1]] - values[pair[0]], pair))
        if self.select == "random":
            random.Random(name).shuffle(pairs)
        return pairs[: self.per_question]


@section()
class Comparisons(Gap):
    """Pairs of whole dialogues of one question, of which one is worth more than the other, for a reward model (MARLHF,
    CoMLRL).

    They are chosen as :class:`Gap` does. A pair of dialogues makes one comparison. Roles are not read.
    """

    makes = "comparisons"  # type: ignore[assignment]  # it is chosen alike, and made into something else

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Comparison]:  # type: ignore[override]
        return [
            Comparison(
                played[better].example,
                joint_text(played[better].utterances),
                joint_text(played[worse].utterances),
                gap,
                (prompt, played[better].rollout, played[worse].rollout),
            )
            for prompt, played, better, worse, gap in self.compared(dialogues)
        ]


def differ(one: Row, other: Row) -> bool:
    """Return whether two rows have different completions.

    Raises:
        RunError: their prompts differ, so they cannot be compared.
    """
    same_prompt(one, other)
    return one.completion_ids != other.completion_ids


def same_prompt(one: Row, other: Row) -> None:
    """Check that two rows were said to the same tokens.

    Raises:
        RunError: they were not.
    """
    if one.prompt_ids != other.prompt_ids:
        raise RunError(
            f"question {one.question!r}: {one.agent} was shown different tokens at {one.place} and {other.place}, so "
            "what was said there makes no pair; pair with the builder siblings, and sample with branching.how: "
            "fork_every"
        )


def _answers(better: Dialogue, worse: Dialogue, roles: Collection[str]) -> list[tuple[Row, Row]]:
    """Return what each agent said in two dialogues, as rows."""
    answers = []
    for dialogue in (better, worse):
        by_agent: dict[str, Row] = {}
        for row, _ in said([dialogue], roles):
            if row.agent in by_agent:
                raise RunError(
                    f"question {row.question!r}: {row.agent} spoke more than once in a dialogue, and the builder gap "
                    "compares single answers; use a protocol in which each agent speaks once, or the builder siblings"
                )
            by_agent[row.agent] = row
        answers.append(by_agent)
    return [(answers[0][agent], answers[1][agent]) for agent in answers[0] if agent in answers[1]]
