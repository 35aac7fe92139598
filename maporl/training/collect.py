"""Collect the dialogues of an update, with branching and with past policies as opponents."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from maporl.config.schema import BranchingSection
from maporl.rewards.metrics import with_reward_variance
from maporl.rollout.branching import play_branched
from maporl.rollout.player import Player
from maporl.team.past_policies import PastPolicies
from maporl.training.args import MultiAgentPPOConfig
from maporl.training.update_batch import TeamUpdateBatch
from maporl.types import Dialogue, Example
from trl_ext import distributed


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
        batch.dialogues = self._play(batch, batch.examples, past)
        for number in range(self.branching.resample):
            self.player.scorer.credit(batch.dialogues, batch.task, batch.number)
            varied = with_reward_variance(batch.dialogues)
            kept = [d for d in batch.dialogues if d.prompt in varied]
            self.player.world.drop_scored([d for d in batch.dialogues if d.prompt not in varied])
            missing = len(batch.examples) - len({d.prompt for d in kept})
            if not missing:
                return
            rng = random.Random(f"{self.args.seed}/{batch.number}/resample/{number}/{distributed.rank()}")
            others = [batch.task[rng.randrange(len(batch.task))] for _ in range(missing)]
            batch.dialogues = kept + self._play(batch, others, past, (number + 1) * self._batch_size)

    @property
    def _batch_size(self) -> int:
        """Return the number of questions of an update, over all processes."""
        return distributed.size() * self._own_batch_size

    @property
    def _own_batch_size(self) -> int:
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps

    @contextmanager
    def _past_speaker(self, batch: TeamUpdateBatch) -> Iterator[str | None]:
        """Yield the past policy that speaks in this update, if one does. Its weights are whole, and the engines have them.

        All processes come here once in an update. They resample different numbers of times, and ``sync`` waits for all.
        """
        past = None if self.past is None else self.past.speaking(batch.number)
        if self.past is None or past is None:
            yield None
            return
        with self.past.holder.whole():
            for engine in self.player.engines.values():
                engine.sync(past)  # the past policy may have other weights than in the last update
            yield past

    def _play(
        self, batch: TeamUpdateBatch, examples: list[Example], past: str | None, first: int = 0
    ) -> list[Dialogue]:
        instead = {} if past is None or self.past is None else {self.past.section.agent: past}
        driver = self.player.driver(
            batch.task,
            self.args.decoding,
            specs=self.player.specs(batch.plan.weights_from, instead, self.learning, training=True),
            batch=batch.number,
            rng_key=(self.args.seed, batch.number),
            first=first + distributed.rank() * self._own_batch_size,
        )
        rng = random.Random(f"{self.args.seed}/{batch.number}")
        worth = self.player.scorer.worth
        dialogues = play_branched(driver, examples, self.branching, lambda dialogues: worth(dialogues, batch.task), rng)
        self.player.world.check_lost(dialogues)
        self.player.world.drop_scored([dialogue for dialogue in dialogues if dialogue.lost])
        return [dialogue for dialogue in dialogues if not dialogue.lost]
