"""M-GRPO: every dialogue counts the same number of turns of each agent (arXiv 2511.13288)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import Transform
from trl_ext.ppo.options import option


@dataclass(frozen=True)
class Align(Transform):
    """Let every dialogue count ``to`` turns of each agent, however often it was called (M-GRPO, arXiv 2511.13288).

    A turn is one utterance, or all segments of a turn in which the agent called tools.

    Only turns that were called are aligned. The k turns of an agent that nobody called, such as the planner's or those
    of a debate, are one trajectory. Each counts ``1 / k`` times, so a dialogue counts once. In a batch without the
    column ``caller``, which training never makes, all turns are aligned.
    """

    how: Literal["weight", "duplicate", "drop"] = option(
        "weight",
        "What is done if an agent has k turns in a dialogue. weight: each counts `to / k` times, which is the "
        "expectation of the other two ways. duplicate: random ones are repeated. drop: random ones are left out if "
        "there are too many, and repeated if there are too few, as the paper does.",
    )
    to: int | None = option(None, "The number of turns. Default: the one that at most 1% of the dialogues exceed.")
    seed: int = option(0, "Seed of what is drawn.")
    needs = ("agent", "rollout")
    compares_turns = True

    def weigh(self, batch: TurnBatch) -> Tensor:
        """Return how often each row counts."""
        weights = torch.ones(len(batch), dtype=torch.float64)
        called: list[tuple[int, list[list[int]]]] = []
        for rows in batch.trajectories(by_agent=True):
            turns = _turns(batch, rows)
            main = [] if batch.caller is None else [turn for turn in turns if not batch.called(turn[0])]
            for turn in main:
                weights[turn] = 1.0 / len(main)
            called += [(rows[0], [turn for turn in turns if turn not in main])] if len(main) < len(turns) else []
        counts = sorted(len(turns) for _, turns in called)
        target = self.to or (counts[min(len(counts) - 1, int(0.99 * len(counts)))] if counts else 0)
        for row, turns in called:
            place = [column[row] for column in (batch.prompt, batch.rollout, batch.agent) if column is not None]
            rng = random.Random(f"{self.seed}/{place}")  # so that the order of dialogues does not matter
            if self.how == "weight":
                weights[[i for turn in turns for i in turn]] = target / len(turns)
            elif len(turns) > target and self.how == "drop":
                for turn in rng.sample(turns, len(turns) - target):
                    weights[turn] = 0.0
            else:
                for turn in rng.choices(turns, k=max(0, target - len(turns))):
                    weights[turn] += 1.0
        return weights


def _turns(batch: TurnBatch, rows: Sequence[int]) -> list[list[int]]:
    """Return the rows of each turn of an agent in a dialogue. Without the column ``turn`` each row is a turn."""
    turns: dict[int, list[int]] = {}
    for i in rows:
        turns.setdefault(i if batch.turn is None else batch.turn[i], []).append(i)
    return list(turns.values())
