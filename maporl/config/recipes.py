"""Recipes: published methods as configurations, with notes on what is exact and what differs. No torch.

They are ordinary YAML files (``configs/ppo/recipes``) with a block ``recipe:`` that says where the method comes from.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from maporl.config.imports import unknown
from maporl.config.parse import extended_files, read_yaml, recipe_files, validated
from maporl.config.safe_yaml import read_yaml_file
from maporl.errors import ConfigError
from maporl.sections import section
from maporl.text import markdown_table


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
    "no labels": ("A team, and questions without labels", "comas"),
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
    if sources.keys() & {"majority", "peer_majority", "peer"}:
        return "no labels"
    if sources.keys() & {"judge", "arena", "annotator", "verifier"}:
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


@dataclass(frozen=True)
class Found:
    """A recipe that was found, the words of the query that it has, in their order, and how well it fits."""

    name: str
    words: tuple[str, ...]
    score: float


WEIGHTS = {"name": 4.0, "title": 3.0, "prefer": 3.0, "tags": 2.0, "notes": 1.0}
"""How much a word counts, by where a recipe has it. Tags are its agents, their roles, and what it chooses on each
:data:`Axis`; notes are the paper and what the card says is exact and differs."""
_NO_WORDS = frozenset(
    {"a", "an", "and", "are", "as", "at", "by", "for", "from", "in", "is", "it", "its", "no", "not", "of", "on", "or"}
    | {"the", "to", "who", "with"}
)
_ENDINGS = ("ers", "ing", "er", "ed", "s")


def find(query: str) -> list[Found]:
    """Return the recipes that have words of ``query``, best first.

    A word is found in another form too: "tests" in "tester". Those that have more of the words come first, then those
    that have them in a more telling place, where a word counts less the more recipes have it, and then by name.

    Raises:
        ConfigError: no recipe has any of the words.
    """
    asked = list(dict.fromkeys(_words(query)))
    texts = {name: {place: set(_words(text)) for place, text in _texts(name).items()} for name in recipe_files()}
    places = {
        name: {word: [p for p, has in words.items() if any(_alike(word, other) for other in has)] for word in asked}
        for name, words in texts.items()
    }
    common = {word: sum(bool(where[word]) for where in places.values()) for word in asked}
    found = []
    for name, where in places.items():
        score = sum(WEIGHTS[p] * math.log(1 + len(texts) / common[word]) for word in asked for p in where[word])
        if has := tuple(word for word in asked if where[word]):
            found.append(Found(name, has, score))
    if not found:
        raise ConfigError(
            f"recipes find: no recipe has a word of {query!r:.80}; try who plays (planner, judge), what they do "
            "(debate, search, code) or what you have (labels, a verifier), or see: maporl recipes list"
        )
    return sorted(found, key=lambda one: (-len(one.words), -one.score, one.name))


def _texts(name: str) -> dict[str, str]:
    """Return the texts of a recipe in which words are looked for, by their place in :data:`WEIGHTS`."""
    card, values = card_of(name), read_yaml(recipe_file(name))
    roles = [str((section or {}).get("role", "")) for section in values["agents"].values()]
    axes = axes_of(name)
    tags = [*values["agents"], *roles, *axes.values(), NEEDS[axes["need"]][0], values.get("task", {}).get("name", "")]
    notes = f"{card.paper} {card.exact} {card.differs}"
    return {"name": name, "title": card.title, "prefer": card.prefer, "tags": " ".join(tags), "notes": notes}


def _words(text: str) -> list[str]:
    """Return the words of a text. What it is without is a word of its own.

    >>> _words("Questions without labels, and no critic")
    ['questions', 'without-labels', 'without-critic']
    """
    joined = re.sub(r"\b(?:no|without)\s+(?:an? |any |the )?(?=\w)", "without-", text.lower())
    return [word for word in re.findall(r"(?:without-)?[a-z0-9]+", joined) if word not in _NO_WORDS]


def _alike(word: str, other: str) -> bool:
    """Return whether two words are forms of one.

    >>> _alike("tests", "tester"), _alike("coder", "code"), _alike("planner", "plan"), _alike("art", "arena")
    (True, True, True, False)
    """
    short, long = sorted((_stem(word), _stem(other)), key=len)
    return word == other or (len(short) >= 3 and long.startswith(short) and len(long) - len(short) <= 1)


def _stem(word: str) -> str:
    ending = next((e for e in _ENDINGS if word.endswith(e) and len(word) - len(e) >= 3), "")
    return word.removesuffix(ending)


def index_page() -> str:
    """Return the paper index as Markdown: every recipe with its source. ``docs/recipes.md`` is this text."""
    lines = [
        "# Recipes: an index of papers",
        "",
        "Each recipe is one file in `configs/ppo/recipes/` that fits on one screen.",
        "",
        "```text",
        'maporl recipes find "planner coder tests"',
        "maporl recipes list",
        "maporl recipes show cory",
        "maporl recipes try cory",
        "```",
        "",
        "`find` looks for words in names, titles, agents and notes. `list` orders recipes by what you have, and",
        "`--by credit`, `loop` or `protocol` by what an answer is compared with, how policies take turns to learn, or",
        "who speaks when. `show` prints the card and the file. `try` runs three updates, or two rounds, with tiny",
        "models, and leaves a page. `maporl train NAME KEY=VALUE ...` runs it.",
        "",
        "## What do you have?",
        "",
        *markdown_table(("you have", "start with", "others"), map(_need_row, NEEDS, families().values())),
        "",
        'Status is "exact" where the formulas were read in the paper or its code and tests pin them, "reconstructed" where a part of them was',  # noqa: E501
        'not available and was filled in, and "inspired" where only the idea is the paper\'s. Cost is the number of tokens that pass through',  # noqa: E501
        "models in an update, divided by that of plain PPO with the same team and questions: one dialogue for each, a "
        "critic on its trunk, a",
        "reference, one epoch. A token that is trained counts three times. `python benchmarks/recipe_costs.py` counts "
        "it with tiny models.",
        "",
        *(line for need, names in families().items() for line in _family(need, names)),
        "## All recipes",
        "",
        'A variant of another recipe has only what differs. To change one axis, change one line. A setting that "Exact" does not name, such',  # noqa: E501
        'as a length or a learning rate, may differ from the paper without being listed. "Inert" names options that have no effect',  # noqa: E501
        'in this recipe, and says why: changing one of them, and nothing else, changes nothing. "Checked by" names the tests that pin a recipe\'s numbers.',  # noqa: E501
        '"Corrected" says what an earlier form of the recipe did wrongly although its card called it right, and until when.',  # noqa: E501
        "(`python -m maporl.config.recipes` writes this page.)",
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


def families() -> dict[str, list[str]]:
    """Return the recipes by what a user has (:data:`NEEDS`), in its order: the one to start with, and then by name."""
    by_need = by_axis("need")
    return {need: [start, *(name for name in by_need[need] if name != start)] for need, (_, start) in NEEDS.items()}


def _need_row(need: str, names: Sequence[str]) -> Sequence[str]:
    words, start = NEEDS[need]
    return f"[{words}](#{_anchor(words)})", f"[`{start}`](#{start})", str(len(names) - 1)


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def _family(need: str, names: Sequence[str]) -> list[str]:
    """Return the section of a family: its recipes, with what they are preferred for first."""
    return [
        f"### {NEEDS[need][0]}",
        "",
        *markdown_table(
            ("prefer it when", "recipe", "status", "cost", "credit", "loop", "protocol"),
            map(_index_row, names),
        ),
        "",
    ]


def _bases(name: str) -> list[str]:
    """Return the recipe that the file of a recipe extends, if it extends one."""
    nearest = extended_files(recipe_file(name))[:1]
    return [file.stem for file in nearest if file.stem in recipe_files()]


def _index_row(name: str) -> Sequence[str]:
    card, axes = card_of(name), axes_of(name)
    chosen = (axes[axis] for axis in ("credit", "loop", "protocol"))
    return card.prefer, f"[`{name}`](#{name})", card.status, card.cost_in_words, *chosen


if __name__ == "__main__":
    print(index_page(), end="")
