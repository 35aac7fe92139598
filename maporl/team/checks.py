"""Check the agents of a configuration before their models are loaded. Imports no torch."""

import os
from importlib.util import find_spec

from maporl.config.engines import ENGINES
from maporl.config.schema import AgentSection, Config
from maporl.errors import ConfigError, install_command
from trl_ext.files.paths import fault_of_name
from trl_ext.models.attention import fault


def check_agents(config: Config, where: str) -> None:
    """Check every agent's section, and check that agents of one policy describe it alike.

    Raises:
        ConfigError: something is wrong. The message begins with ``where`` and names the first fault.
    """
    check_names(config, where)
    for name, agent in config.agents.items():
        _check_agent(name, agent, where)
    _check_policies(config, where)


def check_names(config: Config, where: str) -> None:
    """Check that agents and policies, whose weights are in folders of their names, have names of folders.

    Raises:
        ConfigError: a name cannot be a folder's.
    """
    for name, agent in config.agents.items():
        _check_folder_name(name, f"{where}: agents")
        if agent.policy is not None:
            _check_folder_name(agent.policy, f"{where}: agents.{name}.policy")
        if isinstance(agent.policy_per, list):
            if not agent.policy_per:
                raise ConfigError(
                    f"{where}: agents.{name}.policy_per: names no policy; list one for each turn, or remove it"
                )
            for policy in agent.policy_per:
                _check_folder_name(policy, f"{where}: agents.{name}.policy_per")


def _check_agent(name: str, agent: AgentSection, where: str) -> None:
    _check_engine(name, agent, where)
    if not agent.weights:
        return
    if (agent.model is None) == (agent.tiny is None):
        raise ConfigError(
            f"{where}: agents.{name}: give either 'model' (a hub name or folder) or 'tiny', got {'both' if agent.model else 'neither'}"
            + (f"; remove one of them, for example with agents.{name}.tiny=null" if agent.model else "")
        )
    for key in ("model", "tokenizer", "adapter"):
        value = getattr(agent, key)
        if value is not None and _looks_like_path(value) and not os.path.isdir(value):
            raise ConfigError(
                f"{where}: agents.{name}.{key}: no folder {value!r}; expected a folder or a hub name like org/name"
            )
    for key, file in (("model", "config.json"), ("adapter", "adapter_config.json")):
        value = getattr(agent, key)
        if value is not None and os.path.isdir(value) and not os.path.exists(os.path.join(value, file)):
            raise ConfigError(
                f"{where}: agents.{name}.{key}: the folder {value!r} has no {file}; expected a folder that save_pretrained wrote, "
                "such as a policy's in the folder 'final' of a run"
            )
    if agent.attn_implementation is not None and (why := fault(agent.attn_implementation)):
        raise ConfigError(f"{where}: agents.{name}.attn_implementation: {why}")
    bits = [key for key in ("load_in_4bit", "load_in_8bit") if getattr(agent, key)]
    if len(bits) > 1:
        raise ConfigError(f"{where}: agents.{name}: load_in_4bit and load_in_8bit exclude each other; set one of them")
    if bits and agent.tiny is not None:
        raise ConfigError(
            f"{where}: agents.{name}.{bits[0]}: a tiny model is not quantised; remove it, or give 'model'"
        )
    if bits and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{where}: agents.{name}.{bits[0]}: needs the package bitsandbytes; install it with: {install_command('quantized')}"
        )
    if bits and agent.lora is None and agent.adapter is None and agent.trainable:
        raise ConfigError(
            f"{where}: agents.{name}.{bits[0]}: quantised weights cannot be trained; add lora: {{}} or set trainable: false"
        )


def _check_engine(name: str, agent: AgentSection, where: str) -> None:
    """Check that an agent has its engine's section and no other engine's, and that the engine can read its model."""
    for engine, entry in ENGINES.items():
        if entry.section is None:
            continue
        given = getattr(agent, entry.section) is not None
        if given and agent.engine != engine:
            raise ConfigError(
                f"{where}: agents.{name}.{entry.section}: goes with engine: {engine}, got engine {agent.engine!r}; give both or "
                "neither"
            )
        if agent.engine == engine and not given:
            raise ConfigError(
                f"{where}: agents.{name}.engine: {engine} needs agents.{name}.{entry.section}, for example {entry.section}: "
                f"{entry.example}"
            )
    if agent.engine_options and ENGINES[agent.engine].section is not None:
        raise ConfigError(
            f"{where}: agents.{name}.engine_options: engine {agent.engine!r} takes its options from agents.{name}."
            f"{ENGINES[agent.engine].section}; move them there"
        )
    if ENGINES[agent.engine].serves_folders and agent.tiny is not None:
        raise ConfigError(
            f"{where}: agents.{name}: a tiny model has no folder that {agent.engine} could serve; give 'model'"
        )


def _check_folder_name(name: str, where: str) -> None:
    if fault_of_name(name) or not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{where}: {name!r} cannot be the name of a folder; use letters, digits, '-' and '_'")


def _check_policies(config: Config, where: str) -> None:
    """Check that agents of one policy describe its weights alike, because they share them."""
    first: dict[str, str] = {}
    for name, agent in config.agents.items():
        policy = agent.policy or name
        other = first.setdefault(policy, name)
        for key in (
            "model", "tiny", "lora", "adapter", "dtype", "attn_implementation", "load_in_4bit", "load_in_8bit", "policy_per", "trainable", "learning_rate", "critic",
        ):  # fmt: skip
            mine, theirs = getattr(agent, key), getattr(config.agents[other], key)
            if mine != theirs:
                raise ConfigError(
                    f"{where}: agents {other!r} and {name!r} share policy {policy!r} but differ in {key}: {theirs!r} and {mine!r}"
                )


def _looks_like_path(value: str) -> bool:
    return value.startswith((".", "/", "~")) or value.count("/") > 1
