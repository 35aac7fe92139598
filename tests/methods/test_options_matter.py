"""Every option that a recipe sets changes what three updates measure, or its card says why it cannot."""

import pytest
from perturbed_training import Perturbed

from maporl.config.recipes import card_of, recipe_files


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_files())
def test_every_option_of_a_recipe_acts_or_its_card_says_why_not(name, tmp_path):
    assert sorted(Perturbed(name, tmp_path / "run").inert()) == sorted(card_of(name).inert)


@pytest.mark.slow
def test_a_clip_is_inert_where_a_batch_is_one_step(tmp_path):
    recipe = Perturbed("grpo", tmp_path / "run")
    assert recipe.differs(recipe.changed(("ppo", "cliprange"), 2e-4)) is False
    assert recipe.differs(recipe.changed(("ppo", "num_ppo_epochs"), 2)) is True
