"""From annotated token rows of all policies to their advantages, whichever slots the configuration names."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from maporl.advantages.baselines import BaselineState
from maporl.advantages.batch import TurnBatch
from maporl.advantages.estimator import Estimates, estimate_all
from maporl.advantages.returns import TOKEN_RETURNS
from maporl.advantages.transforms import CumulativeKL, build_transforms
from maporl.config.schema import AdvantageConfig
from maporl.training.samples import TrainingSample
from maporl.types import Dialogue, Utterance
from trl_ext import maths
from trl_ext.metrics import Metrics
from trl_ext.ppo_options import PPOOptions
from trl_ext.token_advantages import row_metrics, token_gae, token_kl, token_rewards, whiten_groups
from trl_ext.token_batch import TokenBatch


@dataclass
class Place:
    """A row of the TurnBatch: which utterance it is, and where among the policies' token rows, if it is trained on."""

    dialogue: Dialogue
    utterance: Utterance
    policy: str = ""
    row: int = -1


def assign(
    rows: dict[str, TokenBatch],
    answers: Mapping[str, list[TrainingSample]],
    config: AdvantageConfig,
    options: PPOOptions,
    state: BaselineState,
    critics: Collection[str] = (),
    dialogues: Sequence[Dialogue] = (),
) -> tuple[dict[str, Metrics], dict[str, torch.Tensor]]:
    """Fill in ``advantages``, ``returns``, ``weight`` of annotated ``rows``; returns statistics, and which rows count.

    ``critics`` names the policies that have one. ``dialogues``: where a post needs everybody, who else spoke is found here.
    """
    if not rows:
        return {}, {}
    places = [Place(s.dialogue, s.utterance, p, i) for p, own in answers.items() for i, s in enumerate(own)]
    if config.returns in TOKEN_RETURNS:
        _number_groups(rows, places, config)
        _over_tokens(rows, places, config, options, critics)
        metrics = {name: row_metrics(own, options) for name, own in rows.items()}
        if config.scale != "none":
            whiten_groups(list(rows.values()))
    else:
        if any(post.needs_everybody for post in build_transforms(config)):
            places += _others(places, dialogues)
        _over_rows(rows, places, config, options, state)
        metrics = {name: row_metrics(own, options) for name, own in rows.items()}
    if options.aggregation == "per_main_rollout":
        for name, own in answers.items():
            rows[name].weight *= len(own) / len({(s.dialogue.prompt, s.dialogue.rollout) for s in own})
    return metrics, _counting(rows)


def turn_batch(places: list[Place], reward: list[float], value: list[float] | None) -> TurnBatch:
    """The columns of what was said, a row each."""
    said = [(p.dialogue, p.utterance) for p in places]
    number = {_name(d, u): i for i, (d, u) in enumerate(said)}

    def tag(name: str) -> list[Any] | None:
        column = [u.tags.get(name) for _, u in said]
        return column if any(value is not None for value in column) else None

    return TurnBatch(
        reward=reward,
        value=value,
        prompt=[d.prompt for d, _ in said],
        rollout=[d.rollout for d, _ in said],
        agent=[u.agent for _, u in said],
        role=[u.role for _, u in said],
        turn=[u.turn for _, u in said],
        order=[u.order for _, u in said],
        parent=[_parent(d, u, number) for d, u in said],
        caller=[None if u.caller is None else number.get(_name(d, d.utterances[u.caller])) for d, u in said],
        action=[u.text for _, u in said],
        game=tag("game"),
        seed=tag("seed"),
        state=tag("state"),
    )


def _others(places: list[Place], dialogues: Sequence[Dialogue]) -> list[Place]:
    """Utterances with a credit that nobody learns from."""
    known = {_name(p.dialogue, p.utterance) for p in places}
    others: dict[tuple, Place] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if "credit" in u.rewards and (name := _name(dialogue, u)) not in known:
                others.setdefault(name, Place(dialogue, u))
    return list(others.values())


def _name(dialogue: Dialogue, utterance: Utterance) -> tuple:
    """Copies of one utterance, in dialogues that were forked after it, have one name."""
    if utterance.sample is not None:
        return ("sample", dialogue.prompt, utterance.sample)
    return (dialogue.prompt, dialogue.rollout, utterance.id)


def _parent(dialogue: Dialogue, utterance: Utterance, number: Mapping[tuple, int]) -> int | None:
    """The row before this one on its branch: of the last step before it with a row, the same agent's, else the last."""
    earlier = [u for u in dialogue.utterances if u.order < utterance.order and _name(dialogue, u) in number]
    if not earlier:
        return None
    step = [u for u in earlier if u.order == max(e.order for e in earlier)]
    own = [u for u in step if u.agent == utterance.agent]
    return number[_name(dialogue, (own or step)[-1])]


