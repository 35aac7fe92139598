"""Dialogues that a test writes down: the credits that a rule makes of them, and the advantages."""

from collections import defaultdict
from itertools import count

import torch

from maporl.advantages import AdvantageConfig
from maporl.advantages.batch import COLUMNS
from maporl.rewards.rules import build_rules
from maporl.training.assign import Advantages
from maporl.training.samples import Columns
from maporl.types import Dialogue, Example, Utterance
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.ppo.options import PPOOptions


def dialogue(*entries, prompt=0, rollout=0):
    """A dialogue with one utterance for each entry (agent, turn, parents, options)."""
    utterances = []
    for number, (agent, turn, parents, options) in enumerate(entries):
        utterances.append(Utterance(number, agent, agent, turn, number, [], "", parents=tuple(parents), **options))
    return Dialogue(Example("e", "q", "a"), utterances, prompt=prompt, rollout=rollout)


def apply(entry, dialogues, credits):
    """What one rule of a configuration makes of the credits."""
    (rule,) = build_rules([entry])
    return rule(dialogues, credits)


def assigned(dialogues, gamma, lam, token_gamma, token_lam, returns="bi_level_gae"):
    """Return the advantages and returns of dialogues, each a list of (agent, values, score) in speaking order."""
    said = [(r, n, *turn) for r, dialogue in enumerate(dialogues) for n, turn in enumerate(dialogue)]
    rows = build_token_batch(
        [Completion([1, 2], [3] * len(values), True, "row", score=s) for _, _, _, values, s in said], "cpu"
    )
    turns = defaultdict(count)
    columns = [
        Columns(
            (r, n), score,
            {
                **dict.fromkeys(COLUMNS), "policy": "p", "prompt": 0, "rollout": r, "agent": agent, "turn": next(turns[r, agent]), "order": n,
                "action": "", "tokens": len(values), "seconds": 0.0,
            },
        )
        for r, n, agent, values, score in said
    ]  # fmt: skip
    for i, (_, _, _, values, _) in enumerate(said):
        rows.values[i, rows.sampled_mask[i]] = torch.tensor(values)
    config = AdvantageConfig(returns=returns, baseline="critic", scale="none", key=(), gamma=gamma, lam=lam)
    Advantages(config, {"p": PPOOptions(gamma=token_gamma, lam=token_lam, kl_coef=0.0)}, {"p"}).assign(
        {"p": rows}, {"p": columns}
    )
    picked = [rows.sampled_mask[i] for i in range(len(said))]
    return [[column[i][mask].tolist() for i, mask in enumerate(picked)] for column in (rows.advantages, rows.returns)]
