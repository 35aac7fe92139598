"""Where all answers earn the same, there is nothing to learn: a KL and a critic's error differ by chance, and must not
count.

Every utterance of an update is credited alike, with 0 or with 1. The KL to the reference and the critic's values are
random. Recipes that compare answers of a group then have no advantage that is not 0.
"""

import copy

import pytest
from invariant_runs import by_name, guess, random_words, values_of
from scripted_training import scripted_trainer

from maporl.advantages.baselines import baseline_of
from maporl.advantages.returns import return_of
from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file, recipe_files
from maporl.validation.load import load

QUICK = ("grpo", "dr_mas", "at_grpo_shared", "c3_assisted")
GROUPED = [
    name
    for name in recipe_files()
    if "loop" not in read_yaml(recipe_file(name)) and baseline_of(load(name).advantage).over == "group"
]
"""Recipes whose baseline is that of a group."""
UNEQUAL = {
    "rloo": "taken off each reward before it is compared",
    "decoupled_prover": "the KL is in the reward",
    "dr_mas_search": "a single call keeps its reward",
    "search_self_play": "so that its reward stays as it is",
    "rl_anything": "a step that only one dialogue reached keeps its reward",
}
"""Recipes in which equal rewards earn something, and why: no other one has a KL in what is not divided, or a group of
one that keeps its reward."""


def largest_advantage(values, paid):
    """The largest absolute advantage of an update all of whose utterances earn ``paid``."""
    trainer = scripted_trainer(copy.deepcopy(values), random_words(11))
    guess(trainer, by_name)
    batch = trainer.score(trainer.collected())
    apart = trainer.parts.advantage.multi_objective_aggregation == "normalize_then_sum"
    credit = paid * (sum(trainer.player.scorer.reward.sources.values()) if apart else 1.0)
    credited = [u for dialogue in batch.dialogues for u in dialogue.utterances if "credit" in u.rewards]
    assert credited
    for utterance in credited:
        utterance.rewards |= dict.fromkeys(utterance.rewards, paid) | {"credit": credit}
    batches = trainer.advantage(batch).token_batches.values()
    return max((float(rows.advantages[rows.sampled_mask].abs().max()) for rows in batches), default=0.0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in GROUPED]
)
def test_equal_rewards_earn_nothing_whatever_the_kl_and_the_critic_say(name, tmp_path):
    """Where a return adds up the rewards of turns, dialogues of unequal lengths earn equally much only if all earn
    0."""
    config = load(name).advantage
    adds_up = any(return_of(one).along != "utterance" for one in (config, *(t.within(config) for t in config.plus)))
    values = values_of(name, tmp_path)
    largest = max(largest_advantage(values, paid) for paid in ((0.0,) if adds_up else (0.0, 1.0)))
    assert largest > 1e-3 if name in UNEQUAL else largest == pytest.approx(0.0, abs=1e-5)
