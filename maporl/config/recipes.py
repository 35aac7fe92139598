"""Recipes: published methods as configurations, with notes on what is exact and what differs. No torch.

They are ordinary YAML files (``configs/ppo/recipes``) with a block ``recipe:`` that says where the method comes from.
"""

from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args

from maporl.config.files import recipe_files
from maporl.config.imports import unknown
from maporl.config.numbers import section
from maporl.config.parse import extended_files, read_yaml, validated
from maporl.config.safe_yaml import read_yaml_file
from maporl.errors import ConfigError


@section()
class RecipeCard:
    """Where a method comes from, what the recipe reproduces exactly, and what differs from the paper.

    ``evidence`` says which sources were read. ``status`` is exact if the formulas were read there and tests pin them,
    reconstructed if a part of them was not available and was filled in, and inspired if only the idea is the paper's.
    ``prefer`` completes the sentence "Prefer it when ...". ``cost`` is how many times the tokens of plain PPO an update
    passes through models, as ``benchmarks/recipe_costs.py`` counts them; None: they have not been counted. A variant
    does not take it from the recipe that it extends. ``checked_by`` lists the tests that pin the recipe's numbers, by
    the names of their functions. ``inert`` names the options of the file that change nothing here if they alone are
    changed, each with the reason. A test changes every option, and fails if this list is not true. ``corrected`` says
    what an earlier form of the recipe did wrongly although its card called it right, and until when, for those who have
    results of that form.
    """

    title: str
    paper: str
    url: str
    evidence: str
    status: Literal["exact", "reconstructed", "inspired"]
    prefer: str
    exact: str
    differs: str
    checked_by: tuple[str, ...]
    cost: float | None = None
    inert: dict[str, str] = field(default_factory=dict, hash=False)
    corrected: str = ""

    @property
    def cost_in_words(self) -> str:
        """The cost as it is shown, with what stands for one that has not been counted."""
        return "not counted" if self.cost is None else f"{self.cost:g}"


def recipe_file(name: str) -> Path:
    """Return the file of the recipe ``name``.

    Raises:
        ConfigError: no recipe has this name.
    """
    files = recipe_files()
    if name not in files:
        raise ConfigError(f"recipes: {unknown(name, files)}")
    return files[name]


def card_of(name: str) -> RecipeCard:
    """Return the card of the recipe ``name``.

    Raises:
        ConfigError: no recipe has this name, or its card is incomplete.
    """
    path = recipe_file(name)
    written = read_yaml_file(path).get("recipe", {})
    card = read_yaml(path).get("recipe", {}) | {"cost": written.get("cost")}
    return validated(RecipeCard, card, f"{path.name}: recipe")


Axis = Literal["need", "credit", "loop", "protocol"]
"""What recipes can be listed by."""
NEEDS = {
    "one policy": ("One model, and questions with labels", "grpo_single"),
    "labels": ("A team, and questions with labels", "grpo"),
    "rows": ("A team and labels, and you would rather train on rows or pairs, by SFT or DPO", "malt"),
    "tools": ("Tools that agents call, documents that they search, or programs that tests run", "matpo_search"),
    "a judge": ("A judge or a verifier that scores what agents say", "mappa"),
    "a proposer": ("Few questions or none, so that an agent proposes them", "r_zero"),
    "a game": ("A game, or a world in which agents move", "spiral"),
}
"""The choices on the axis ``need``: what a user has, and the recipe to start with."""


def by_axis(axis: Axis) -> dict[str, list[str]]:
    """Return the names of the recipes by their choice on an axis.

    ``need`` is what a user must have, ``credit`` what an answer is compared with, ``loop`` how policies take turns to
    learn, and ``protocol`` who speaks when.
    """
    names: dict[str, list[str]] = {}
    for name in recipe_files():
        names.setdefault(axes_of(name)[axis], []).append(name)
    return dict(sorted(names.items()))


def axes_of(name: str) -> dict[str, str]:
    """Return what the file of a recipe chooses on each :data:`Axis`, in words.

    Raises:
        ConfigError: no recipe has this name.
    """
    values = read_yaml(recipe_file(name))
    choices = (_need(values), _credit(values), _loop(values), values["protocol"]["name"])
    return dict(zip(get_args(Axis), choices, strict=True))


def _need(values: dict[str, Any]) -> str:
    protocol, sources = values["protocol"]["name"], values.get("reward", {}).get("sources", {})
    if protocol in ("game", "world"):
        return "a game"
    if protocol == "propose":
        return "a proposer"
    if sources.keys() & {"judge", "arena", "annotator", "verifier", "peer"}:
        return "a judge"
    if "loop" in values:
        return "rows"
    if values.get("environments") or values.get("tools") or protocol == "code":
        return "tools"
    return "one policy" if len(values["agents"]) == 1 else "labels"


