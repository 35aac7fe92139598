"""What is trained together: weights, how the processes hold them, their optimizer and its schedule."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from trl_ext.errors import UserError
from trl_ext.sharding.choice import build_optimizer, decayed, strategy_of
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.optimizer_files import load_optimizer, save_optimizer, save_record


class NonFiniteError(UserError, RuntimeError):
    """A reward, log-probability, value, loss or gradient is NaN or infinite. The last checkpoint is unchanged."""


class Trained:
    """Weights that one optimizer steps, under the strategy that the launcher was configured for.

    Args:
        label: whose weights these are, in errors.
        models: the trained models by name, as shards call them.
        head: the critic's head, which is in float32, or None.
        groups: returns the parameter groups of the optimizer. It is called again when sharding has replaced them.
        args: the options.
        accelerator: accelerate's ``Accelerator``.
        updates: the number of updates of the run, over which the schedule runs.
        optimizer: an optimizer of these groups to use. By default ``args.optim`` names one.
        scheduler: a schedule to use. By default ``args.lr_scheduler_type`` names one.
    """

    def __init__(
        self,
        label: str,
        models: Mapping[str, nn.Module | None],
        head: nn.Module | None,
        groups: Callable[[], list[dict]],
        args: Any,
        accelerator: Any,
        updates: int,
        optimizer: Any = None,
        scheduler: Any = None,
    ):
        self.label, self.args = label, args
        kind = strategy_of(accelerator)
        present = {name: model for name, model in models.items() if model is not None}
        modules = [module for module in (*present.values(), head) if module is not None]

        def cut() -> list[dict]:
            return groups() if optimizer is not None else decayed(groups(), modules, args.weight_decay)

        self.strategy: Holder = kind(present, head, flat(cut()), args, accelerator)
        final = cut()
        self.of_policy = len(final) - sum(group["params"][0] not in {*groups()[0]["params"]} for group in final)
        """The number of the first groups, which are the policy's. Those of a critic follow."""
        self.parameters = flat(final)
        for parameter in self.parameters:
            parameter.requires_grad_(True)  # DeepSpeed leaves out what takes none now, such as the critic's adapter
        build = partial(build_optimizer, args=args, kind=kind)
        self.optimizer = self.strategy.optimizer_of(final, build if optimizer is None else lambda _: optimizer)
        self.optimizer.zero_grad(set_to_none=True)  # of a warm start, which must not enter the first step
        self.scheduler = scheduler or schedule_of(self.optimizer, args, updates)
        self.strategy.attach(self.optimizer)

    def step(self) -> float:
        """Clip the gradients, step the optimizer and clear the gradients.

        Returns:
            The gradient norm before clipping.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite. The weights are unchanged.
        """
        wanted = self.args.max_grad_norm
        norm = self.strategy.step(wanted if wanted and wanted > 0 else float("inf"))
        if not math.isfinite(norm):
            raise NonFiniteError(f"{self.label}: the gradient norm is {norm}; no step was taken")
        return norm

    def rates(self) -> dict[str, float]:
        """Return the present learning rate as ``lr``, and that of a critic that has one of its own as ``critic_lr``."""
        rates = [float(rate) for rate in self.scheduler.get_last_lr()]
        own = rates[self.of_policy :] if self.args.value_learning_rate is not None else []
        return {"lr": rates[0], **({"critic_lr": own[0]} if own else {})}

    def save(self, folder: Path, in_shards: bool = False) -> None:
        """Write the optimizer and the schedule into ``folder``, where the weights are. All processes that share the
        weights call this together.

        ``in_shards`` leaves out what the strategy's shards have.
        """
        write = save_record if in_shards else save_optimizer
        write(self.strategy, folder, self.scheduler)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote into ``folder``, after the weights were loaded, or with them if they are in
        shards.

        All processes that share the weights call this together. Another strategy may have written it.

        Raises:
            CheckpointError: the files cannot be read, or they are not those of these weights.
        """
        load_optimizer(self.strategy, folder, self.scheduler)
        if isinstance(self.scheduler, LambdaLR):  # the rate of a run that is longer now is that of its new length
            rates = [
                base * factor(self.scheduler.last_epoch)
                for base, factor in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(self.scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.scheduler._last_lr = rates


def schedule_of(optimizer: Any, args: Any, updates: int) -> Any:
    """Return the schedule ``args.lr_scheduler_type`` of an optimizer's learning rates.

    Each of its groups has the schedule that it would have alone: an end or a least rate (``lr_end``, ``min_lr``) is
    that of each group, and not of the one whose rate is the optimizer's default.

    Raises:
        ValueError: the schedule cannot be made for a group's rate.
    """

    def alone(some: Any) -> Any:
        return get_scheduler(
            args.lr_scheduler_type,
            some,
            num_warmup_steps=args.get_warmup_steps(updates),
            num_training_steps=updates,
            scheduler_specific_kwargs=cast(Any, args.lr_scheduler_kwargs) or None,
        )

    # a rate of 0 stays 0, and some schedules would divide by it
    rates = [float(group["lr"]) or 1.0 for group in optimizer.param_groups]
    each = [alone(torch.optim.SGD([torch.zeros(1)], lr=rate)) for rate in rates]
    if not all(isinstance(schedule, LambdaLR) for schedule in each):
        return alone(optimizer)
    return LambdaLR(optimizer, [schedule.lr_lambdas[0] for schedule in each])


def flat(groups: list[dict]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer's groups, in order."""
    return [parameter for group in groups for parameter in group["params"]]