def _number_groups(rows: dict[str, TokenBatch], places: list[Place], config: AdvantageConfig) -> None:
    """Tokens that are whitened together: within the key, an agent's, or all."""
    key = {"agent_std": ("agent",), "batch_std": ()}.get(config.scale, config.key)
    batch = turn_batch(places, [0.0] * len(places), None)
    for number, members in enumerate(batch.groups(key)):
        for i in members:
            rows[places[i].policy].group[places[i].row] = number


def _over_tokens(
    rows: dict[str, TokenBatch],
    places: list[Place],
    config: AdvantageConfig,
    options: PPOOptions,
    critics: Collection[str],
) -> None:
    if config.returns == "token_gae":
        for name, own in rows.items():
            token_gae(own, options, name in critics)
        return
    rewards = {name: token_rewards(own, options) for name, own in rows.items()}
    batch = turn_batch(places, [0.0] * len(places), None)
    for trajectory in batch.trajectories(by_agent=False):
        spoken = [(rows[places[i].policy], rewards[places[i].policy], places[i].row) for i in trajectory]
        masks = [own.action_mask[i] for own, _, i in spoken]
        chain = torch.cat([r[i][m] for (_, r, i), m in zip(spoken, masks, strict=True)]).unsqueeze(0)
        values = torch.cat([own.values[i][m] for (own, _, i), m in zip(spoken, masks, strict=True)]).unsqueeze(0)
        everything = torch.ones_like(chain, dtype=torch.bool)
        advantages, returns = maths.gae(chain, values, everything, options.gamma, options.lam)
        lengths = [int(m.sum()) for m in masks]
        for (own, _, i), mask, a, r in zip(
            spoken, masks, advantages[0].split(lengths), returns[0].split(lengths), strict=True
        ):
            own.advantages[i, mask], own.returns[i, mask] = a, r


def _over_rows(
    rows: dict[str, TokenBatch], places: list[Place], config: AdvantageConfig, options: PPOOptions, state: BaselineState
) -> None:
    """One number for each utterance, at each of its own tokens; its critic answers for its first token alone."""
    first = {name: _first_action(own.action_mask) for name, own in rows.items()}
    per_token = any(isinstance(post, CumulativeKL) for post in build_transforms(config))
    worth = {n: (own.score if per_token else token_rewards(own, options).sum(1)).tolist() for n, own in rows.items()}
    reward = [worth[p.policy][p.row] if p.policy else p.utterance.rewards["credit"] for p in places]
    value = None
    if config.baseline == "critic":
        value = [float(rows[p.policy].values[p.row][first[p.policy][p.row]][0]) if p.policy else 0.0 for p in places]
    estimates = estimate_all(turn_batch(places, reward, value), config, state, scaled=not per_token)
    _spread(rows, places, estimates, first)
    if per_token:
        for own in rows.values():
            to_come = token_kl(own, "k1").flip(1).cumsum(1).flip(1)
            own.advantages = torch.where(own.action_mask, own.advantages - options.kl_coef * to_come, 0.0)
        if config.scale != "none":
            _number_groups(rows, [place for place in places if place.policy], config)
            whiten_groups(list(rows.values()))


def _spread(
    rows: dict[str, TokenBatch], places: list[Place], estimates: Estimates, first: Mapping[str, torch.Tensor]
) -> None:
    for own in rows.values():
        own.advantages, own.returns = torch.zeros_like(own.values), torch.zeros_like(own.values)
    for i, place in enumerate(places):
        if not place.policy:
            continue
        own = rows[place.policy]
        own.advantages[place.row] = float(estimates.advantages[i]) * own.action_mask[place.row]
        own.returns[place.row] = float(estimates.targets[i]) * first[place.policy][place.row]
        own.weight[place.row] = float(estimates.weights[i])
    for name, own in rows.items():
        own.value_mask = first[name]


def _first_action(mask: torch.Tensor) -> torch.Tensor:
    """True at each row's first action token, whose position's value is that of the state before the answer."""
    return mask & (mask.cumsum(1) == 1)


def _counting(rows: dict[str, TokenBatch]) -> dict[str, torch.Tensor]:
    """The rows whose weight is not 0, by policy, without policies that have none."""
    kept = {name: own.weight.nonzero().flatten() for name, own in rows.items()}
    return {name: index for name, index in kept.items() if len(index)}
