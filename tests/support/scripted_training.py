"""The trainer's own steps (play, score, assign) with scripted answers: what a recipe really trains on.

A fault in a method seldom lies in one function, so the recipes are tested from the dialogue to the advantage of each
token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.text import reply_of, token_request
from maporl.loops.run import Loop
from maporl.loops.shards import dialogues_of
from maporl.methods.games.plan_path import STEPS, distances, step_to
from maporl.methods.tiny_versions import tiny_version
from maporl.run import ResolvedRun
from maporl.runs.build import build_trainer
from maporl.training.samples import TeamUpdateBatch
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.types import Dialogue, Utterance
from maporl.validation.load import from_dict
from trl_ext.ppo import maths
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.options import Sampled


class TokenScript(Engine):
    """Answers with the texts of a script, as tokens of the policy that would have answered, at most ``most`` of them.

    A script may also give the tokens themselves.

    With ``tells_logprobs`` it says how likely each of them was to that policy.
    """

    def __init__(
        self,
        policies: dict,
        script: Callable[[Request], str | list[int]],
        most: int | None = None,
        tells_logprobs: bool = False,
    ):
        self.policies, self.script, self.most, self.tells_logprobs = policies, script, most, tells_logprobs

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        return [self._reply(request, decoding) for request in requests]

    def _reply(self, request: Request, decoding: Decoding) -> Reply:
        policy = self.policies[request.policy]
        asked = token_request(request, policy.voice, decoding, 1)
        ids = self.script(request)
        if isinstance(ids, str):
            ids = [*policy.tokenizer.encode(ids, add_special_tokens=False), min(policy.stop_ids)][: self.most]
        told = logprobs_alone(policy, asked.prompt_ids, ids, decoding.temperature) if self.tells_logprobs else None
        return reply_of(request, policy.voice, asked, Sampled(ids, told))


@torch.no_grad()
def logprobs_alone(policy: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    """Return what a plain forward of one row says of each token of a response."""
    logits = policy.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    return maths.token_logprobs(logits, torch.tensor(response), temperature).tolist()


@dataclass
class Row:
    """An utterance that is trained on: the advantage of its first token, and its weight in the loss."""

    policy: str
    utterance: Utterance
    dialogue: Dialogue
    advantage: float
    weight: float


def recipe_values(name: str, folder, questions: int | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe's own file with tiny models, without the reward that the tiny version adds.

    With ``questions`` an update plays so many, and takes one step a pass.
    """
    values = tiny_version(name, str(folder))
    if "label" in values["reward"]["sources"]:
        values["reward"]["sources"] = read_yaml(recipe_file(name)).get("reward", {}).get("sources", {"label": 1.0})
    del values["warm_start"]
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    if questions is not None:
        values["training"]["per_device_train_batch_size"] = questions
        one_minibatch(values)
    return values


def one_minibatch(values: dict[str, Any]) -> None:
    """Let every policy take one step a pass, however few questions there are."""
    values["ppo"]["num_mini_batches"] = 1
    for agent in values["agents"].values():
        agent.get("algorithm", {}).get("ppo", {}).pop("num_mini_batches", None)


def scripted_trainer(values: dict[str, Any], script: Callable[[Request], str]) -> MultiAgentPPOTrainer:
    trainer = build_trainer(from_dict(values, "test"), quiet=True)
    engine = TokenScript(trainer.team.policies, script, tells_logprobs="distill" in values.get("reward", {}))
    for name in trainer.engines:
        trainer.engines[name] = engine
    return trainer


def played(trainer: MultiAgentPPOTrainer) -> TeamUpdateBatch:
    """Return the next update's batch after playing, scoring and assigning advantages."""
    return trainer.advantage(trainer.score(trainer.collected()))


def rows(batch: TeamUpdateBatch) -> list[Row]:
    """Return what every policy is trained on, in the order of its token batch."""
    found, dialogues = [], {id(u): dialogue for dialogue in batch.dialogues for u in dialogue.utterances}
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            utterance = batch.samples[policy][sample].utterance
            first = tokens.advantages[i][tokens.sampled_mask[i]][0]
            dialogue = dialogues[id(utterance)]
            found.append(Row(policy, utterance, dialogue, float(first), float(tokens.weight[i])))
    return found


def sampled(values: dict[str, Any], folder: Path, script: Callable[[Request], str]) -> list[Dialogue]:
    """Return what a loop's own sampling makes of a recipe, with ``script`` in place of the models."""
    loop = Loop(ResolvedRun(from_dict(values, "test")), [], True, print)
    loop._write_initial(loop.folder / "initial")
    player = loop._player(loop.folder / "initial")
    for name in player.engines:
        player.engines[name] = TokenScript(player.team.policies, script)
    loop._player = lambda weights: player
    (folder / "sample").mkdir()
    loop._sample(folder / "sample", 1, loop.folder / "initial")
    return dialogues_of(folder / "sample")


def shown(request):
    """The text that a player is shown."""
    return request.ask.tags["state"].partition(": ")[2]


def grid_of(text, token, separator):
    """The token's cell, and the moves to the goal from every free cell."""
    lines = text.split(separator)
    cells = {(r, c): mark for r, line in enumerate(lines) for c, mark in enumerate(line)}
    free = {cell for cell, mark in cells.items() if mark != "#"}
    here, goal = (next(cell for cell, mark in cells.items() if mark == wanted) for wanted in (token, "G"))
    return here, free, distances(goal, free)


def route(request: Request) -> list[str]:
    """The shortest plan to the goal of path_plans."""
    here, free, far = grid_of(shown(request).partition("\nProposed")[0], "S", "\n")
    plan: list[str] = []
    while far[here]:
        plan.append(next(move for move in STEPS if far.get(step_to(here, move, free), 99) < far[here]))
        here = step_to(here, plan[-1], free)
    return plan
