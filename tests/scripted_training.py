"""The trainer's own steps (play, score, assign) with scripted answers: what a recipe really trains on.

A fault in a method seldom lies in one function, so the recipes are tested from the dialogue to the advantage of each token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file, tiny_version
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.transformers import reply_of
from maporl.runs.build import build_trainer
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.training.update_batch import TeamUpdateBatch
from maporl.types import Utterance
from maporl.validation.load import from_dict
from trl_ext.ppo_options import Decoding
from trl_ext.sampling import Sampled


class TokenScript(Engine):
    """Answers with the texts of a script, as tokens of the policy that would have answered."""

    def __init__(self, policies: dict, script: Callable[[Request], str]):
        self.policies, self.script = policies, script

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one scripted reply for each request, in order."""
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Reply:
        policy = self.policies[request.policy]
        prompt = request.transcript.add_messages(request.ask.messages, policy.tokenizer, policy.stop_ids)
        ids = policy.tokenizer.encode(self.script(request), add_special_tokens=False)
        return reply_of(request, policy, prompt, Sampled([*ids, min(policy.stop_ids)], None))


@dataclass
class Row:
    """An utterance that is trained on: the advantage of its first token, and its weight in the loss."""

    policy: str
    utterance: Utterance
    advantage: float
    weight: float


def recipe_values(name: str, folder, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe's own file with tiny models, without the reward that the tiny version adds."""
    values = tiny_version(name, str(folder))
    values["reward"]["sources"] = read_yaml(recipe_file(name)).get("reward", {}).get("sources", {"label": 1.0})
    del values["warm_start"]
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return values


def scripted_trainer(values: dict[str, Any], script: Callable[[Request], str]) -> MultiAgentPPOTrainer:
    """Return a trainer all of whose agents answer with ``script(request)``."""
    trainer = build_trainer(from_dict(values, "test"), quiet=True)
    engine = TokenScript(trainer.team.policies, script)
    for name in trainer.engines:
        trainer.engines[name] = engine
    return trainer


def played(trainer: MultiAgentPPOTrainer) -> TeamUpdateBatch:
    """Return the next update's batch after playing, scoring and assigning advantages."""
    return trainer.advantage(trainer.score(trainer.collected()))


def rows(batch: TeamUpdateBatch) -> list[Row]:
    """Return what every policy is trained on, in the order of its token batch."""
    found = []
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            utterance = batch.samples[policy][sample].utterance
            first = tokens.advantages[i][tokens.sampled_mask[i]][0]
            found.append(Row(policy, utterance, float(first), float(tokens.weight[i])))
    return found
