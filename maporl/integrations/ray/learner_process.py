"""One of the processes that train the policies of a group. It knows nothing of the driver, and nothing of Ray.

A group's processes form a world of their own, as if a launcher had started them for these policies alone. What runs in
it is what runs without a backend: :class:`trl_ext.learning.learners.Learning`.
"""

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed import TCPStore
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from maporl.integrations.ray.member import GroupSpec
from maporl.integrations.ray.messages import (
    Assigned,
    Packed,
    Samples,
    numbers_of,
    pack,
    put_numbers,
    sent_parameters,
    tensors_of,
)
from maporl.integrations.ray.team_part import load_part
from maporl.rollout.restate import UntrainedWeights
from trl_ext.learning.checkpoint import Saving
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Metrics
from trl_ext.models.weights import check_fit, read_tensors
from trl_ext.ppo.batch import TokenBatch
from trl_ext.ppo.losses import OBJECTIVES
from trl_ext.process import distributed
from trl_ext.sharding.choice import check_bases
from trl_ext.sharding.holder import Holder, State
from trl_ext.sharding.shards import Shard, Shards, entries

STRATEGIES: dict[str, dict[str, str]] = {
    "replicated": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
"""What accelerate's launcher puts into the environment for each strategy."""


def open_store(address: str) -> tuple[TCPStore, int]:
    """Open a store at which the processes of a group find each other, and return it with its port.

    It listens on ``address`` alone. One that ``torch.distributed`` opens itself listens on every interface.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        opened = partial(
            TCPStore, address, port, None, True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        try:
            store = opened()
        except NotImplementedError:  # the libuv store of torch 2.7 takes no open socket
            store = opened(use_libuv=False)
        listener.detach()  # the store closes it
    return store, port


def interface_of(address: str) -> str | None:
    """Return the network interface that has ``address``, or None."""
    names = [
        name for name, addresses in psutil.net_if_addrs().items() if any(each.address == address for each in addresses)
    ]
    return names[0] if names else None


@dataclass(frozen=True)
class Snapshot:
    """The state that one process holds of its group after an update, by policy."""

    entries: dict[str, dict[str, np.ndarray]]
    rest: dict[str, State]
    groups: dict[str, list[dict]]
    schedulers: dict[str, dict[str, Any]]


def _arrays(shards: Iterable[Shard]) -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in entries(shards).items()}


class LearnerProcess:
    """Process number ``rank`` of those that train a group.

    Args:
        spec: the group.
        rank: the number of this process.
        address: where the other processes of the group reach this machine.
    """

    def __init__(self, spec: GroupSpec, rank: int, address: str):
        self.spec, self.rank, self.address = spec, rank, address
        self.batches: dict[str, TokenBatch] = {}
        self._updated: tuple[int, tuple[dict[str, Metrics], float]] | None = None
        self._saving: Saving | None = None
        self._store: TCPStore | None = None
        self._has_world = spec.devices > 1 or spec.strategy != "replicated"

    def meeting_place(self) -> tuple[str, int]:
        """Return where the processes of the group can meet. The first process is asked."""
        if not self._has_world:
            return self.address, 0
        self._store, port = open_store(self.address)
        return self.address, port

    def build(self, address: str, port: int) -> int:
        """Join the other processes at ``address``, and build the learners. All processes of the group do this together.

        Returns:
            The bytes of all weights that are trained.

        Raises:
            ConfigError: a model cannot be loaded.
        """
        spec, args = self.spec, self.spec.args
        os.environ |= STRATEGIES[spec.strategy]
        on_cpu = args.use_cpu or not torch.cuda.is_available()
        if on_cpu:
            os.environ |= {"ACCELERATE_USE_CPU": str(args.use_cpu).lower(), "DS_ACCELERATOR": "cpu"}
        if self._has_world:
            os.environ |= self._world(address, port, on_cpu)
        OBJECTIVES.update(spec.objectives)
        team = load_part(spec, spec.trained, receives=self.rank > 0)
        central = team.build_central_critic(args, spec.turns, spec.reading)
        learners = team.build_learners(args, spec.turns, spec.reading, central)
        accelerator = Accelerator(
            cpu=args.use_cpu
        )  # from here on, from_pretrained would shard what it loads under ZeRO-3
        unset_hf_deepspeed_config()
        distributed.check_launcher()
        check_bases({name: learner.model for name, learner in learners.items()}, accelerator)
        for learner in learners.values():
            learner.prepare(accelerator, spec.updates)
        if central is not None:
            central.prepare(accelerator, spec.updates)
        self.team = team
        self.learning = Learning(learners, args, accelerator.device, central)
        rows = args.batch_rows
        self._untrained = UntrainedWeights(team, lambda name: learners[name].policy.reference_model(), rows)
        return self.learning.trained_bytes()

    def _world(self, address: str, port: int, on_cpu: bool) -> dict[str, str]:
        """Return what a launcher would tell this process of the others, which meet at ``address``."""
        count = str(self.spec.devices)
        # a process sees no other accelerator than its own
        told = {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank) if on_cpu else "0", "WORLD_SIZE": count}
        told |= {"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}  # the store is open already
        interface = interface_of(self.address)
        # otherwise gloo takes the interface to which the machine's name leads
        return told | (
            {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
        )

    def annotate(
        self, samples: Mapping[str, Samples], critic_only: Collection[str]
    ) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Metrics]]:
        """Take the samples of an update, and return what the weights say of their tokens.

        Returns:
            By policy, what is ``computed`` (:data:`trl_ext.ppo.batch.Mark`) of the sampled tokens of this process, and
            statistics over all processes of the group.

        Raises:
            NonFiniteError: a log-probability or a value is NaN or infinite.
        """
        completions = {name: packed.completions() for name, packed in samples.items()}
        self.batches, metrics = self.learning.token_batches(completions, critic_only)
        return {name: numbers_of(batch, "computed") for name, batch in self.batches.items()}, metrics

    def update(self, assigned: Mapping[str, Assigned], step: int) -> tuple[dict[str, Metrics], float]:
        """Train on the samples that :meth:`annotate` took. A second call for the same ``step`` changes nothing.

        Returns:
            The metrics by policy, and the learning rate, as :meth:`trl_ext.learning.learners.Learning.update` returns
            them.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        if self._updated is not None and self._updated[0] == step:
            return self._updated[1]
        batches = {}
        for name, share in assigned.items():
            batch = self.batches[name]
            if len(share.rows) < len(batch):
                batch = batch.take(torch.from_numpy(share.rows))
            put_numbers(batch, range(len(batch)), share.tokens)
            batch.weight = torch.from_numpy(share.weights).to(batch.weight.device, batch.weight.dtype)
            batch.rollouts = share.rollouts
            batches[name] = batch
        outcome = self.learning.update(batches, step)
        self._updated, self.batches = (step, outcome), {}
        return outcome

    def weights(self, policy: str) -> Packed | None:
        """Return the weights of a policy, or None in all processes but the first. All of them are called together."""
        parameters, strategy = sent_parameters(self.team.policies[policy]), self.learning.learners[policy].strategy
        stream = strategy.stream(parameters)
        if self.rank == 0:
            return pack(stream, strategy.streamed_bytes(parameters))
        for _ in stream:  # the first process gathers each weight from all of them
            pass
        return None

    @torch.no_grad()
    def untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights` in the first process.

        All are called together.
        """
        with self.learning.whole_weights([policy], references=True):
            if self.rank > 0:
                return None
            with self.learning.autocast() if method == "complete" else nullcontext():
                return getattr(self._untrained, method)(policy, *arguments)

    def save_weights(self, policy: str, weights: Packed, file: Path) -> None:
        """Write what :meth:`weights` returned earlier into a safetensors ``file``."""
        if self.rank == 0:
            save_file(dict(tensors_of(weights)), file)

    def read_weights(self, policy: str, file: Path) -> Packed | None:
        """Return what :meth:`save_weights` wrote, or None in all processes but the first. All are called together.

        Raises:
            WeightsError: the file cannot be read, or it is not one of this policy.
        """
        with self.learning.whole_weights([policy]):
            if self.rank > 0:
                return None
            read = read_tensors(file)
            check_fit(sent_parameters(self.team.policies[policy]), read, file)
            return pack(read.items(), sum(tensor.nbytes for tensor in read.values()))

    def begin_saving(self, folder: Path) -> None:
        """Begin to write the policies into ``folder/NAME``
        (:meth:`trl_ext.learning.learners.Learning.begin_saving`)."""
        self._saving = self.learning.begin_saving(folder)

    def saved(self) -> bool:
        """Return whether :meth:`finish_saving` would not wait for what this process writes."""
        return self._saving is None or self._saving.done()

    def finish_saving(self) -> dict[Path, str] | None:
        """Wait until they are written, and return the SHA-256 of files that are known.

        None: this process began nothing.
        """
        saving, self._saving = self._saving, None
        return None if saving is None else saving.finish()

    def load(self, folder: Path) -> None:
        """Load every policy from ``folder/NAME``."""
        self._updated = None
        self.learning.load(folder)

    def has_central(self) -> bool:
        """Return whether the policies of the group share a central critic."""
        return self.learning.central is not None

    def save_central(self, folder: Path) -> None:
        """Write the central critic into ``folder``, which exists."""
        assert self.learning.central is not None, "has_central() was asked before"
        if distributed.is_main():
            self.learning.central.save(folder)

    def load_central(self, folder: Path) -> None:
        """Read what :meth:`save_central` wrote into ``folder``."""
        assert self.learning.central is not None, "has_central() was asked before"
        self.learning.central.load(folder)

    def save_policy(self, policy: str, folder: Path) -> None:
        """Save a policy as a ``from_pretrained`` folder. All processes are called together."""
        with self.learning.whole_weights([policy]):
            if distributed.is_main():
                self.learning.save_policy(policy, folder)
        distributed.barrier()

    def snapshot(self) -> "Snapshot":
        """Return a copy of what this process holds of trained weights and optimizers, from which :meth:`restore` goes
        on."""
        return Snapshot(
            {name: _arrays(strategy.shards(strategy.names)) for name, strategy in self._strategies().items()},
            {name: strategy.optimizer_rest() for name, strategy in self._strategies().items()},
            {name: strategy.optimizer_groups() for name, strategy in self._strategies().items()},
            {name: scheduler.state_dict() for name, scheduler in self._schedulers().items()},
        )

    def restore(self, *parts: "Snapshot") -> None:
        """Go on from the snapshots of all processes of the group. All processes do this together."""
        for name, strategy in self._strategies().items():
            held = Shards.held(
                [{key: torch.from_numpy(array) for key, array in part.entries[name].items()} for part in parts]
            )
            strategy.load_shards(held, parts[0].rest[name], parts[0].groups[name])
        for name, scheduler in self._schedulers().items():
            scheduler.load_state_dict(parts[0].schedulers[name])
        self._updated = None

    def _strategies(self) -> dict[str, Holder]:
        central = self.learning.central
        strategies: dict[str, Holder] = {name: learner.strategy for name, learner in self.learning.learners.items()}
        return strategies if central is None else strategies | {"central critic": central.trained.strategy}

    def _schedulers(self) -> dict[str, Any]:
        central = self.learning.central
        schedulers = {name: learner.scheduler for name, learner in self.learning.learners.items()}
        return schedulers if central is None else schedulers | {"central critic": central.trained.scheduler}
