"""Builders for critics of turns, and for what is ranked by them (SWEET-RL, arXiv 2503.15478). No torch."""

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from maporl.config.schema import Config
from maporl.errors import Fault
from maporl.loops.builder import Builder, said
from maporl.loops.pairs import Gap
from maporl.loops.rows import Pair, Row, TrajectoryPair
from maporl.loops.section import RowsStage
from maporl.rounding import ROUNDING
from maporl.sections import Positive, PositiveShare, section
from maporl.types import Dialogue
from trl_ext.ppo.options import option


@section()
class TrajectoryPairs(Gap):
    """Pairs of dialogues of one question, for each policy with all that it said in them, for a critic of turns.

    They are chosen as :class:`maporl.loops.pairs.Gap` does, by default three at random among those of different worth.
    SWEET-RL takes ``first_right``.
    """

    select: Literal["reward_gap", "random", "first_right", "comparator_reward"] = option(
        "random", "Which pairs are taken, as for `gap`. SWEET-RL takes first_right."
    )
    per_question: Positive | None = option(3, "Most pairs of dialogues. None: all.")
    makes = "trajectory pairs"  # type: ignore[assignment]  # it is chosen alike, and made into something else

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[TrajectoryPair]:  # type: ignore[override]
        pairs = []
        for _, played, better, worse, gap in self.compared(dialogues):
            chosen, rejected = (_by_policy(played[number], roles) for number in (better, worse))
            for policy in chosen:
                if policy in rejected:
                    pairs.append(TrajectoryPair(played[better].example, chosen[policy], rejected[policy], gap))
        return pairs


@section()
class RankHalves(Builder):
    """States, in each of which a policy says ``candidates`` things; those that a critic of turns ranks highest are
    preferred.

    A state is what an agent saw before it said something. The stage samples the candidates with the weights at which it
    starts, and :meth:`paired` makes pairs of them. They are ranked by the critic's log-probability less the
    reference's. The critic reads the right answer.
    """

    candidates: Annotated[int, Field(ge=2)] = option(16, "Number of candidates of a state.")
    pairs: Positive = option(4, "Number of pairs of a state.")
    share: PositiveShare = option(
        1.0,
        "The share of the round's dialogues all of whose states are taken, at least one: the first dialogues of the "
        "questions in their order, then their second ones, and so on, as the published code stores them.",
    )
    reference_reads: Literal["answer", "prompt"] = option(
        "answer",
        "What the reference reads: the answer too, as in training, or only the prompt (SWEET-RL's published code).",
    )
    makes = "states"

    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> list[Row]:
        first = sorted(dialogues, key=lambda dialogue: (dialogue.rollout, dialogue.prompt))
        return [row for row, _ in said(first[: max(1, int(self.share * len(first) * (1 + ROUNDING)))], roles)]

    def check(self, config: Config, section: RowsStage, before: Sequence[str], where: str) -> Iterator[Fault]:
        """Yield why a stage cannot sample candidates, or rank them by a critic of turns that a stage ``before`` it has
        trained."""
        key = f"{where}.build"
        if "turn_critic" not in before:
            what = "rank_halves ranks by a critic of turns, and no stage before it trains one"
            yield Fault(key, what, "add {train: turn_critic, build: trajectory_pairs}")
        if section.replay != "current":
            yield Fault(f"{where}.replay", "rank_halves samples candidates for the present round only", "remove it")
        for name, agent in ((name, agent) for name, agent in config.agents.items() if agent.trainable):
            if agent.tools:
                what = f"rank_halves compares answers without their calls, and agent {name!r} has tools"
                yield Fault(key, what, "give it none")
            if agent.engine != "transformers":
                what = f"rank_halves samples candidates with transformers, and agents.{name}.engine is {agent.engine!r}"
                yield Fault(key, what, "set engine: transformers")

    def paired(self, candidates: Sequence[Row]) -> list[Pair]:
        """Return pairs of one state's candidates, whose values are their advantages.

        A member of the better half is drawn for each pair, and one of the worse half. With an odd number, the one in
        the middle is left out. Pairs of equal words are left out too.
        """
        order = sorted(candidates, key=lambda row: -row.value)
        half = len(order) // 2
        chance = random.Random(f"rank_halves/{candidates[0].place}")
        drawn_pairs = [
            Pair(chance.choice(order[:half]), chance.choice(order[len(order) - half :])) for _ in range(self.pairs)
        ]
        return [pair for pair in drawn_pairs if pair.chosen.completion_ids != pair.rejected.completion_ids]


def _by_policy(dialogue: Dialogue, roles: Collection[str]) -> dict[str, list[Row]]:
    """Return what each policy said in a dialogue."""
    rows: dict[str, list[Row]] = {}
    for row, _ in said([dialogue], roles):
        rows.setdefault(row.policy, []).append(row)
    return rows
