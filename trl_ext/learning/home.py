"""Where the weights of a run are trained and sampled from."""

from collections.abc import Collection
from typing import Any

import torch

from trl_ext.learning.central_critic import CentralCritic
from trl_ext.learning.learner import Learner
from trl_ext.learning.learners import Learning
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.sharding.choice import check_bases


class Home:
    """The launcher's processes: each of them holds all weights of the run, or its share of them.

    A subclass may hold the weights elsewhere. The loop asks these methods and nothing else.

    Args:
        learners: the learners by name.
        optimizers: the first learner's optimizer and scheduler. None builds them from the trainer's arguments.
        central: the critic that the learners share, if there is one.
    """

    references_sample = False
    """Whether references sample too, and must be whole for it."""

    def __init__(
        self, learners: dict[str, Learner], optimizers: tuple = (None, None), central: CentralCritic | None = None
    ):
        self.learners: dict[str, Any] = dict(learners)
        self.optimizers, self.central = optimizers, central

    def start(self, args: Any, accelerator: Any, updates: int) -> Learning:
        """Bring the learners to their devices, build their optimizers, and return what trains them.

        Args:
            args: the trainer's arguments.
            accelerator: the trainer's ``accelerate.Accelerator``.
            updates: the number of updates of the run.

        Raises:
            ValueError: a policy or its value model could not be saved.
        """
        check_bases({name: learner.model for name, learner in self.learners.items()}, accelerator)
        self.devices, first = self.base_devices(args), next(iter(self.learners.values()))
        for learner in self.learners.values():
            distributed.on_main(learner.try_saving)
            optimizer, scheduler = self.optimizers if learner is first else (None, None)
            learner.prepare(accelerator, updates, optimizer, scheduler, self.devices.get(id(base_of(learner.model))))
        if self.central is not None:
            self.central.prepare(accelerator, updates)
        return Learning(self.learners, args, accelerator.device, self.central)

    def base_devices(self, args: Any) -> dict[int, torch.device]:
        """Return devices by the ``id`` of the base model. Other models use the accelerator's device."""
        return {}

    def sampled_here(self) -> Collection[str]:
        """Return the policies whose own weights sample in this process."""
        return self.learners

    def stop_sampling(self) -> None:
        """End the processes that sample, because a signal ends the run. Those that train are asked to save next."""

    def metrics(self) -> dict[str, float]:
        """Return what other processes did since the last time, to log after every update."""
        return {}

    def run_ended(self) -> None:
        """End what :meth:`start` started, because the run is over."""

    def end_hung(self) -> None:
        """Replace the processes that train and do not answer at all, because a signal has come. A thread asks this."""
