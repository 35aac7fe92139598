"""Returns: what each utterance is credited with, before anything is compared. Slots: ``(batch, config) -> [N]``.

The GAE returns are already relative to the critic's values: they go with the baseline "critic".
"""

from typing import Any

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.config.schema import AdvantageConfig


def utterance(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """The utterance's own reward."""
    return batch.tensor(batch.reward)


def reward_to_go(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """``R_t = sum_{k>=t} gamma^(k-t) r_k`` over the agent's own turns in a dialogue."""
    rewards = batch.tensor(batch.reward)
    result = torch.zeros_like(rewards)
    for rows in batch.trajectories(by_agent=True):
        later = torch.zeros((), dtype=rewards.dtype)
        for i in reversed(rows):
            later = result[i] = rewards[i] + config.gamma * later
    return result


def turn_gae(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """GAE over the agent's own turns: ``delta_t = r_t + gamma V_{t+1} - V_t``, V being 0 after the last one."""
    return _gae(batch, config, batch.trajectories(by_agent=True))


def chain_gae(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """GAE through agents and turns (MARFT, arXiv 2504.16129): the next state is the next speaker's decision."""
    return _gae(batch, config, batch.trajectories(by_agent=False))


def tree(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """``R_j = r_j + gamma * mean(R of the rows whose parent is j)`` (MAGRPO, arXiv 2508.04652)."""
    parents = batch.column("parent", "returns: tree")
    result = batch.tensor(batch.reward)
    children: dict[int, list[int]] = {}
    for i in batch.rows():
        if parents[i] is not None:
            children.setdefault(parents[i], []).append(i)
    # a child may stand before its parent: depth decides, deepest first
    for i in sorted(batch.rows(), key=lambda row: -_depth(row, parents)):
        if i in children:
            result[i] += config.gamma * torch.stack([result[c] for c in children[i]]).mean()
    return result


def _depth(row: int, parents: list[int | None]) -> int:
    seen = [row]
    while (above := parents[seen[-1]]) is not None:
        if above in seen:
            raise ValueError(f"TurnBatch.parent: row {above} is its own ancestor; expected a tree")
        seen.append(above)
    return len(seen) - 1


def _gae(batch: TurnBatch, config: AdvantageConfig, trajectories: list[list[int]]) -> Tensor:
    if batch.value is None:
        raise ValueError(f"returns: {config.returns} needs the column 'value': a critic's value before each utterance")
    rewards, values = batch.tensor(batch.reward), batch.tensor(batch.value)
    result = torch.zeros_like(rewards)
    for rows in trajectories:
        value = advantage = torch.zeros((), dtype=rewards.dtype)
        for i in reversed(rows):
            delta = rewards[i] + config.gamma * value - values[i]
            advantage = result[i] = delta + config.gamma * config.lam * advantage
            value = values[i]
    return result


RETURNS: dict[str, Any] = {
    "utterance": utterance,
    "reward_to_go": reward_to_go,
    "turn_gae": turn_gae,
    "chain_gae": chain_gae,
    "tree": tree,
}
TOKEN_RETURNS = ("token_gae", "token_chain_gae")
"""Returns that run over tokens, where the trainer has them: PPO's own within an answer, and through the answers of a
dialogue (MARFT's TPPO)."""
RELATIVE = ("turn_gae", "chain_gae")
"""Returns from which the critic's value is taken off already."""
