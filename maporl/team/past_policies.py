"""A pool of past opponents: an agent sometimes speaks with the weights that a policy had some updates ago."""

import copy
import random
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file

from maporl.schedules import OpponentPool
from maporl.team.team import Policy, Team
from trl_ext.models.adapters import adapter_state, copy_adapter, set_state, shared_parameters
from trl_ext.models.weights import check_fit, read_tensors
from trl_ext.process import distributed
from trl_ext.sharding.holder import Holder


def text_side(policy: Policy, agent: str) -> Policy:
    """Return the frozen policy that speaks for ``agent`` with past weights of ``policy``, which are elsewhere."""
    voice = replace(policy.voice, name=past_name(policy.name))
    return Policy(voice, policy.model, policy.adapter, False, agents=[agent])


class PastPolicies:
    """Keeps snapshots of a policy on the CPU, and adds a frozen policy to the team that speaks with one of them.

    The frozen policy is called ``NAME-past``. It is another adapter on the same base, or a copy of the model. Of
    several processes only the main one keeps snapshots of a whole model, and the others receive the one that speaks.

    Args:
        section: which agent has past opponents, and how often.
        team: the team, which gets the frozen policy.
        seed: the seed that chooses the updates and the snapshots.
    """

    def __init__(self, section: OpponentPool, team: Team, seed: int):
        self.section, self.seed = section, seed
        self.policy = team.policies_of[section.of][0]
        self.snapshots: list[dict[str, torch.Tensor]] = []
        self.past = self._frozen()
        team.policies[self.past.name] = self.past
        self.holder = Holder()  # how the processes hold the past policy, where it is a model of its own
        self._shapes = {key: w.detach().to("meta") for key, w in _weights(self.past).items()}

    def _frozen(self) -> Policy:
        return past_of(self.policy, [self.section.agent])

    def speaking(self, update: int) -> str | None:
        """Return the frozen policy's name if it speaks in ``update``, with a snapshot loaded, or else None.

        All processes call this together.
        """
        rng = random.Random(f"{self.seed}/{update}/opponents")
        if not self.snapshots or rng.random() >= self.section.probability:
            return None
        self._load(rng.choice(self.snapshots))
        return self.past.name

    def is_due(self, update: int) -> bool:
        """Return whether a snapshot is to be taken after ``update``."""
        return update % self.section.every == 0

    def take_snapshot(self) -> None:
        """Keep a copy of the policy's present weights, which must be whole (``whole_weights``)."""
        self.snapshots = [*self.snapshots, _copied(self.policy) if self._keeps else {}][-self.section.keep :]

    def save(self, folder: Path) -> None:
        """Save every snapshot to ``folder``, for a checkpoint."""
        for number, weights in enumerate(self.snapshots):
            save_file(weights, folder / f"snapshot-{number}.safetensors")

    def load(self, folder: Path) -> None:
        """Load the snapshots that :meth:`save` wrote to ``folder``.

        Raises:
            WeightsError: a snapshot cannot be read, or it is not one of this policy.
        """
        files = [folder / f"snapshot-{number}.safetensors" for number in range(len(list(folder.glob("snapshot-*"))))]
        self.snapshots = [{} for _ in files]
        if self.past.adapter is None:
            distributed.on_main(lambda: self._read(files))
        else:
            self._read(files)

    def _read(self, files: list[Path]) -> None:
        self.snapshots = [read_tensors(file) for file in files]
        for file, snapshot in zip(files, self.snapshots, strict=True):
            check_fit(self._shapes, snapshot, file)

    @property
    def _keeps(self) -> bool:
        """Whether this process keeps snapshots: adapters are small, and whole models are not."""
        return self.past.adapter is not None or distributed.rank() == 0

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        if self.past.adapter is not None:
            set_state(self.past.model, self.past.adapter, weights)
        else:
            self.holder.load(self.past.model, weights)


def past_of(policy: Policy, agents: list[str]) -> Policy:
    """Return a frozen policy ``NAME-past`` that speaks for ``agents``: another adapter on the same base, or a copy of
    the model."""
    name, model, adapter = past_name(policy.name), policy.model, policy.adapter
    if isinstance(model, PeftModel) and adapter is not None and not shared_parameters(model, adapter):
        copy_adapter(model, adapter, name)
        adapter = name
    else:
        model = copy.deepcopy(model).requires_grad_(False)
    return Policy(replace(policy.voice, name=name), model, adapter, False, agents=agents)


def past_name(policy: str) -> str:
    """Return the name of the frozen policy that speaks with past weights of ``policy``."""
    return f"{policy}-past"


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    if policy.adapter is not None:
        return adapter_state(policy.model, policy.adapter)
    return dict(policy.model.named_parameters())


def _copied(policy: Policy) -> dict[str, torch.Tensor]:
    """Return a copy of the weights of ``policy`` as they are now, on the CPU."""
    return {name: w.detach().cpu().clone().contiguous() for name, w in _weights(policy).items()}
