"""Which role moves a policy that speaks in several: the gradient of each role's loss, and its share.

A policy that agents of several roles share is trained on one sum of losses. A role with long answers, many turns or
large advantages can then decide nearly alone where it moves (arXiv 2605.24202 compares shared with isolated policies).
"""

from collections.abc import Mapping

import torch

from maporl.training.samples import TeamUpdateBatch
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Metrics

FURTHEST = 4.0
"""The largest factor by which ``balance: role`` makes a role's loss larger or smaller."""


class RoleGradients:
    """Measures the gradient of each role's loss, before an update's first step, and balances them.

    Args:
        every: measure in every so many updates; 0: only where ``balance`` needs it.
        balance: ``role`` weighs the rows of each role so that all roles have gradients of one norm.
    """

    def __init__(self, every: int, balance: str):
        self.every, self.balances = every, balance == "role"

    def measure(self, batch: TeamUpdateBatch, learning: Learning) -> dict[str, Metrics]:
        """Return, for each policy with rows of several roles, the norm of each role's gradient and its share of their
        sum.

        An agent without a role counts as a role of its name. The gradient is that of the first minibatch: the part of
        its loss that is the role's, at the policy's parameters. The share of a role is its norm divided by the sum over
        roles. Nothing is trained by it. With ``balance: role`` the weights of the rows of a role are then multiplied by
        the mean norm divided by the role's, at most by :data:`FURTHEST` and at least by its inverse.
        """
        due = self.balances or (self.every and batch.number % self.every == 0)
        if not due:
            return {}
        found = {}
        for policy, rows in batch.token_batches.items():
            said = [batch.samples[policy][sample].utterance for sample in rows.sample.tolist()]
            spoken = [u.role or u.agent for u in said]
            roles = sorted(set(spoken))
            if len(roles) < 2 or policy in batch.critic_only:
                continue
            number = torch.tensor([roles.index(role) for role in spoken])
            norms = learning.gradient_norms(policy, rows, number, batch.number - 1)
            found[policy] = _shares(dict(zip(roles, norms, strict=True)))
            if self.balances:
                factors = _factors(norms)
                rows.weight = rows.weight * torch.tensor(factors)[number].to(rows.weight)
                found[policy] |= {f"role/{role}/weight": factor for role, factor in zip(roles, factors, strict=True)}
        return found


def _shares(norms: Mapping[str, float]) -> Metrics:
    whole = sum(norms.values())
    shares = {f"role/{role}/grad_share": norm / whole for role, norm in norms.items()} if whole else {}
    return {f"role/{role}/grad_norm": norm for role, norm in norms.items()} | shares


def _factors(norms: list[float]) -> list[float]:
    """Return what makes all norms their mean. A role without a gradient keeps its weight."""
    present = [norm for norm in norms if norm > 0]
    mean = sum(present) / len(present) if present else 0.0
    return [min(FURTHEST, max(1 / FURTHEST, mean / norm)) if norm > 0 else 1.0 for norm in norms]
