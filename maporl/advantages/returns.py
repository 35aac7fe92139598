"""Returns: the number that each utterance earns before it is compared with others.

Every return is a function ``(batch, config) -> [N]``. The two GAE returns have the critic's values subtracted already,
so they need the baseline "critic".
"""

from typing import Any

import torch
from torch import Tensor

from maporl.advantages.batch import TurnBatch
from maporl.advantages.slots import Return, find
from maporl.config.schema import AdvantageConfig


def utterance(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """Return the utterance's own reward."""
    return batch.tensor(batch.reward)


def reward_to_go(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """Return ``R_t = sum_{k>=t} gamma^(k-t) r_k`` over the agent's own turns in a dialogue."""
    rewards = batch.tensor(batch.reward)
    result = torch.zeros_like(rewards)
    for rows in batch.trajectories(by_agent=True):
        later = torch.zeros((), dtype=rewards.dtype)
        for i in reversed(rows):
            later = result[i] = rewards[i] + config.gamma * later
    return result


def trajectory(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """Return the sum of what the agent earned in the dialogue, which is the same for all its turns (GiGPO, ReMA)."""
    rewards = batch.tensor(batch.reward)
    result = torch.zeros_like(rewards)
    for rows in batch.trajectories(by_agent=True):
        result[rows] = rewards[rows].sum()
    return result


def turn_gae(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """Return GAE over the agent's own turns: ``delta_t = r_t + gamma V_{t+1} - V_t``. V is 0 after the last turn.

    Raises:
        ValueError: the batch has no values.
    """
    return _gae(batch, config, batch.trajectories(by_agent=True))


def chain_gae(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """Return GAE through agents and turns (MARFT, arXiv 2504.16129): the next state is that of the next speaker.

    Raises:
        ValueError: the batch has no values.
    """
    return _gae(batch, config, batch.trajectories(by_agent=False))


def tree(batch: TurnBatch, config: AdvantageConfig) -> Tensor:
    """Return ``R_j = r_j + gamma * mean(R of the rows whose parent is j)`` (MAGRPO, arXiv 2508.04652).

    Raises:
        ValueError: parents were not recorded, or a row is its own ancestor.
    """
    parents = batch.column("parent", "returns: tree")
    result = batch.tensor(batch.reward)
    children: dict[int, list[int]] = {}
    for i in batch.rows():
        if parents[i] is not None:
            children.setdefault(parents[i], []).append(i)
    # a child may have a smaller row number than its parent, so rows are visited by depth, deepest first
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
    "utterance": Return(utterance),
    "reward_to_go": Return(reward_to_go, along="agent"),
    "trajectory": Return(trajectory, along="agent"),
    "turn_gae": Return(turn_gae, along="agent", needs_critic=True),
    "chain_gae": Return(chain_gae, along="dialogue", needs_critic=True),
    "tree": Return(tree, along="tree", needs=("parent",)),
    "token_gae": Return(None),
    "token_chain_gae": Return(None, along="dialogue", needs_critic=True),
    "token_agent_gae": Return(None, along="agent", needs_critic=True),
    "bi_level_gae": Return(None, along="agent", needs_critic=True, two_levels=True),
}
"""``token_gae`` is PPO's GAE within an answer. ``token_chain_gae`` runs through all answers of a dialogue (MARFT's
TPPO), and ``token_agent_gae`` through all answers of an agent in it: the last token of an answer is followed by the
first of the agent's next one, and what others, tools and environments said between them is left out (skip-observation
GAE of SAO, arXiv 2607.07508). ``bi_level_gae`` runs over an agent's answers first, and then within each of them
(VAGEN). The trainer computes these four."""


def return_of(config: AdvantageConfig, where: str = "returns") -> Return:
    """Return the return that a configuration names.

    Raises:
        ValueError: the name is unknown.
    """
    return find(RETURNS, Return, config.returns, where)
