"""The start of the processes of a group, as a user is told of it."""

import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from maporl.backends.engine_pool import EnginePool
from maporl.backends.group import LearnerGroup
from maporl.config import Config
from maporl.config.schema import AgentSection
from maporl.protocols import policy_names
from maporl.text import printable


def teller(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line to the standard error at once, or nothing if ``quiet``."""

    def tell(line: str) -> None:
        if not quiet:
            print(printable(line), file=sys.stderr, flush=True)

    return tell


def build(part: LearnerGroup | EnginePool, tell: Callable[[str], None]) -> None:
    """Start the processes of a part of a group, and tell which models they load, and when they have them."""
    spec, trains = part.spec, isinstance(part, LearnerGroup)
    number, what = (spec.devices, "train") if trains else (spec.replicas, "sample")
    who = f"1 process that {what}s" if number == 1 else f"{number} processes that {what}"
    tell(f"group {spec.name}: {who}: loading {', '.join(_models(spec.config, spec.policies))}")
    began = time.monotonic()
    part.build()
    tell(f"group {spec.name}: {who}: ready after {time.monotonic() - began:.0f} s")


def reads_hub(config: Config, policies: Collection[str]) -> bool:
    """Return whether something that ``policies`` begin from is a name on the hub, and no folder of this machine."""
    named = [(section.model, section.tokenizer, section.adapter) for section in _speaking(config, policies)]
    return any(name is not None and not Path(name).is_dir() for names in named for name in names)


def _models(config: Config, policies: Collection[str]) -> list[str]:
    """Return the names of the models that ``policies`` begin from, in the order of the agents."""
    speaking = _speaking(config, policies)
    return list(dict.fromkeys(section.model or "a tiny model" for section in speaking if section.weights))


def _speaking(config: Config, policies: Collection[str]) -> list[AgentSection]:
    return [
        section for name, section in config.agents.items() if set(policy_names(name, section, config)) & set(policies)
    ]
