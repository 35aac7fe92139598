"""What the trainer asks in place of models of its own: engines, learners and weights of other times, in groups.

Advantages are computed here, from the numbers that come back, by the code of every other run.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import LearnerGroup
from maporl.integrations.ray.messages import Assigned, Samples, dealt, numbers_of, put_numbers
from maporl.rollout.restate import UntrainedWeights
from maporl.schedules import OpponentPool
from maporl.team.agents import Policy
from maporl.team.past_policies import PastPolicies, text_side
from maporl.team.team import Team
from trl_ext.chat.encoding import Tokenizer
from trl_ext.learning.checkpoint import SavingLost
from trl_ext.learning.critics import Critic
from trl_ext.learning.metrics import Metrics
from trl_ext.ppo.batch import Completion, TokenBatch, build_token_batch
from trl_ext.process.waits import Threads, result
from trl_ext.sampling.engine import TokenEngine
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

# -- sampling ----------------------------------------------------------------------------------------------------------


class RemoteEngine(TokenEngine):
    """Samples from policies that are in groups.

    Args:
        pools: the processes that sample from each policy.
        send: sends the present weights of a policy to the processes that sample from it, as those of a version.
        continuous: whether a dialogue goes on before others have their answers (``cluster.batching``).
        between: whether weights change between the answers of a dialogue (``cluster.on_update``).
    """

    remote = True

    def __init__(
        self, pools: Mapping[str, EnginePool], send: Callable[[str, int], None], continuous: bool, between: bool
    ):
        self.pools, self.send, self.continuous, self.between = pools, send, continuous, between

    def submit(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled]]:
        """Begin to sample one completion for each request.

        Raises:
            GroupFailed: processes died too often.
        """
        futures: dict[int, Future[Sampled]] = {}
        for pool in dict.fromkeys(self.pools.values()):
            numbers = [number for number, request in enumerate(requests) if self.pools[request.policy] is pool]
            futures |= zip(numbers, pool.ask([requests[number] for number in numbers]), strict=True)
        return [futures[number] for number in range(len(requests))]

    def sync(self, policy: str, version: int) -> None:
        """Send the present weights of ``policy`` to the processes that sample from it."""
        self.send(policy, version)

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        for pool in dict.fromkeys(self.pools.values()):
            pool.release()


# -- learning ----------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")


@dataclass
class RemoteLearner:
    """The driver's view of a learner in a group.

    Args:
        name: the policy's name.
        tokenizer: its tokenizer.
        args: its arguments, which are the trainer's with its own algorithm.
        critic: its kind of critic.
        learning_rate: its learning rate.
        value_learning_rate: that of its critic, if it has one.
        model: an empty module, because the weights are in the group.
    """

    name: str
    tokenizer: Tokenizer
    args: Any
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
        self, completions: Mapping[str, Sequence[Completion]], critic_only: Collection[str] = ()
    ) -> tuple[dict[str, TokenBatch], dict[str, Metrics]]:
        """Build each policy's token batch, with what its group computes of it.

        The arguments, the result and the errors are those of :meth:`trl_ext.learning.learners.Learning.token_batches`.

        Raises:
            GroupFailed: the processes of a group died too often.
        """
        batches = {
            name: build_token_batch(rows, self.device, name in critic_only) for name, rows in completions.items()
        }
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


# -- weights of other times --------------------------------------------------------------------------------------------


class Groups(Protocol):
    """The groups of a run: :class:`maporl.RayBackend`."""

    def give(self, policy: str, weights: Any) -> None:
        """Let a policy speak with ``weights``, a handle, from now on."""
        ...

    def last_sent(self, policy: str) -> Any:
        """Return a handle of the weights that a trained policy has sent last."""
        ...

    def group_of(self, policy: str) -> LearnerGroup:
        """Return the group that trains a policy."""
        ...

    def ask_untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights` in the group of a policy."""
        ...


class RemotePast(PastPolicies):
    """Past opponents. A snapshot is a handle of weights that were sent, and never comes to this process.

    Args:
        section: which agent has past opponents, and how often.
        team: the team, which gets the frozen policy.
        seed: the seed that chooses the updates and the snapshots.
        groups: the groups, which hold the weights.
    """

    def __init__(self, section: OpponentPool, team: Team, seed: int, groups: Groups):
        self.groups = groups
        super().__init__(section, team, seed)

    def _frozen(self) -> Policy:
        """Return the frozen policy with the text side alone. The engines of the group have a model for it."""
        return text_side(self.policy, self.section.agent)

    def take_snapshot(self) -> None:
        """Keep the weights that the policy has sent last, which are its present ones."""
        present = self.groups.last_sent(self.policy.name)
        self.snapshots = [*self.snapshots, present][-self.section.keep :]

    def save(self, folder: Path) -> None:
        """Save every snapshot to ``folder``, for a checkpoint."""
        group = self.groups.group_of(self.policy.name)
        for number, weights in enumerate(self.snapshots):
            group.all("save_weights", self.policy.name, weights, folder / f"snapshot-{number}.safetensors")

    def _read(self, files: list[Path]) -> None:
        group = self.groups.group_of(self.policy.name)
        self.snapshots = [group.kept("read_weights", self.policy.name, file) for file in files]

    def _load(self, weights: Any) -> None:
        self.groups.give(self.past.name, weights)


class RemoteUntrained(UntrainedWeights):
    """The weights before training, which the groups of the policies hold.

    Args:
        team: the policies, for their tokenizers.
        groups: the groups, which hold the weights.
    """

    def __init__(self, team: Team, groups: Groups):
        self.team, self.groups = team, groups

    def logprobs(self, policy: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Return the log-probability of each completion after its prompt (:meth:`UntrainedWeights.logprobs`)."""
        return self.groups.ask_untrained("logprobs", policy, rows)

    def complete(self, policy: str, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return the ids of the greedy completion of each prompt (:meth:`UntrainedWeights.complete`)."""
        return self.groups.ask_untrained("complete", policy, prompts, most)
