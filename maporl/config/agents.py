"""What is wrong with the sections of agents, before their models are loaded. Imports no torch."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from maporl.config.algorithm import OF_LEARNER
from maporl.config.engines import ENGINES
from maporl.config.schema import AgentSection, Config
from maporl.errors import Fault, install_command
from trl_ext.files.paths import fault_of_name
from trl_ext.models.attention import fault

ADAPTER_OPTIONS = "adapter_config.json"
OF_AGENT = ("critic", "learning_rate")
"""The options of a policy that may also stand in an agent's section itself."""


def section_faults(config: Config) -> Iterator[Fault]:
    """Yield what is wrong with agents' sections, or differs between agents of one policy."""
    yield from name_faults(config)
    for name, agent in config.agents.items():
        yield from _engine(name, agent)
        if agent.weights:
            yield from _weights(name, agent)
    yield from _policies(config)


def name_faults(config: Config) -> Iterator[Fault]:
    """Yield the names of agents and policies that cannot be those of folders, in which their weights are."""
    for name, agent in config.agents.items():
        yield from _folder_name(name, "agents")
        if agent.policy is not None:
            yield from _folder_name(agent.policy, f"agents.{name}.policy")
        if isinstance(agent.policy_per, list):
            if not agent.policy_per:
                yield Fault(f"agents.{name}.policy_per", "names no policy", "list one for each turn, or remove it")
            for policy in agent.policy_per:
                yield from _folder_name(policy, f"agents.{name}.policy_per")


def _folder_name(name: str, key: str) -> Iterator[Fault]:
    if fault_of_name(name) or not name.replace("_", "").replace("-", "").isalnum():
        yield Fault(key, f"{name!r} cannot be the name of a folder", "use letters, digits, '-' and '_'")


def _weights(name: str, agent: AgentSection) -> Iterator[Fault]:
    """Yield what is wrong with the model of an agent, its files and its quantisation."""
    key = f"agents.{name}"
    if (agent.model is None) == (agent.tiny is None):
        both = "both" if agent.model else "neither"
        remedy = f"remove one of them, for example with {key}.tiny=null" if agent.model else ""
        yield Fault(key, f"give either 'model' (a hub name or folder) or 'tiny', got {both}", remedy)
    if agent.tiny is not None and agent.tokenizer is not None:
        yield Fault(f"{key}.tokenizer", "a tiny model has a tokenizer of its own", "remove it, or give 'model'")
    for option in ("model", "tokenizer", "adapter"):
        value = getattr(agent, option)
        if value is not None and _looks_like_path(value) and not os.path.isdir(value):
            yield Fault(f"{key}.{option}", f"no folder {value!r}", "expected a folder or a hub name like org/name")
    for option, file in (("model", "config.json"), ("adapter", ADAPTER_OPTIONS)):
        value = getattr(agent, option)
        if value is None or not os.path.isdir(value) or os.path.exists(os.path.join(value, file)):
            continue
        remedy = "expected a folder that save_pretrained wrote, such as a policy's in the folder 'final' of a run"
        if option == "model" and os.path.exists(os.path.join(value, ADAPTER_OPTIONS)):
            remedy = f"it is an adapter: give {key}.adapter={value} and {_base_of(value, key)}"
        yield Fault(f"{key}.{option}", f"the folder {value!r} has no {file}", remedy)
    if agent.attn_implementation is not None and (why := fault(agent.attn_implementation)):
        yield Fault(f"{key}.attn_implementation", why)
    bits = [option for option in ("load_in_4bit", "load_in_8bit") if getattr(agent, option)]
    if len(bits) > 1:
        yield Fault(key, "load_in_4bit and load_in_8bit exclude each other", "set one of them")
    if bits and agent.tiny is not None:
        yield Fault(f"{key}.{bits[0]}", "a tiny model is not quantised", "remove it, or give 'model'")
    if bits and find_spec("bitsandbytes") is None:
        command = install_command("quantized")
        yield Fault(f"{key}.{bits[0]}", "needs the package bitsandbytes", f"install it with: {command}")
    if bits and agent.lora is None and agent.adapter is None and agent.trainable:
        remedy = "add lora: {} or set trainable: false"
        yield Fault(f"{key}.{bits[0]}", "quantised weights cannot be trained", remedy)