def _credit(values: dict[str, Any]) -> str:
    if stages := values.get("loop", {}).get("stages"):
        return "rows by " + ", ".join(dict.fromkeys(name for stage in stages for name in stage.get("build", ())))
    advantage = values.get("advantage", {})
    baseline, by = advantage.get("baseline", "critic"), ", ".join(advantage.get("key", ()))
    if baseline == "critic":
        return f"critic, {advantage.get('returns', 'token_gae')}"
    return f"group {baseline} by {by}" if by and baseline != "none" else "no baseline"


def _loop(values: dict[str, Any]) -> str:
    if stages := values.get("loop", {}).get("stages"):
        return "outer loop: " + ", then ".join(stage["train"] for stage in stages)
    turns = [key for key in values.get("schedule", {}) if key != "freeze"]
    return "on-policy" + "".join(f", {key}" for key in turns)


def index_page() -> str:
    """Return the paper index as Markdown: every recipe with its source. ``docs/recipes.md`` is this text."""
    lines = [
        "# Recipes: an index of papers",
        "",
        "Each recipe is one file in `configs/ppo/recipes/` that fits on one screen. `maporl recipes show NAME` prints "
        "it, with the files that it",
        "extends: a variant of another recipe has only what differs.",
        "`maporl recipes try NAME` runs three updates of it, or two rounds, with tiny models, shows their rewards and "
        "leaves a page.",
        '`maporl train NAME KEY=VALUE ...` runs it. To change one axis, change one line. A setting that "Exact" does not name, such',  # noqa: E501
        'as a length or a learning rate, may differ from the paper without being listed. "Inert" names options that have no effect',  # noqa: E501
        'in this recipe, and says why: changing one of them, and nothing else, changes nothing. "Checked by" names the tests that pin a recipe\'s numbers.',  # noqa: E501
        '"Corrected" says what an earlier form of the recipe did wrongly although its card called it right, and until when.',  # noqa: E501
        "(`python -m maporl.config.recipes` writes this page.)",
        "",
        'Status is "exact" where the formulas were read in the paper or its code and tests pin them, "reconstructed" where a part of them was',  # noqa: E501
        'not available and was filled in, and "inspired" where only the idea is the paper\'s. Cost is the number of tokens that pass through',  # noqa: E501
        "models in an update, divided by that of plain PPO with the same team and questions: one dialogue for each, a "
        "critic on its trunk, a",
        "reference, one epoch. A token that is trained counts three times. `python benchmarks/recipe_costs.py` counts "
        "it with tiny models.",
        "`maporl recipes list --by need` (or `credit`, `loop`, `protocol`) lists recipes by what you need for them, "
        "by what an answer is",
        "compared with, by how policies take turns to learn, and by who speaks when.",
        "",
        "## Where to start",
        "",
        "| you have | start with | need | other recipes |",
        "|---|---|---|---|",
        *map(_need_row, NEEDS),
        "",
        "## All recipes",
        "",
        "| recipe | status | cost | need | credit | loop | protocol | prefer it when |",
        "|---|---|---|---|---|---|---|---|",
        *map(_index_row, recipe_files()),
        "",
    ]
    for name in recipe_files():
        card = card_of(name)
        lines += [
            f"## `{name}`",
            "",
            f"**{card.title}.** [{card.paper}]({card.url}). Evidence: {card.evidence}.",
            "",
            *(
                line
                for base in _bases(name)
                for line in (f"A variant of [`{base}`](#{base}), which its file extends.", "")
            ),
            f"Exact: {card.exact}",
            "",
            f"Differs: {card.differs if card.differs.endswith('.') else card.differs + '.'}",
            "",
            *([f"Corrected: {card.corrected}", ""] if card.corrected else []),
            *(f"- Inert: `{option}`. {reason}" for option, reason in card.inert.items()),
            *([""] if card.inert else []),
            f"Checked by: {', '.join(f'`{test}`' for test in card.checked_by)}.",
            "",
        ]
    return "\n".join(lines)


def _need_row(need: str) -> str:
    (words, start), others = NEEDS[need], by_axis("need")[need]
    links = ", ".join(f"[`{name}`](#{name})" for name in others if name != start)
    return f"| {words} | [`{start}`](#{start}) | {need} | {links} |"


def _bases(name: str) -> list[str]:
    """Return the recipe that the file of a recipe extends, if it extends one."""
    nearest = extended_files(recipe_file(name))[:1]
    return [file.stem for file in nearest if file.stem in recipe_files()]


def _index_row(name: str) -> str:
    card = card_of(name)
    cells = (f"[`{name}`](#{name})", card.status, card.cost_in_words, *axes_of(name).values(), card.prefer)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(index_page(), end="")
