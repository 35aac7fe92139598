"""Recipes that extend another one: what their cards and their files may leave out, and what they may not."""

import pytest

from maporl.config.parse import extended_files, read_yaml, recipe_files
from maporl.config.recipes import card_of
from maporl.config.safe_yaml import parse_yaml

VARIANTS = {
    name: base.stem
    for name, file in recipe_files().items()
    for base in extended_files(file)[:1]
    if base.stem in recipe_files()
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_says_only_what_differs_and_its_card_names_what_it_extends(name):
    """There are such recipes: MAAC is IAC with a central critic."""
    assert VARIANTS["maac"] == "iac"
    base, values = VARIANTS[name], read_yaml(recipe_files()[VARIANTS[name]])
    written = parse_yaml(recipe_files()[name].read_text(encoding="utf-8"), name)
    assert written.pop("extends") == f"{base}.yaml"
    card = written.pop("recipe")
    assert card["exact"].startswith(f"As in {base}, ") and card["title"] != card_of(base).title
    for key in ("paper", "url", "evidence", "status"):
        assert card.get(key) != values["recipe"][key], f"{key}: the card of {base} says it"
    for section, options in written.items():
        same = {key for key, value in options.items() if values.get(section, {}).get(key, "nothing") == value}
        assert not same, f"{section}: {same} of {name} are as in {base}"