def _base_of(adapter: str, key: str) -> str:
    """Return what to set for the base model of the adapter in a folder, as far as the folder says it."""
    with suppress(OSError, ValueError, AttributeError):  # whoever reads the adapter says that it is damaged
        if base := json.loads(Path(adapter, ADAPTER_OPTIONS).read_bytes()).get("base_model_name_or_path"):
            return f"{key}.model={base}"
    return "the model that it was trained on: for a tiny one the same `tiny`, agents and `seed`"


def _engine(name: str, agent: AgentSection) -> Iterator[Fault]:
    """Yield what an agent has of another engine, lacks of its own, and a model that the engine cannot read."""
    key = f"agents.{name}"
    for engine, entry in ENGINES.items():
        if entry.section is None:
            continue
        present = getattr(agent, entry.section) is not None
        if present and agent.engine != engine:
            what = f"goes with engine: {engine}, got engine {agent.engine!r}"
            yield Fault(f"{key}.{entry.section}", what, "give both or neither")
        if agent.engine == engine and not present:
            section = f"{key}.{entry.section}, for example {entry.section}: {entry.example}"
            yield Fault(f"{key}.engine", f"{engine} needs {section}")
    if agent.engine_options and ENGINES[agent.engine].section is not None:
        what = f"engine {agent.engine!r} takes its options from {key}.{ENGINES[agent.engine].section}"
        yield Fault(f"{key}.engine_options", what, "move them there")
    if ENGINES[agent.engine].serves_folders and agent.tiny is not None:
        yield Fault(key, f"a tiny model has no folder that {agent.engine} could serve", "give 'model'")


def place_of(name: str, key: str, config: Config) -> str:
    """Return where the value stands that an agent's policy has of the option ``key`` of the team: in its algorithm, in
    the agent's section (:data:`OF_AGENT`), or there."""
    section, _, option = key.partition(".")
    agent = config.agents[name]
    if section in ("advantage", "ppo"):
        own = getattr(agent.algorithm, section)
        there = option.partition(".")[0] in own if option else bool(own)
        return f"agents.{name}.algorithm.{key}" if there else key
    if option in OF_LEARNER or key == "schedule.critic_warmup":
        if getattr(agent.algorithm, option) is not None:
            return f"agents.{name}.algorithm.{option}"
        if option in OF_AGENT and getattr(agent, option) is not None:
            return f"agents.{name}.{option}"
    return key


def _policies(config: Config) -> Iterator[Fault]:
    """Yield what agents of one policy say differently of its weights, which they share."""
    first: dict[str, str] = {}
    for name, agent in config.agents.items():
        policy = agent.policy or name
        other = first.setdefault(policy, name)
        for key in (
            "model", "tiny", "lora", "adapter", "dtype", "attn_implementation", "load_in_4bit", "load_in_8bit", "policy_per", "trainable",  # noqa: E501
        ):  # fmt: skip
            mine, theirs = getattr(agent, key), getattr(config.agents[other], key)
            if mine != theirs:
                what = f"{other!r} and {name!r} share policy {policy!r} but differ in {key}: {theirs!r} and {mine!r}"
                yield Fault("agents", what, "give them the same, or policies of their own")
        both = agent.learns_by.of_policy, config.agents[other].learns_by.of_policy
        for key in sorted(both[0].keys() | both[1].keys()):
            mine, theirs = (learns.get(key) for learns in both)
            if mine != theirs:
                what = f"{other!r} and {name!r} share policy {policy!r} but differ in {key}: {theirs!r} and {mine!r}"
                yield Fault(
                    "agents", what, "give them the same, or policies of their own; only the advantage may differ"
                )


def _looks_like_path(value: str) -> bool:
    return value.startswith((".", "/", "~")) or value.count("/") > 1
