"""Warm start: brief supervised training on dialogues that an imperfect oracle plays.

Tiny random models know neither the questions nor the form of an answer. An oracle that is wrong with probability
``wrong`` therefore plays the protocol, and every policy learns to say what the oracle said. Everything that a team
reaches beyond this comes from reinforcement learning.

Agents may learn different things. One may know a single skill of the task, and one may often say what another said. A
team of such specialists knows together what no member knows, and can only gain by learning when to listen.
"""

import random

import torch
from tqdm.auto import tqdm

from maporl.config.schema import PupilSection, WarmStartSection
from maporl.engines.base import Request
from maporl.engines.scripted import ScriptedEngine
from maporl.engines.transcript import conversations
from maporl.protocols.base import Protocol
from maporl.rollout.driver import RolloutDriver, SpeakerSpec
from maporl.tasks.base import Task
from maporl.team.team import Policy, Team
from maporl.types import Dialogue
from trl_ext.master_weights import MasterAdamW
from trl_ext.ppo_options import GREEDY
from trl_ext.token_batch import PADDING


def warm_start(
    team: Team,
    task: Task,
    protocol: Protocol,
    section: WarmStartSection,
    seed: int,
    speakers: tuple[str, ...] | None = None,
    quiet: bool = False,
) -> None:
    """Train every trainable policy of the ``speakers`` for ``section.steps`` steps, in place.

    Args:
        team: the agents and their policies.
        task: the questions, and the oracle's answers.
        protocol: the protocol that the oracle plays.
        section: steps, batch size, learning rate, and what each agent learns to say.
        seed: the seed of questions and answers.
        speakers: the agents that play. By default the whole team plays.
        quiet: whether to hide the progress bar.
    """
    names = speakers or team.names()
    rng = random.Random(seed)

    pupils = {name: section.pupil(name) for name in names}

    def script(request: Request) -> str:
        if moves := request.ask.tags.get("taught"):
            return rng.choice(moves)
        return _written(task, request, pupils[request.ask.agent], rng)

    policies = [p for p in team.policies.values() if p.trainable and set(p.agents) & set(names)]
    optimizers = {p.name: MasterAdamW(_parameters(p), lr=section.learning_rate) for p in policies}
    engine, specs = ScriptedEngine(script), {name: SpeakerSpec("scripted", _policies(team, name)) for name in names}
    for step in tqdm(range(section.steps), desc="warm start", disable=quiet, leave=False, dynamic_ncols=True):
        examples = [task[rng.randrange(len(task))] for _ in range(section.batch_size)]
        dialogues = RolloutDriver(task, protocol, specs, {"scripted": engine}, GREEDY).play(examples)
        for policy in policies:
            _step(policy, optimizers[policy.name], dialogues, 1.0 - step / section.steps, section.learning_rate)


def _written(task: Task, request: Request, pupil: PupilSection, rng: random.Random) -> str:
    """Return what a pupil says: what another agent said, the answer by its own skill, or a right or wrong answer.

    All pupils say answers, and hints and critiques are answers too. So whatever a pupil hears can be repeated.
    """
    others = [u for u in request.heard if u.agent != request.ask.agent]
    if pupil.gives_in and others and rng.random() < pupil.gives_in:
        return rng.choice(others).words()
    right = rng.random() >= pupil.wrong
    if pupil.skill is not None and right:
        return task.write_by_skill(request.example, pupil.skill)
    return task.write_answer(request.example, rng, right)


def _policies(team: Team, agent: str) -> tuple[str, ...]:
    return tuple(p.name for p in team.policies_of[agent]) if agent in team.policies_of else (agent,)


def _parameters(policy: Policy) -> list[torch.nn.Parameter]:
    with policy.active():
        return [p for p in policy.model.parameters() if p.requires_grad]


def _step(
    policy: Policy, optimizer: torch.optim.Optimizer, dialogues: list[Dialogue], left: float, rate: float
) -> None:
    """Make one optimizer step on the conversations of the policy's agents, with the loss on their own utterances."""
    spoken = [
        conversation
        for d in dialogues
        for agent in policy.agents
        for conversation in conversations(d, agent, policy.name, policy.tokenizer, policy.stop_ids)
    ]
    rows = [(ids, mask) for ids, mask in spoken if any(mask)]
    if not rows:  # the policy's agents gave no answers
        return
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), width), PADDING)
    labels = torch.full((len(rows), width), -100)
    for row, (ids, mask) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
    for group in optimizer.param_groups:
        group["lr"] = rate * left
    with policy.active() as model:
        device = model.device
        loss = model(input_ids=input_ids.to(device), labels=labels.to(device), use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
