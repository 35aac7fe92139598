"""Collect the dialogues of an update, with branching and with past policies as opponents."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from maporl.config.schema import BranchingSection
from maporl.rewards.scoring import with_reward_variance
from maporl.rollout.branching import play_branched
from maporl.rollout.player import Player
from maporl.team.past_policies import PastPolicies
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.samples import TeamUpdateBatch
from maporl.types import Dialogue, Example
from trl_ext.process import distributed


class Collector:
    """Plays the questions of a batch for training.

    Args:
        player: plays dialogues and scores them.
        branching: the number of dialogues for each question, and where they fork.
        args: the trainer's arguments, for sampling, seed and batch sizes.
        learning: the names of the policies that are trained.
        past: the past policies of the opponent pool, or None without a pool.
    """

    def __init__(
        self,
        player: Player,
        branching: BranchingSection,
        args: MultiAgentPPOConfig,
        learning: frozenset[str],
        past: PastPolicies | None = None,
    ):
        self.player, self.branching, self.args, self.learning, self.past = player, branching, args, learning, past

    def collect(self, batch: TeamUpdateBatch) -> None:
        """Fill in the dialogues of ``batch``.

        With ``resample``, questions without reward variance are replaced by other questions, at most so many times.
        This is the dynamic sampling of DAPO (arXiv 2503.14476).
        """
        with self._past_speaker(batch) as past:
            self._collect(batch, past)

    def _collect(self, batch: TeamUpdateBatch, past: str | None) -> None:
        self.player.world.renew()
        first = distributed.rank() * self._own_batch_size
        numbers = list(range(first, first + len(batch.examples)))
        batch.dialogues = self._play(batch, batch.examples, past, numbers)
        scorer = self.player.scorer
        for _ in range(self.branching.resample):
            scorer.meet(batch.dialogues)
            scorer.credit(batch.dialogues, batch.task, batch.number)
            varied = with_reward_variance(batch.dialogues)
            with_variance = [d for d in batch.dialogues if d.prompt in varied]
            self.player.world.drop_scored([d for d in batch.dialogues if d.prompt not in varied])
            if varied.issuperset(numbers):
                if (
                    scorer.meeting
                ):  # others are replaced in other processes, and what stays here is worth more or less then
                    continue
                return
            others = [place + self._batch_size for place in numbers if place not in varied]
            numbers = [place for place in numbers if place in varied] + others
            examples = [batch.task[self._drawn(batch, place)] for place in others]
            dialogues = with_variance + self._play(batch, examples, past, others)
            batch.dialogues = sorted(dialogues, key=lambda d: d.prompt % self._batch_size)

    def _drawn(self, batch: TeamUpdateBatch, number: int) -> int:
        """Return the row of the task that is asked as question ``number`` in place of one without reward variance."""
        return random.Random(f"{self.args.seed}/{batch.number}/resample/{number}").randrange(len(batch.task))

    @property
    def _batch_size(self) -> int:
        """Return the number of questions of an update, over all processes."""
        return distributed.size() * self._own_batch_size

    @property
    def _own_batch_size(self) -> int:
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps

    @contextmanager
    def _past_speaker(self, batch: TeamUpdateBatch) -> Iterator[str | None]:
        """Yield the past policy that speaks in this update, if one does, with whole weights that engines have."""
        # all processes come here once an update: they resample different numbers of times, and ``sync`` waits for all
        past = None if self.past is None else self.past.speaking(batch.number)
        if self.past is None or past is None:
            yield None
            return
        with self.past.holder.whole():
            for engine in self.player.engines.values():
                engine.sync(past)  # the past policy may have other weights than in the last update
            yield past

    def _play(
        self, batch: TeamUpdateBatch, examples: list[Example], past: str | None, numbers: list[int]
    ) -> list[Dialogue]:
        instead = {} if past is None or self.past is None else {self.past.section.agent: past}
        driver = self.player.driver(
            batch.task,
            self.args.decoding,
            specs=self.player.specs(batch.plan.weights_from, instead, self.learning, training=True),
            batch=batch.number,
            rng_key=(self.args.seed, batch.number),
            numbers=numbers,
        )
        worth = self.player.scorer.worth
        dialogues = play_branched(driver, examples, self.branching, lambda dialogues: worth(dialogues, batch.task))
        self.player.world.check_lost(dialogues)
        lost = [dialogue for dialogue in dialogues if dialogue.lost]
        batch.dropped += lost
        self.player.world.drop_scored(lost)
        return [dialogue for dialogue in dialogues if not dialogue.lost]
