"""Recipes: published methods as configurations, with what is exact in them and what differs. No torch.

They are YAML files like any other (``configs/ppo/recipes``), with a block ``recipe:`` of provenance.
"""

import string
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from maporl.config.files import recipe_files
from maporl.config.parse import read_yaml, unknown, validated
from maporl.config.schema import STRICT
from maporl.errors import ConfigError


@dataclass(frozen=True, config=STRICT)
class RecipeCard:
    """Where a method comes from (``evidence``: what of it was read), what is exact and what differs from the paper."""

    title: str
    paper: str
    url: str
    evidence: str
    exact: str
    differs: str


def recipe_file(name: str) -> Path:
    """The file of the recipe ``name``."""
    files = recipe_files()
    if name not in files:
        raise ConfigError(f"recipes: {unknown(name, files)}")
    return files[name]


def card_of(name: str) -> RecipeCard:
    """The provenance of the recipe ``name``."""
    path = recipe_file(name)
    return validated(RecipeCard, read_yaml(path).get("recipe", {}), f"{path.name}: recipe")


def tiny_version(name: str, output_dir: str) -> dict[str, Any]:
    """The values of a recipe with everything small: random models of characters, sums, three updates, on the CPU.

    The method's own choices (protocol, branching, reward, advantage, objective, schedule) stay what they are, but for sizes, a
    brief warm start, and how near a number is besides whether it is right.
    """
    values = read_yaml(recipe_file(name))
    kept = ("policy", "role", "system", "trainable", "critic", "lora")
    values["agents"] = {
        agent: {key: (own or {})[key] for key in kept if key in (own or {})} for agent, own in values["agents"].items()
    }
    # who is frozen has learned something before: a warm start teaches those that train, and the schedule freezes them then
    frozen = [agent for agent, own in values["agents"].items() if own.pop("trainable", True) is False]
    if frozen:
        schedule = values.setdefault("schedule", {})
        schedule["freeze"] = [*schedule.get("freeze", []), *({"agent": a, "first": 1, "last": 1000} for a in frozen)]
    tiny = {"alphabet": string.printable[:95] + "\n", "context": 8192, "hidden_size": 32, "layers": 1, "heads": 2}
    values["agent_defaults"] = {"tiny": tiny}
    if values["task"]["name"] != "episodes":
        values["task"] = {"name": "toy_sum", "largest": 9}
    for part in (values["protocol"], values["protocol"].get("options", {})):
        if "rounds" in part:
            part["rounds"] = min(part["rounds"], 3)
    branching = values.get("branching", {})
    branching |= {key: min(branching[key], 3) for key in ("group", "drafts") if key in branching}
    values["ppo"] = values.get("ppo", {}) | {"response_length": 6}
    values["training"] = values.get("training", {}) | {
        "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False, "use_cpu": True, "warmup_steps": 0,
    }  # fmt: skip
    # models that know nothing earn nothing, and groups of equals have no gradient
    values["warm_start"] = {"steps": 60, "batch_size": 8, "learning_rate": 5e-3}
    sources = values.setdefault("reward", {}).setdefault("sources", {"label": 1.0})
    if "label" in sources:
        values["reward"]["sources"] = sources | {"near": 1.0}
    return values | {"updates": 3, "output_dir": output_dir, "evaluation": {"questions": 4}}


def index_page() -> str:
    """The paper index: every recipe with its source, as Markdown. ``docs/recipes.md`` is this text."""
    lines = [
        "# Recipes: an index of papers",
        "",
        "Each recipe is one file in `configs/ppo/recipes/` that fits on one screen. `maporl recipes show NAME` prints it,",
        "`maporl recipes try NAME` runs three updates of it with tiny models, and `maporl train NAME KEY=VALUE ...` runs it. To change",
        "one axis, change one line. (`python -m maporl.config.recipes` writes this page.)",
        "",
    ]
    for name in recipe_files():
        card = card_of(name)
        lines += [
            f"## `{name}`",
            "",
            f"**{card.title}.** [{card.paper}]({card.url}). Evidence: {card.evidence}.",
            "",
            f"Exact: {card.exact}",
            "",
            f"Differs: {card.differs if card.differs.endswith('.') else card.differs + '.'}",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(index_page(), end="")
