"""Tiny versions of configurations: random character models, tiny questions, and a few updates on the CPU. No torch."""

import copy
import string
from pathlib import Path
from typing import Any

from maporl.config.parse import merge, override, read_yaml
from maporl.config.recipes import recipe_file

BARE = {"intro": "", "line": "", "tags": "", "returned": "={text}", "failed": "={text}", "limit": "="}
"""The texts of calls for tiny models, which learn from examples how to call."""


def tiny_version(name: str, output_dir: str) -> dict[str, Any]:
    """Return the values of a recipe, or of a configuration's YAML file, in a tiny version (see :func:`shrunk`).

    Raises:
        ConfigError: no recipe has this name, or the file cannot be read.
    """
    file = Path(name)
    values = read_yaml(file if file.suffix in (".yaml", ".yml") else recipe_file(name))
    return shrunk(override(values, [], []), output_dir)


def shrunk(values: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Return a configuration in a tiny version: random character models, tiny questions, and three updates or two
    rounds on the CPU.

    The method's own choices (protocol, branching, reward, advantage, objective, schedule) stay. Only sizes and the
    periods of schedules are smaller. A brief warm start is added, and where answers are numbers the reward also
    measures how near they are. Teams that search HotpotQA search the facts of the task ``tiny_hops``. Teams that write
    programs write tiny ones.
    """
    values = copy.deepcopy(values)
    keys = ("policy", "policy_per", "role", "system", "trainable", "critic", "lora", "limits", "algorithm")
    defaults = values.get("agent_defaults", {})
    values["agents"] = {
        agent: copy.deepcopy({key: value for key, value in merge(defaults, section or {}).items() if key in keys})
        for agent, section in values["agents"].items()
    }
    # a frozen agent must have learned something, so it takes part in the warm start and the schedule freezes it later
    frozen = [agent for agent, section in values["agents"].items() if section.pop("trainable", True) is False]
    if frozen and "loop" not in values:  # a loop has no schedule
        schedule = values.setdefault("schedule", {})
        schedule["freeze"] = [*schedule.get("freeze", []), *({"agent": a, "first": 1} for a in frozen)]
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
    if "critic_warmup" in values.get("schedule", {}):
        values["schedule"]["critic_warmup"] = 1
    branching = values.get("branching", {})
    largest = 6 if "comparator_reward" in str(values.get("loop")) else 3  # half of the dialogues are a comparator's
    for key in {"group", "drafts"} & branching.keys():
        most = branching[key]
        branching[key] = [min(number, largest) for number in most] if isinstance(most, list) else min(most, largest)
    ppo, shortest = values.setdefault("ppo", {}), _shortest(values["protocol"], programs or searches or orchestrates)
    algorithms = [section["algorithm"] for section in values["agents"].values() if section.get("algorithm")]
    for own in (ppo, *(algorithm.get("ppo", {}) for algorithm in algorithms)):
        if "lam_alpha" in own:  # so that the lambda of the longest answers stays
            own["lam_alpha"] *= ppo.get("response_length", 512) / shortest
        own |= {"num_mini_batches": min(own["num_mini_batches"], 2)} if "num_mini_batches" in own else {}
    for algorithm in algorithms:
        for key in ("learning_rate", "warmup_steps"):  # those of the team are for tiny models
            algorithm.pop(key, None)
        algorithm |= {"critic_warmup": 1} if algorithm.get("critic_warmup") else {}
    ppo["response_length"] = shortest
    values["training"] = values.get("training", {}) | {
        "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False, "use_liger_kernel": False, "use_cpu": True, "warmup_steps": 0,
    }  # fmt: skip
    # random models earn no rewards, and without reward variance all gradients are 0
    longer = searches or values["protocol"].get("vouch") == "stated"  # all of a text must be right
    values["warm_start"] = {"steps": 60, "batch_size": 32 if longer else 8, "learning_rate": 1e-2 if longer else 5e-3}
    if programs and "loop" in values:  # its pairs are of programs and tests that can be read
        values["warm_start"] |= {"steps": 200, "learning_rate": 1e-2}
    sources = values.setdefault("reward", {}).setdefault("sources", {"label": 1.0})
    if "label" in sources and not searches:
        values["reward"]["sources"] = sources | {"near": 1.0}
    if "loop" in values:
        values |= _shrunk_loop(values)
    if values["protocol"].get("vouch") == "sources":
        _without_verifier(values["reward"])
    if "verifier" in values["reward"]:
        verifier = values["reward"]["verifier"]
        verifier.pop("model", None)
        verifier["tiny"] = tiny | {"layers": 1}
        if "learn_every" in verifier or "verifier" in sources:  # a random one knows nothing
            verifier |= {"learn_every": 1, "learning_rate": 1e-3}
    if "min_tokens" in (values["reward"].get("penalties") or {}):
        values["reward"]["penalties"]["min_tokens"] = 2
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
    """Return what else is smaller in a loop: its rounds, questions and passes, and the sums."""
    # the rates are such that tiny models learn; a warm start of an adapter on random weights would teach nothing
    loop = values["loop"]
    shorter = {"epochs": lambda n: min(n, 2), "updates": lambda n: min(n, 2), "group": lambda n: min(n, 3)}
    stages = [
        stage | {"learning_rate": 1e-3} | {key: shorter[key](stage[key]) for key in shorter.keys() & stage.keys()}
        for stage in loop["stages"]
    ]
    agents = {name: {k: v for k, v in section.items() if k != "lora"} for name, section in values["agents"].items()}
    return {
        "loop": loop | {"rounds": min(loop.get("rounds", 1), 2), "questions": 12, "stages": stages},
        "agents": agents,
        "training": {"use_cpu": True},
        "task": values["task"] | ({"largest": 3} if values["task"]["name"] == "toy_sum" else {}),
    }
