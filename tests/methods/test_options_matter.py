"""Every option that a recipe sets changes what three updates measure, or its card says why it cannot."""

import re

import pytest
from perturbed_training import Perturbed, is_option, leaves

from maporl.advantages import scales
from maporl.config.parse import read_yaml
from maporl.config.recipes import card_of, recipe_file, recipe_files

QUICK = ("g_ra",)
"""Groups and penalties; a gate."""
EACH = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in recipe_files()]


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_every_option_of_a_recipe_acts_or_its_card_says_why_not(name, tmp_path):
    assert sorted(Perturbed(name, tmp_path / "run").inert()) == sorted(card_of(name).inert)


@pytest.mark.slow
def test_an_option_that_nobody_reads_is_found(tmp_path, monkeypatch):
    spread = scales._spread
    monkeypatch.setattr(scales, "_spread", lambda values, weights, ddof: spread(values, weights, 1))
    recipe = Perturbed("dr_mas", tmp_path / "run")
    found = {
        name: recipe.acts(name, *other)
        for name, *other in recipe.options()
        if name in ("advantage.ddof", "advantage.scale")
    }
    assert found == {"advantage.ddof": False, "advantage.scale": True}


@pytest.mark.slow
def test_a_clip_is_inert_where_a_batch_is_one_step(tmp_path):
    recipe = Perturbed("grpo", tmp_path / "run")
    assert recipe.differs(recipe.changed(("ppo", "cliprange"), 2e-4)) is False
    assert recipe.differs(recipe.changed(("ppo", "num_ppo_epochs"), 2)) is True


# what a card may call exact, and the keys that must then be in the recipe's file
NAMED = {
    r"\bclip": ("ppo.cliprange",),
    r"\bclip\w* at 0\.2 and 0\.28": ("ppo.cliprange", "ppo.cliprange_high"),
    r"dual clip": ("ppo.dual_clip",),
    r"\bKL\b": ("ppo.kl_coef",),
    r"KL [^.]* (off|in) the reward": ("ppo.kl_in",),
    r"KL in the loss": ("ppo.kl_in",),
    r"importance weights": ("ppo.tis_cap",),
    r"unbiased": ("advantage.ddof",),
    r"\b[Tt]oken GAE": ("ppo.lam",),
    r"\bratio\b": ("ppo.ratio",),
    r"token mean": ("ppo.aggregation",),
    r"value weight": ("ppo.vf_coef",),
    r"learning rate": ("training.learning_rate",),
    r"(?<!cross-)entropy": ("ppo.entropy_coef",),
    r"Huber": ("ppo.value_loss",),
    r"minibatches|one step|[a-z]+ steps\b": ("ppo.num_mini_batches",),
    r"passes": ("ppo.num_ppo_epochs",),
    r"discount(ed)? (by|0)": ("advantage.gamma|advantage.plus.0.gamma|reward.discount",),
    r"exchange roles": ("schedule.swap.every",),
    r"threshold": ("reward.rules.0.gate.threshold",),
}


@pytest.mark.parametrize("name", recipe_files())
def test_what_a_card_calls_exact_is_set_in_its_file(name):
    values = read_yaml(recipe_file(name))
    options, exact = {".".join(map(str, path)) for path in leaves(values) if is_option(path)}, card_of(name).exact
    for words, keys in NAMED.items():
        if re.search(words, exact):
            for key in keys:
                assert options & set(key.split("|")), (
                    f"{name}: its card says {words!r}, and its file does not set {key}"
                )


def test_an_inert_option_has_a_reason_and_is_in_the_file():
    for name in recipe_files():
        for option, reason in card_of(name).inert.items():
            assert reason[0].isupper() and reason.endswith("."), f"{name}: {option}"
