"""Recipes: published methods as configurations, with notes on what is exact and what differs. No torch.

They are ordinary YAML files (``configs/ppo/recipes``) with a block ``recipe:`` that says where the method comes from.
"""

import copy
import string
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args

from maporl.config.files import recipe_files
from maporl.config.imports import unknown
from maporl.config.numbers import section
from maporl.config.parse import extended_files, read_yaml, validated
from maporl.config.safe_yaml import parse_yaml, read_yaml_text
from maporl.errors import ConfigError


@section()
class RecipeCard:
    """Where a method comes from, what the recipe reproduces exactly, and what differs from the paper.

    ``evidence`` says which sources were read. ``status`` is exact if the formulas were read there and tests pin them,
    reconstructed if a part of them was not available and was filled in, and inspired if only the idea is the paper's.
    ``prefer`` completes the sentence "Prefer it when ...". ``cost`` is how many times the tokens of plain PPO an update
    passes through models, as ``benchmarks/recipe_costs.py`` counts them; None: they have not been counted. A variant does not take it from the recipe that it extends. ``checked_by`` lists the tests that pin the
    recipe's numbers, by the names of their functions. ``inert`` names the options of the file that change nothing here if they alone are changed, each
    with the reason. A test changes every option, and fails if this list is not true. ``corrected`` says what an earlier form
    of the recipe did wrongly although its card called it right, and until when, for those who have results of that form.
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


BARE = {"intro": "", "line": "", "tags": "", "returned": "={text}", "failed": "={text}", "limit": "="}
"""The texts of calls for tiny models, which learn from examples how to call."""


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
    own = parse_yaml(read_yaml_text(path), str(path)).get("recipe", {})
    card = read_yaml(path).get("recipe", {}) | {"cost": own.get("cost")}
    return validated(RecipeCard, card, f"{path.name}: recipe")


def tiny_version(name: str, output_dir: str) -> dict[str, Any]:
    """Return the values of a recipe in a tiny version (see :func:`shrunk`).

    Raises:
        ConfigError: no recipe has this name.
    """
    return shrunk(read_yaml(recipe_file(name)), output_dir)


def shrunk(values: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Return a configuration in a tiny version: random character models, tiny questions, and three updates or two
    rounds on the CPU.

    The method's own choices (protocol, branching, reward, advantage, objective, schedule) stay. Only sizes and the
    periods of schedules are smaller. A brief warm start is added, and where answers are numbers the reward also measures how
    near they are. Teams that search HotpotQA search the facts of the task ``tiny_hops``. Teams that write programs write
    tiny ones.
    """
    values = copy.deepcopy(values)
    kept = ("policy", "policy_per", "role", "system", "trainable", "critic", "lora", "limits")
    defaults = values.get("agent_defaults", {})
    values["agents"] = {
        agent: {key: value for key, value in (defaults | (section or {})).items() if key in kept}
        for agent, section in values["agents"].items()
    }
    # a frozen agent must have learned something, so it takes part in the warm start and the schedule freezes it later
    frozen = [agent for agent, section in values["agents"].items() if section.pop("trainable", True) is False]
    if frozen and "loop" not in values:  # a loop has no schedule
        schedule = values.setdefault("schedule", {})
        schedule["freeze"] = [*schedule.get("freeze", []), *({"agent": a, "first": 1, "last": 1000} for a in frozen)]
    tiny: dict[str, Any] = {
        "alphabet": string.printable[:95] + "\n",
        "context": 8192,
        "hidden_size": 32,
        "layers": 1,
        "heads": 2,
    }
    values["agent_defaults"] = {"tiny": tiny}
    programs = values["protocol"]["name"] == "code"
    proposes = values["protocol"]["name"] == "propose"
    searches = values["task"]["name"] == "hotpotqa" and not proposes
    orchestrates = values["protocol"]["name"] == "orchestrate"
    if programs:
        values["task"] = {"name": "tiny_programs"}
    elif searches:
        values["agent_defaults"] |= {"call_format": "tags", "call_texts": BARE}
        values["task"] = {"name": "tiny_hops"}
    elif values["task"]["name"] == "mixture":
        small = ({"name": "toy_sum", "largest": 9}, {"name": "toy_times", "largest": 9})
        values["task"]["tasks"] = {name: small[i % 2] for i, name in enumerate(values["task"]["tasks"])}
    elif values["task"]["name"] != "episodes":
        values["task"] = {"name": "toy_sum", "largest": 9}
    if proposes:
        sums = {"name": "toy_sum", "largest": 3, "held_out": 0.3, "template": "{a}{op}{b}"}
        mixed = values["task"].get("tasks")
        values["task"] = {"name": "mixture", "tasks": dict.fromkeys(mixed, sums)} if mixed else sums
        tiny["alphabet"] = "0123456789+=?! "
        values["protocol"] |= {"tag": None, "propose": "{answer}?", "solve": "{question}="}
        if values["protocol"].get("vouch") == "judge":
            values["protocol"] |= {"rate": "{question}!", "mark": "{question}={answer}!"}
        if values["protocol"].get("vouch") == "tool":
            values["tools"] = {"calculator": {"use": "calculator"}}
            values["protocol"] |= {"check": "calculator", "check_argument": "expression", "check_about": []}
        if "judge" in values.get("reward", {}):
            tiny["alphabet"] += "Score:"
        if values["protocol"].get("vouch") == "stated":
            values["protocol"] |= {"tag": "q", "answer_tag": "a", "propose": "{answer}?<q><a>"}
            tiny["alphabet"] += "<q>/a"
    if values["protocol"]["name"] == "design":  # texts that tiny models can tell apart, and a plan of few characters
        values["protocol"] |= {
            "plan": "{question}?",
            "first": "{question}{instruction}:",
            "later": "{others};{question}{instruction}:",
            "quote": "{text}",
            "example": "A: go",
        }
    for part in (values["protocol"], values["protocol"].get("options", {})):
        if "rounds" in part:
            part["rounds"] = min(part["rounds"], 3)
    for part in values.get("schedule", {}).values():
        if isinstance(part, dict) and "every" in part:
            part["every"] = 1  # three updates must see it
    branching = values.get("branching", {})
    largest = 6 if "comparator_reward" in str(values.get("loop")) else 3  # half of the dialogues are a comparator's
    for key in {"group", "drafts"} & branching.keys():
        most = branching[key]
        branching[key] = [min(number, largest) for number in most] if isinstance(most, list) else min(most, largest)
    ppo = values.get("ppo", {})
    values["ppo"] = ppo | {
        "response_length": _shortest(values["protocol"], programs or searches or orchestrates),
        "num_mini_batches": min(ppo.get("num_mini_batches", 1), 2),
    }
    values["training"] = values.get("training", {}) | {
        "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False, "use_cpu": True, "warmup_steps": 0,
    }  # fmt: skip
    # random models earn no rewards, and without reward variance all gradients are 0
    values["warm_start"] = {"steps": 60, "batch_size": 8, "learning_rate": 5e-3}
    sources = values.setdefault("reward", {}).setdefault("sources", {"label": 1.0})
    if "label" in sources and not searches:
        values["reward"]["sources"] = sources | {"near": 1.0}
    if "loop" in values:
        values |= _shrunk_loop(values)
    if values["protocol"].get("vouch") == "sources":
        _without_verifier(values["reward"])
    if "verifier" in values["reward"]:
        own = values["reward"]["verifier"]
        own.pop("model", None)
        own["tiny"] = tiny | {"layers": 1}
        if "learn_every" in own:
            own |= {"learn_every": 1, "learning_rate": 1e-3}
    if "brevity" in values["reward"]:
        values["reward"]["brevity"] = {"tokens": values["ppo"]["response_length"]}
    length = {} if "loop" in values else {"updates": 3}
    return values | length | {"output_dir": output_dir, "evaluation": {"questions": 4}}


