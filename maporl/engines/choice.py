"""Choose the engine of agents whose configuration names none, and check that weights can get to vLLM servers.

Imports torch only where vLLM is installed or named.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_yaml
from maporl.config.engines import ENGINES
from maporl.config.imports import extension
from maporl.config.schema import AgentSection
from maporl.errors import Fault, install_command, refused
from maporl.run import ResolvedRun

CONFIG = "config.yaml"
SHARE, MOST_SHARE = 0.3, 0.6
"""The share of the accelerator's memory for each base that vLLM holds, and the most for all of them."""


def choose_engines(config: Config, values: Mapping[str, Any]) -> Config:
    """Return ``config`` with ``engine: vllm`` for the agents that vLLM can answer for in this process.

    These are agents with the weights of a model that is not quantised, in a run of one process on an accelerator, where
    vLLM is installed. Groups of processes (``cluster.backend: ray``) use vLLM where agents name it. An agent whose
    engine is named in ``values``, the plain values of the configuration, keeps it. A run that has begun keeps the
    engines that its folder records.
    """
    named = values.get("agent_defaults") or {}
    sections = {name: section or {} for name, section in values["agents"].items()}
    free = [
        name
        for name, agent in config.agents.items()
        if "engine" not in named and "engine" not in sections[name] and _is_served(agent)
    ]
    if not free or not vllm_runs_here(config):
        return config
    file = Path(config.output_dir) / CONFIG
    if file.is_file() and file.stat().st_size:
        begun = parse_config(read_yaml(file), str(file)).agents
        recorded = {name: begun[name] for name in free if name in begun}
        chosen = {name: replace(config.agents[name], engine=a.engine, vllm=a.vllm) for name, a in recorded.items()}
    else:
        bases = {_base_of(name, config.agents[name]) for name in free}
        share = min(MOST_SHARE, SHARE * len(bases))
        vllm_section = extension("maporl.integrations.vllm.section:VLLMSection", "engine: vllm")
        section = vllm_section(colocate={"gpu_memory_utilization": share})
        chosen = {name: replace(config.agents[name], engine="vllm", vllm=section) for name in free}
    return replace(config, agents={**config.agents, **chosen})


def vllm_runs_here(config: Config) -> bool:
    """Return whether vLLM is installed and can share an accelerator with this run, which must be a single process."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and config.training.placement == "shared"
    grouped = config.grouped
    lacking = any(find_spec(name) is None for name in ("vllm", "maporl.integrations.vllm"))
    if config.training.use_cpu or not alone or grouped or lacking:
        return False
    import torch

    return torch.accelerator.is_available()


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield agents whose engine is missing, and those that train all their weights, which cannot travel from this
    process to their vLLM servers.

    Adapters travel by HTTP. Whole weights travel over a GPU group (NCCL), which this process joins with vLLM's package.
    """
    config = run.config
    for name, agent in config.agents.items():
        if agent.engine == "vllm":
            yield from refused(partial(extension, f"{ENGINES['vllm'].module}:build", f"agents.{name}.engine: vllm"))
        if agent.vllm is None or not agent.vllm.urls or not agent.trainable or agent.lora or agent.adapter:
            continue
        import torch

        lacking = []
        if config.training.use_cpu or not torch.cuda.is_available():
            lacking.append("has no GPU" + (" (training.use_cpu)" if config.training.use_cpu else ""))
        if find_spec("vllm") is None:
            lacking.append(f"lacks the package vllm ({install_command('vllm')})")
        if lacking:
            yield Fault(
                f"agents.{name}.vllm",
                f"{name} trains all its weights, which travel to {', '.join(agent.vllm.urls)} over a GPU group (NCCL), "
                f"and this process {' and '.join(lacking)}",
                f"give it a LoRA (agents.{name}.lora), of which only the adapter travels, or set its engine to "
                "transformers",
            )


def _is_served(agent: AgentSection) -> bool:
    """Return whether vLLM in this process can hold the agent's weights."""
    quantised = agent.load_in_4bit or agent.load_in_8bit
    return agent.model is not None and not quantised and agent.api is None and agent.vllm is None


def _base_of(name: str, agent: AgentSection) -> str:
    """Return a name of the base: agents with adapters share the one of their model, and others have their own."""
    return str(agent.model) if agent.lora is not None or agent.adapter is not None else f"{agent.policy or name}'s own"
