"""Check an advantage: its slots, and the columns that they need."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from maporl.advantages.baselines import baseline_of
from maporl.advantages.batch import TurnBatch
from maporl.advantages.estimator import check_columns, estimate
from maporl.advantages.returns import return_of
from maporl.advantages.scales import scale_of
from maporl.advantages.transforms import Whiten, build_transforms
from maporl.config.agents import place_of
from maporl.config.imports import is_import, named_imports
from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig
from maporl.errors import Fault, refused
from maporl.run import ResolvedRun
from trl_ext.ppo.options import PPOOptions

_PERSISTENT = ("agent", "role", "game", "turn")


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield slots that exclude each other, columns that are not recorded, and critics that are missing.

    Raises:
        ConfigError: a transform does not exist, or has a wrong option.
    """
    config = run.config.advantage
    yield from refused(lambda: check_columns(config, recorded_columns(run)))
    transforms = build_transforms(config, f"{run.where}: advantage")
    per_token = any(transform.per_token for transform in transforms)
    yield from _returns_and_baseline(config)
    per_utterance = transforms or config.ddof == 0 or config.unit != "row" or config.singleton != "error"
    if return_of(config).per_token and per_utterance:
        yield Fault(
            "advantage",
            f"returns {config.returns} runs over tokens, whitened with ddof 1; post, ddof: 0, unit: rollout and "
            "singleton: zero need one number per utterance: set advantage.returns: utterance, or remove them",
        )
    if per_token and len(transforms) > 1:
        yield Fault("advantage.post", "cumulative_kl works on tokens and stands alone", "remove the others")
    yield from _added_terms(config, per_token)
    yield from _critics(run)
    yield from refused(lambda: _try_own(run))


def _try_own(run: ResolvedRun) -> None:
    """Compute advantages by slots and transforms of the user's own, of two questions with four dialogues each.

    The second question pays all dialogues alike. What the columns hold is made up.

    Raises:
        ConfigError: a slot or a transform fails, or returns anything but one finite number for each row.
    """
    config = run.config.advantage
    if return_of(config).per_token or not any(key.startswith("advantage.") for key in named_imports(run.config)):
        return
    rows = [(prompt, rollout, agent) for prompt in range(2) for rollout in range(4) for agent in run.speakers]
    prompts, rollouts, agents = ([*column] for column in zip(*rows, strict=True))
    columns: dict[str, Any] = {name: [1] * len(rows) for name in recorded_columns(run)}
    columns |= dict.fromkeys(("agent", "role", "policy"), agents) | {"prompt": prompts, "rollout": rollouts}
    columns |= dict.fromkeys(("parent", "caller"), [None] * len(rows))
    reward = [0.0 if prompt else float(rollout) for prompt, rollout, _ in rows]
    own = tuple(entry for entry in config.post if is_import(entry_name(entry)))
    batch = TurnBatch(reward, reward if baseline_of(config).needs_critic else None, parts={"score": reward}, **columns)
    estimate(batch, replace(config, post=own, singleton="zero"))


def recorded_columns(run: ResolvedRun) -> list[str]:
    """Return the columns of a :class:`maporl.advantages.TurnBatch` that the run records."""
    config, protocol = run.config, run.protocol
    always = ["prompt", "rollout", "agent", "turn", "order", "parent", "action", "tokens", "seconds", "policy"]
    roles = ["role"] if protocol.roles or any(agent.role for agent in config.agents.values()) else []
    forks = ["state"] if config.branching.how != "independent" else []
    tasks = ["task"] if config.task.get("name") == "mixture" else []
    return list(dict.fromkeys([*always, *roles, *forks, *tasks, *sorted(protocol.records)]))


def _returns_and_baseline(config: AdvantageConfig) -> Iterator[Fault]:
    returns, baseline = return_of(config), baseline_of(config)
    if returns.needs_critic and not baseline.needs_critic:
        what = f"returns {config.returns} needs a critic's values, but baseline is {config.baseline!r}"
        yield Fault("advantage", what, "set advantage.baseline: critic")
    if baseline.reads_after and (returns.needs_critic or returns.per_token):
        what = f"baseline {config.baseline} reads the critic after an utterance, and returns {config.returns} before it"
        yield Fault("advantage", what, "set advantage.returns: utterance (or reward_to_go, tree)")
    if returns.per_token and config.baseline != "none" and not baseline.needs_critic:
        what = f"returns {config.returns} goes with baseline critic or none, got {config.baseline!r}"
        remedy = "for a baseline over groups set advantage.returns: utterance (or reward_to_go, tree)"
        yield Fault("advantage", what, remedy)
    if config.multi_objective_aggregation == "normalize_then_sum" and (returns.needs_critic or returns.per_token):
        what = f"normalize_then_sum compares the rewards of utterances, and returns {config.returns} does not"
        yield Fault("advantage.multi_objective_aggregation", what, "set advantage.returns: utterance")
    if baseline.remembers and (passing := [name for name in config.key if name not in _PERSISTENT]):
        what = f"baseline {config.baseline} keeps a mean for each {list(config.key)}, and no {passing[0]!r} comes again"
        yield Fault("advantage", what, f"use columns of {list(_PERSISTENT)}")


def _added_terms(config: AdvantageConfig, per_token: bool) -> Iterator[Fault]:
    """Yield the terms of ``plus`` that do not compare rows; ``per_token`` says whether a transform runs over tokens."""
    for number, term in enumerate(config.plus):
        added = term.within(config)
        if return_of(added).needs_critic or return_of(added).per_token or baseline_of(added).needs_critic:
            what = f"returns {added.returns} with baseline {added.baseline} needs a critic or runs over tokens"
            remedy = "what is added compares rows, as returns: reward_to_go with baseline: mean"
            yield Fault(f"advantage.plus.{number}", what, remedy)
        if baseline_of(added).remembers:
            what = f"baseline {added.baseline} keeps means between updates"
            yield Fault(f"advantage.plus.{number}", what, "use mean")
    if config.plus and (return_of(config).per_token or per_token):
        what = f"it adds numbers of utterances, and {config.returns} or post runs over tokens"
        yield Fault("advantage.plus", what, "leave one of them out")


