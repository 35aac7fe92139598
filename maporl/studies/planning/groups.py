"""From a configuration to the groups that a cluster would hold: their models, and their work in an update."""

from collections.abc import Collection
from dataclasses import replace

from maporl.advantages.baselines import baseline_of
from maporl.config.schema import AgentSection, Config
from maporl.errors import ConfigError
from maporl.integrations.ray import groups as backend
from maporl.integrations.ray.section import ClusterSection
from maporl.protocols import policy_names
from maporl.rollout.branching import BRANCHINGS
from maporl.run import ResolvedRun
from maporl.studies.planning.estimates import Work
from maporl.studies.planning.placements import Group
from maporl.team.memory import adapter_parameters, shape_of
from trl_ext.learning.critics import CRITICS
from trl_ext.models.shape import Shape

BETWEEN = 100
"""Tokens around the answers that an agent hears, which nothing else says."""


def groups_of(
    config: Config,
    dialogues: int | None = None,
    question: int = 200,
    answer: int | None = None,
    heard: int | None = None,
) -> list[Group]:
    """Return the groups of a run: a base model with its adapters, or a policy with all of its weights.

    A group that does not learn has engines alone, and so has one that does not play, such as that of a judge.

    Args:
        config: the configuration.
        dialogues: those of an update. By default what the batch and the branching of one process make.
        question: the tokens of a first prompt.
        answer: the tokens of a mean answer. By default half of ``ppo.response_length``, which is the longest.
        heard: the tokens that are new to an agent before a later answer. By default the answers of the other agents,
            and 100.

    Raises:
        ConfigError: a policy is a tiny model, or has a central critic, or ``answer`` is above ``ppo.response_length``.
    """
    run = ResolvedRun(config)
    players, turns, longest = run.speakers, run.protocol.turns, config.ppo.response_length
    if answer is not None and answer > longest:
        raise ConfigError(
            f"--answer {answer}: a mean answer cannot be longer than the longest, ppo.response_length: {longest}; give "
            "fewer tokens, or set ppo.response_length"
        )
    mean = answer or max(1, longest // 2)
    played = dialogues or config.questions_per_update() * BRANCHINGS[config.branching.how].dialogues(
        config.branching, [len(players)] * turns
    )
    listens = heard if heard is not None else (len(players) - 1) * mean + BETWEEN
    owners: dict[str, str] = {}
    speaks: dict[str, int] = {}
    for name, section in config.agents.items():
        for policy in policy_names(name, section, config) if section.weights else ():
            owners.setdefault(policy, name)
            speaks[policy] = speaks.get(policy, 0) + (name in players)
    groups = []
    for name, group in backend.groups_of(replace(config, cluster=ClusterSection())).items():
        sections = {policy: config.agents[owners[policy]] for policy in group.policies}
        learning = [policy for policy, section in sections.items() if section.trainable and speaks[policy]]
        algorithms = {policy: config.of(owners[policy]) for policy in learning}
        critics = {_critic(policy, own) for policy, own in algorithms.items()}
        losses = [own.ppo for own in algorithms.values()] or [config.ppo]
        work = Work(
            played * sum(speaks[policy] for policy in group.policies),
            turns,
            question,
            listens,
            mean,
            longest,
            max(ppo.num_ppo_epochs for ppo in losses),
            any(ppo.kl_coef for ppo in losses),
            any(CRITICS[critic].trunks > 1 for critic in critics),
            sum(ppo.num_ppo_epochs * ppo.num_mini_batches for ppo in losses),
        )
        agents = [sections[policy] for policy in learning or group.policies]
        base = str(agents[0].model)
        groups.append(Group(name, model_of(agents), work, tuple(group.policies), bool(learning), base))
    return groups


def _critic(policy: str, config: Config) -> str:
    """Return the kind of a policy's critic, which must not be a central one."""
    if not baseline_of(config.advantage).needs_critic:
        return "none"
    kind = config.training.critic
    if kind == "central":
        raise ConfigError(f"plan: policy {policy!r} has a central critic, which is not planned for; use critic: head")
    return kind


def model_of(sections: Collection[AgentSection]) -> Shape:
    """Return the sizes of the model of agents that share one. Its parameters are counted, without weights.

    Args:
        sections: those of the agents. Where they have adapters, each has its own.

    Raises:
        ConfigError: the model is a tiny one.
    """
    section = next(iter(sections))
    if section.tiny is not None or section.model is None:
        raise ConfigError("plan: tiny models need no cluster; give the agents models by agents.NAME.model")
    adapters = sum(adapter_parameters(s) for s in sections if s.lora or s.adapter)
    return replace(shape_of(section), bytes=2, adapters=adapters)  # learners and engines read them in bfloat16
