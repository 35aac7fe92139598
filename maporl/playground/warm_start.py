"""Warm start: brief supervised training on dialogues that an imperfect oracle plays.

Tiny random models know neither the questions nor the form of an answer. A teacher that is wrong with probability
``wrong`` therefore plays the protocol, and every policy learns to say what the teacher said for its agents, each in its
role: what the protocol teaches there (:attr:`maporl.types.Ask.taught`), or else what the task writes for the role
(:meth:`maporl.Lessons.write_reply`). Everything that a team reaches beyond this comes from reinforcement learning.

Agents may learn different things. One may know a single skill of the task, and one may often say what another said. A
team of such specialists knows together what no member knows, and can only gain by learning when to listen.
"""

import random
from functools import partial

import torch
from tqdm.auto import tqdm

from maporl.config.schema import WarmStartSection
from maporl.engines.transcript import supervised_rows
from maporl.environments.build import TeamTools
from maporl.playground.teacher import is_taught, play_teacher
from maporl.protocols.base import Protocol
from maporl.rollout.agent_tools import tools_of_team
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks.base import Task
from maporl.team.team import Policy, Team
from trl_ext.ppo.batch import PADDING
from trl_ext.sharding.master_weights import MasterAdamW

DECAY = 0.01
"""Weight decay of a warm start, PyTorch's own. It is not the run's, because it is part of what a team begins with."""


def warm_start(
    team: Team,
    task: Task,
    protocol: Protocol,
    section: WarmStartSection,
    seed: int,
    speakers: tuple[str, ...] | None = None,
    quiet: bool = False,
    tools: TeamTools | None = None,
) -> None:
    """Train every trainable policy of the ``speakers`` for ``section.steps`` steps, in place.

    Args:
        team: the agents and their policies.
        task: the questions, and what is taught.
        protocol: the protocol that the teacher plays.
        section: steps, batch size, learning rate, and what each agent learns to say.
        seed: the seed of questions and answers.
        speakers: the agents that play. By default the whole team plays.
        quiet: whether to hide the progress bar.
        tools: the tools and environments, and what agents are given of them.

    Raises:
        ConfigError: the task cannot write what an agent says; names the agent and its role.
    """
    names = speakers or team.names()
    rng = random.Random(seed)
    tools = tools or TeamTools()
    may_call = tools_of_team(tools, team, 0, protocol, names)
    specs = {
        name: SpeakerSpec(
            "scripted", _policies(team, name), system=agent.system, role=agent.role, tools=may_call.get(name)
        )
        for name, agent in ((name, team.agents[name]) for name in names)
    }
    policies = [p for p in team.policies.values() if p.trainable and set(p.agents) & set(names)]
    optimizers = {p.name: MasterAdamW(_parameters(p), lr=section.learning_rate, weight_decay=DECAY) for p in policies}
    with tqdm(range(section.steps), desc="warm start", disable=quiet, leave=False, dynamic_ncols=True) as bar:
        for step in bar:
            examples = [task[rng.randrange(len(task))] for _ in range(section.batch_size)]
            dialogues = play_teacher(task, protocol, specs, section, rng, examples, tools.world)
            for policy in policies:
                # the last utterance of a turn that stands apart from a conversation may be taught or not
                rows = supervised_rows(policy, dialogues, may_call, partial(is_taught, task))
                if rows:
                    rate = (1.0 - step / section.steps) * section.learning_rate
                    _step(policy, optimizers[policy.name], rows, rate)


def _policies(team: Team, agent: str) -> tuple[str, ...]:
    return tuple(p.name for p in team.policies_of[agent]) if agent in team.policies_of else (agent,)


def _parameters(policy: Policy) -> list[torch.nn.Parameter]:
    with policy.active():
        return [p for p in policy.model.parameters() if p.requires_grad]


def _step(
    policy: Policy, optimizer: torch.optim.Optimizer, rows: list[tuple[list[int], list[bool]]], rate: float
) -> None:
    """Make one optimizer step on the agents' conversations, with the loss on their own utterances."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), width), PADDING)
    labels = torch.full((len(rows), width), -100)
    for row, (ids, mask) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with policy.active() as model:
        device = model.device
        loss = model(input_ids=input_ids.to(device), labels=labels.to(device), use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