def check_algorithms(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what the algorithms of several agents exclude of each other: critics that nothing or only others read, and
    discounts that differ in one chain of answers."""
    algorithms = {name: run.config.of(name) for name in run.learners}
    policies = {name: run.config.agents[name].policy or name for name in algorithms}
    read = {policies[name] for name, own in algorithms.items() if baseline_of(own.advantage).needs_critic}
    reading = [name for name in algorithms if policies[name] in read]  # a policy's critic is that of all its agents
    shared = [name for name in reading if algorithms[name].training.critic == "central"]
    chained: dict[str, str] = {}
    for name, own in algorithms.items():
        if name not in reading:
            key, baseline = place_of(name, "training.critic", run.config), own.advantage.baseline
            if run.config.agents[name].algorithm.critic not in (None, "none"):
                what = f"{name!r} reads no critic's values, because its advantage has baseline {baseline}"
                yield Fault(key, what, "leave it out, or set baseline: critic")
            elif shared and own.training.critic == "central":
                what = f"'central' is one critic of {', '.join(shared)} and {name}, and {name} reads no values"
                yield Fault(key, what, f"set agents.{name}.algorithm.critic: none, or give each a critic of its own")
        if return_of(own.advantage).per_token and return_of(own.advantage).along == "dialogue":
            first = chained.setdefault(str(own.advantage), name)
            for option in ("gamma", "lam", "lam_alpha", "lam_critic"):
                mine, theirs = (getattr(algorithms[n].ppo, option) for n in (name, first))
                if mine != theirs:
                    what = (
                        f"returns {own.advantage.returns} runs through the answers of {first} and {name}, which have "
                    )
                    what += f"{theirs!r} and {mine!r}"
                    yield Fault(f"ppo.{option}", what, "give them one, or another advantage.returns")


def _critics(run: ResolvedRun) -> Iterator[Fault]:
    """Yield agents without a critic where the advantage cannot be computed without one."""
    # token_gae can: without values it is the discounted sum of the rewards to come
    config, returns = run.config.advantage, return_of(run.config.advantage)
    if not baseline_of(config).needs_critic or (returns.per_token and not returns.needs_critic):
        return
    for name in run.learners if run.config.training.critic == "none" else ():
        what = f"returns {config.returns} with baseline critic needs a critic, but agent {name!r} has none"
        yield Fault("advantage", what, "set training.critic: head, or another advantage.baseline")


OF_A_QUESTION = frozenset({"prompt", "rollout", "parent", "caller", "state", "seed"})
"""A group with one of these columns in its key is a part of one question, in which all rewards are often equal."""


def scaled_noise(advantage: AdvantageConfig, ppo: PPOOptions) -> Iterator[Fault]:
    """Yield a KL or a critic's error that would be divided by its own spread in the groups of a question.

    The KL is part of rewards that are scaled within a question, or a critic's values are; or the KL is both in the loss
    and in the advantage.
    """
    in_reward = ppo.kl_coef != 0 and ppo.kl_in == "reward"
    for place, divides, remedy, config, key in _scaled_groups(advantage):
        of_a_question = sorted(OF_A_QUESTION.intersection(key))
        if not of_a_question:
            continue
        baseline = baseline_of(config)
        if in_reward:
            what = (
                f"{divides} divides by the spread of each group by {list(key)}, and ppo.kl_in: reward has made the KL "
                f"(kl_coef {ppo.kl_coef:g}) a part of what is compared. Where all answers of a group earn the same, "
                "only the KL differs, and its noise would become advantages of 1 and -1"
            )
            yield Fault(place, what, f"set ppo.kl_in: loss with ppo.kl_estimator: k3, or {remedy}")
        if baseline.needs_critic and (baseline.over != "group" or divides == "whiten"):
            what = (
                f"{divides} divides by the spread of each group by {list(key)}, and baseline {config.baseline} leaves "
                "the critic's error. Where all answers of a question earn the same, only this error differs, and "
                "would become advantages of 1 and -1"
            )
            yield Fault(place, what, f"leave {', '.join(of_a_question)} out of the key, or {remedy}")
    transforms = build_transforms(advantage)
    if ppo.kl_coef != 0 and ppo.kl_in == "loss" and any(transform.per_token for transform in transforms):
        what = f"cumulative_kl takes the KL (kl_coef {ppo.kl_coef:g}) off advantages, and ppo.kl_in: loss adds it too"
        yield Fault("advantage.post", what, "set ppo.kl_in: reward, or leave cumulative_kl out")


def _scaled_groups(
    advantage: AdvantageConfig,
) -> Iterator[tuple[str, str, str, AdvantageConfig, Sequence[str]]]:
    """Yield what is divided by a group's spread: its place, the divisor, how to omit it, the advantage, the key."""
    terms = [
        ("advantage", advantage),
        *((f"advantage.plus.{n}", t.within(advantage)) for n, t in enumerate(advantage.plus)),
    ]
    for place, config in terms:
        if scale_of(config).over == "group":
            yield place, f"scale {config.scale}", f"{place}.scale: none", config, config.key
    for transform in build_transforms(advantage):
        if isinstance(transform, Whiten):
            yield "advantage.post", "whiten", "leave whiten out", advantage, transform.key
