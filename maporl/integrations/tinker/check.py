"""What does not work on a service, before anything is asked of it. Imports no torch."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from maporl.config import Config
from maporl.config.schema import AgentSection, LoraSection
from maporl.errors import Fault, install_command
from maporl.integrations.tinker.section import TinkerSection
from maporl.run import ResolvedRun

KEY = "cluster.backend"
OF_GROUPS = ("groups", "pools", "address", "scoring")
"""Keys of the section ``cluster`` that the backend has no use for."""


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why a run cannot be trained on a service; or, if it is trained elsewhere, what it says of a service."""
    config = run.config
    if config.cluster.backend != "tinker":
        named = {f"agents.{name}.tinker": agent.tinker for name, agent in config.agents.items()}
        for key, section in {"cluster.tinker": config.cluster.tinker, **named}.items():
            if section is not None and section != TinkerSection():
                yield Fault(key, f"cluster.backend is {config.cluster.backend}", "set cluster.backend: tinker")
        return
    yield from config_faults(config)
    for name, agent in config.agents.items():
        if agent.weights and run.sampling.every(name, "structured_output"):
            yield Fault(
                f"agents.{name}.structured_output", "the service has no grammars", "remove it, and grade the form"
            )
        learns = name in run.learners
        odd = [t for t in run.sampling.every(name, "temperature") if t != 1.0] if learns and agent.weights else []
        if odd and set(odd) - set(_held_out(config, name)):
            yield _temperature(f"agents.{name}.sampling.temperature", odd[0])


def config_faults(config: Config) -> Iterator[Fault]:
    """Yield why a configuration cannot be trained on a service, from its sections alone."""
    section = config.cluster.tinker
    if find_spec("tinker") is None:
        yield Fault(KEY, "tinker needs the package tinker", f"install it with: {install_command('tinker')}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield Fault(
            KEY, "a service is asked by one process, and the launcher has started several", "start with: maporl train"
        )
    for key in OF_GROUPS:
        value: Any = getattr(config.cluster, key)
        if value and value != type(value)():
            yield Fault(
                f"cluster.{key}", "a service has no groups of processes", "remove it, or set cluster.backend: ray"
            )
    if config.warm_start.steps:
        yield Fault(
            "warm_start.steps",
            "a warm start trains weights that are here, and the service takes no adapters",
            "set it to 0",
        )
    if config.stages:
        yield Fault("loop.stages", "its trainers of TRL train weights that are here", "use cluster.backend: local")
    for name, agent in config.agents.items():
        if agent.weights:
            url = section.base_url if agent.tinker is None else agent.tinker.base_url or section.base_url
            if url is None and not os.environ.get(section.key_variable):
                yield Fault(
                    "cluster.tinker.key_variable",
                    f"the environment has no {section.key_variable}",
                    "set it to the key of the service, or name a server in cluster.tinker.base_url",
                )
            yield from _weights(f"agents.{name}", agent)
            if agent.trainable:
                yield from _learner(name, config.of(name), agent)


def _weights(key: str, agent: AgentSection) -> Iterator[Fault]:
    """Yield what a service cannot hold of an agent."""
    if agent.tiny is not None:
        yield Fault(f"{key}.tiny", "a model that is built here is not on the service", "name a model of the service")
    if agent.adapter is not None:
        yield Fault(f"{key}.adapter", "the service takes no adapters of yours", "remove it, and begin with lora: {}")
    if agent.load_in_4bit or agent.load_in_8bit:
        yield Fault(
            f"{key}.load_in_{4 if agent.load_in_4bit else 8}bit",
            "the service decides how it holds the base",
            "remove it",
        )
    if agent.engine != "transformers":
        yield Fault(f"{key}.engine", f"the service samples, and not {agent.engine}", "remove engine and its section")
    if agent.trainable and agent.lora is None:
        yield Fault(f"{key}.lora", "the service trains LoRAs, and not whole models", "set lora: {r: 32}")
    if agent.lora is not None:
        for option, why in (("alpha", "scales LoRAs itself"), ("target_modules", "adapts all linear layers")):
            default = getattr(LoraSection(), option)
            if getattr(agent.lora, option) != default:
                yield Fault(f"{key}.lora.{option}", f"the service {why}", f"leave it at {default!r}")


def _learner(name: str, own: Config, agent: AgentSection) -> Iterator[Fault]:
    """Yield what a service cannot learn by, of the configuration as an agent's policy learns by it."""
    from maporl.advantages.baselines import baseline_of  # needs torch
    from maporl.config.agents import place_of

    reads, critic = baseline_of(own.advantage).needs_critic, own.training.critic
    if reads and critic in ("head", "adapter", "central"):
        yield Fault(
            place_of(name, "training.critic", own),
            f"{critic!r} reads the hidden states of the policy, which the service does not give",
            "use critic: model with agents.NAME.tinker.critic, or an advantage.baseline that reads no values",
        )
    if reads and critic == "model" and (agent.tinker is None or agent.tinker.critic is None):
        yield Fault(
            f"agents.{name}.tinker.critic",
            "critic: model would copy the policy, whose weights are not here",
            "name a small model with the same tokenizer",
        )
    if own.ppo.entropy_coef:
        yield Fault(
            place_of(name, "ppo.entropy_coef", own),
            "the service gives log-probabilities of sampled tokens, and no entropies",
            "set it to 0",
        )
    if own.ppo.temperature != 1.0:
        yield _temperature(place_of(name, "ppo.temperature", own), own.ppo.temperature)


def _temperature(key: str, value: float) -> Fault:
    what = f"the service computes log-probabilities at temperature 1, and this is {value:g}"
    return Fault(key, what, "set it to 1.0 for what is trained (evaluation.temperature may be another)")


def _held_out(config: Config, name: str) -> list[float]:
    section = config.evaluation.sampling.get(name)
    return [] if section is None else section.every("temperature")
