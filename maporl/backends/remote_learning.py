"""What the trainer's loop asks of learners that are in groups: the verbs of
:class:`trl_ext.learning.learners.Learning`.

Advantages are computed here, from the numbers that come back, by the code of every other run.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from maporl.backends.group import LearnerGroup
from maporl.backends.messages import Assigned, Samples, dealt, numbers_of, put_numbers
from trl_ext.chat.encoding import Tokenizer
from trl_ext.learning.checkpoint import SavingLost
from trl_ext.learning.critics import Critic
from trl_ext.learning.metrics import Metrics
from trl_ext.ppo.batch import Completion, TokenBatch, build_token_batch
from trl_ext.process.waits import Threads, result

Result = TypeVar("Result")


@dataclass
class RemoteLearner:
    """What the driver knows of a learner in a group.

    Args:
        name: the policy's name.
        tokenizer: its tokenizer.
        critic: its kind of critic.
        learning_rate: its learning rate.
        value_learning_rate: that of its critic, if it has one.
        model: an empty module, because the weights are in the group.
    """

    name: str
    tokenizer: Tokenizer
    critic: type[Critic]
    learning_rate: float
    value_learning_rate: float
    model: nn.Module = field(default_factory=nn.Module)
    optimizer: None = None
    scheduler: None = None


class _SavingGroups:
    """The policies of all groups on their way into a checkpoint."""

    def __init__(self, learning: "RemoteLearning", folder: Path):
        self.learning, self.folder = learning, folder
        learning.on_all(lambda group: group.all("begin_saving", folder))

    def done(self) -> bool:
        return all(saved for group in self.learning.groups for saved in group.all("saved"))

    def finish(self) -> dict[Path, str]:
        written = self.learning.on_all(lambda group: group.all("finish_saving")[0])
        if any(digests is None for digests in written):
            raise SavingLost(f"{self.folder.parent}: a process died while it wrote this checkpoint, which is left out")
        return {path: digest for digests in written for path, digest in digests.items()}


@dataclass
class RemoteCentral:
    """The central critic of a group's policies, as a part of checkpoints
    (:class:`trl_ext.learning.checkpoint.Saved`)."""

    group: LearnerGroup

    def save(self, folder: Path) -> None:
        """Write the critic into ``folder``, which exists."""
        self.group.save_central(folder)

    def load(self, folder: Path) -> None:
        """Read the critic from ``folder``."""
        self.group.load_central(folder)


class RemoteLearning:
    """Trains policies in groups of processes, all groups at the same time.

    Args:
        learners: what is known of each trained policy.
        groups: the groups with trained policies.
    """

    def __init__(self, learners: dict[str, RemoteLearner], groups: Sequence[LearnerGroup]):
        self.learners, self.groups = learners, list(groups)
        self.device = torch.device("cpu")
        self._threads = Threads(len(self.groups), "groups")
        self._rows: dict[str, list[list[int]]] = {}

    def token_batches(
        self, completions: Mapping[str, Sequence[Completion]], critic_only: bool = False
    ) -> tuple[dict[str, TokenBatch], dict[str, Metrics]]:
        """Build each policy's token batch, with what its group computes of it.

        The arguments, the result and the errors are those of :meth:`trl_ext.learning.learners.Learning.token_batches`.

        Raises:
            GroupFailed: the processes of a group died too often.
        """
        batches = {name: build_token_batch(rows, self.device, critic_only) for name, rows in completions.items()}
        metrics: dict[str, Metrics] = {}
        self._rows = {}

        def annotate(group: LearnerGroup) -> list[Any]:
            names = [name for name in group.spec.trained if name in batches]
            for name in names:
                self._rows[name] = dealt(batches[name], group.spec.devices)
            shares = [
                {name: Samples.of([completions[name][row] for row in self._rows[name][rank]]) for name in names}
                for rank in range(group.spec.devices)
            ]
            return group.annotate([(share, critic_only) for share in shares]) if names else []

        for annotations in self.on_all(annotate):
            for rank, (numbers, measured) in enumerate(annotations):
                for name, values in numbers.items():
                    put_numbers(batches[name], self._rows[name][rank], values)
                metrics |= measured if rank == 0 else {}
        return batches, {name: metrics[name] for name in batches}

    def update(self, batches: dict[str, TokenBatch], step: int) -> tuple[dict[str, Metrics], float]:
        """Train every policy on its token batch, as :meth:`trl_ext.learning.learners.Learning.update` does.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
            GroupFailed: the processes of a group died too often.
        """

        def update(group: LearnerGroup) -> tuple[dict[str, Metrics], float]:
            names = [name for name in group.spec.trained if name in batches]
            arguments = [
                ({name: self._assigned(batches[name], name, rank) for name in names}, step)
                for rank in range(group.spec.devices)
            ]
            return group.update(arguments)

        updates = self.on_all(update)
        merged = {name: values for metrics, _ in updates for name, values in metrics.items()}
        return merged, updates[0][1]

    def _assigned(self, batch: TokenBatch, name: str, rank: int) -> Assigned:
        """Return what the driver computed of the rows that the process ``rank`` was given."""
        rows = self._rows[name][rank]
        place = {row: number for number, row in enumerate(rows)}
        # batch.sample has the row that each row was before those without a weight were left out
        indices = [n for n, row in enumerate(batch.sample.tolist()) if row in place]
        share = batch.take(torch.tensor(indices, dtype=torch.long))
        return Assigned(
            np.asarray([place[row] for row in share.sample.tolist()], dtype=np.int64),
            numbers_of(share, "assigned"),
            share.weight.numpy(),
            batch.rollouts,
        )

    @cached_property
    def central(self) -> RemoteCentral | None:
        """Return the critic that policies of a group share, if there is one."""
        return next((RemoteCentral(group) for group in self.groups if group.all("has_central")[0]), None)

    # -- weights ------------------------------------------------------------------------------------------------------

    @contextmanager
    def whole_weights(self, names: Collection[str] | None = None, references: bool = False) -> Iterator[None]:
        """Do nothing, because nothing samples from weights in this process."""
        yield

    def autocast(self) -> AbstractContextManager:
        """Do nothing, because no forward is made in this process."""
        return nullcontext()

    def begin_saving(self, folder: Path) -> _SavingGroups:
        """Begin to write every policy into ``folder/NAME``, which all machines must see."""
        return _SavingGroups(self, folder)

    def load(self, folder: Path) -> None:
        """Load every policy from ``folder/NAME``."""
        self.on_all(lambda group: group.load(folder))

    def save_policy(self, name: str, folder: Path) -> None:
        """Save a policy as a ``from_pretrained`` folder."""
        self.group_of(name).all("save_policy", name, folder)

    def trained_bytes(self) -> int:
        """Return the bytes of all weights that are trained."""
        return sum(group.bytes for group in self.groups)

    def peak_memory(self) -> float:
        """Return the largest memory that this process has used. Those of the groups are not in it."""
        from trl_ext.learning.metrics import peak_memory

        return peak_memory([self.device])

    def group_of(self, policy: str) -> LearnerGroup:
        """Return the group that trains ``policy``."""
        return next(group for group in self.groups if policy in group.spec.trained)

    def on_all(self, work: Callable[[LearnerGroup], Result]) -> list[Result]:
        """Return ``work(group)`` for every group. All groups work at the same time."""
        return [result(call) for call in [self._threads.submit(work, group) for group in self.groups]]
