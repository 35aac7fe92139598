"""What the processes of a group are told when they start. Imports no torch."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maporl.config.schema import Config, VLLMSection


@dataclass(frozen=True)
class GroupSpec:
    """A group and its run.

    Args:
        name: the group's name.
        config: describes the team, and names the run's folder.
        policies: the policies of the group.
        trained: those of them that are trained.
        updates: the number of updates of the run, over which learning rates are scheduled.
        critics: whether the policies have critics.
        outputs: the number of outputs of each critic.
        devices: the number of processes that train.
        strategy: how they hold the weights (:class:`maporl.config.cluster.LearnerPlaces`).
        replicas: the number of processes that sample.
        rows: the most answers that one of them samples at a time. None: all that are asked for.
        args: the trainer's arguments, a :class:`maporl.MultiAgentPPOConfig` without devices (:func:`without_devices`).
        objective: the function that ``args.objective`` names.
        stops: what ends the completions of each policy: token ids, and strings.
        seed: torch's seed, with which new adapters are drawn.
        past: for each policy that speaks with past weights of another one, the name of that one.
        vllm: the options of vLLM of each policy, if vLLM samples from the group. Otherwise transformers does.
    """

    name: str
    config: Config
    policies: tuple[str, ...]
    trained: tuple[str, ...]
    updates: int
    critics: bool
    outputs: int
    devices: int
    strategy: str
    replicas: int
    rows: int | None
    args: Any
    objective: Callable[..., Any]
    stops: Mapping[str, tuple[frozenset[int], tuple[str, ...]]]
    seed: int
    past: Mapping[str, str] = field(default_factory=dict)
    vllm: Mapping[str, VLLMSection] = field(default_factory=dict)


def without_devices(args: Any) -> Any:
    """Return a copy of a trainer's arguments without what they have found out about this process and its devices."""
    copied = copy.copy(args)
    for name in ("_setup_devices", "distributed_state"):
        vars(copied).pop(name, None)
    return copied