def _without_verifier(reward: dict[str, Any]) -> None:
    """Let ``brevity`` score answers in place of a verifier, which could not learn without labels."""
    del reward["verifier"]
    reward["sources"] = {
        "brevity" if name == "verifier" else name: weight for name, weight in reward["sources"].items()
    }
    for rule in reward["rules"]:
        if isinstance(rule, dict) and "mix" in rule:
            weights = rule["mix"]["weights"]
            rule["mix"]["weights"] = {name.replace("verifier", "brevity"): weight for name, weight in weights.items()}
    reward["brevity"] = {}


def _shortest(protocol: dict[str, Any], texts: bool) -> int:
    """Return how many tokens a tiny version's answers may have. ``texts`` says whether they are programs or calls."""
    if texts:
        return 40
    return 20 if protocol.get("vouch") == "stated" else 16 if "step_judge" in protocol else 6


def _shrunk_loop(values: dict[str, Any]) -> dict[str, Any]:
    """Return what else is smaller in a loop: its rounds, questions and passes, and the sums.

    The rates are such that tiny models learn. Adapters are left out: a warm start of one on random weights teaches nothing,
    so that no answer would be good enough to learn from.
    """
    loop = values["loop"]
    shorter = {"epochs": lambda n: min(n, 2), "updates": lambda n: min(n, 2), "group": lambda n: min(n, 3)}
    stages = [
        stage | {"learning_rate": 1e-3} | {key: shorter[key](stage[key]) for key in shorter.keys() & stage.keys()}
        for stage in loop["stages"]
    ]
    agents = {name: {k: v for k, v in own.items() if k != "lora"} for name, own in values["agents"].items()}
    return {
        "loop": loop | {"rounds": min(loop.get("rounds", 1), 2), "questions": 12, "stages": stages},
        "agents": agents,
        "training": {"use_cpu": True},
        "task": values["task"] | ({"largest": 3} if values["task"]["name"] == "toy_sum" else {}),
    }


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

    ``need`` is what a user must have, ``credit`` what an answer is compared with, ``loop`` how policies take turns to learn, and ``protocol`` who speaks when.
    """
    found: dict[str, list[str]] = {}
    for name in recipe_files():
        found.setdefault(axes_of(name)[axis], []).append(name)
    return dict(sorted(found.items()))


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
        "Each recipe is one file in `configs/ppo/recipes/` that fits on one screen. `maporl recipes show NAME` prints it, with the files that it",
        "extends: a variant of another recipe has only what differs.",
        "`maporl recipes try NAME` runs three updates of it, or two rounds, with tiny models, shows their rewards and leaves a page.",
        '`maporl train NAME KEY=VALUE ...` runs it. To change one axis, change one line. A setting that "Exact" does not name, such',
        'as a length or a learning rate, may differ from the paper without being listed. "Inert" names options that have no effect',
        'in this recipe, and says why: changing one of them, and nothing else, changes nothing. "Checked by" names the tests that pin a recipe\'s numbers.',
        '"Corrected" says what an earlier form of the recipe did wrongly although its card called it right, and until when.',
        "(`python -m maporl.config.recipes` writes this page.)",
        "",
        'Status is "exact" where the formulas were read in the paper or its code and tests pin them, "reconstructed" where a part of them was',
        'not available and was filled in, and "inspired" where only the idea is the paper\'s. Cost is the number of tokens that pass through',
        "models in an update, divided by that of plain PPO with the same team and questions: one dialogue for each, a critic on its trunk, a",
        "reference, one epoch. A token that is trained counts three times. `python benchmarks/recipe_costs.py` counts it with tiny models.",
        "`maporl recipes list --by need` (or `credit`, `loop`, `protocol`) lists recipes by what you need for them, by what an answer is",
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
