"""What engines can do of the sampling that a configuration gives to agents and roles. Imports no torch."""

from collections.abc import Iterator

from maporl.config import Config
from maporl.config.engines import ENGINES
from maporl.config.imports import unknown
from maporl.decoding import Sampling, greedy_learners
from maporl.errors import Fault
from maporl.run import ResolvedRun


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield agents and roles that have a sampling and do not exist, and what their engines cannot do of it."""
    config, sampling = run.config, run.sampling
    for name in sampling.held_out:
        if name not in config.agents:
            yield Fault("evaluation.sampling", unknown(name, config.agents))
    roles = {agent.role for agent in config.agents.values()}
    for role in sampling.roles:
        if role not in roles and not run.protocol.roles:
            declared = sorted(role for role in roles if role is not None)
            yield Fault(
                f"protocol.sampling.{role}",
                f"nobody speaks in this role; agents have the roles {declared}",
                f"so set agents.NAME.role: {role}, or agents.NAME.sampling",
            )
    for name in config.agents:
        for key, values in (
            (f"agents.{name}.sampling", sampling.agents.get(name)),
            (f"evaluation.sampling.{name}", sampling.held_out.get(name)),
        ):
            if values is not None:
                yield from _engine(name, values, config, key)
    yield from greedy_learners(sampling, run.learners, run.protocol.roles)


def _engine(name: str, sampling: Sampling, config: Config, key: str) -> Iterator[Fault]:
    """Yield what the engine of agent ``name`` cannot do of its sampling."""
    agent = config.agents[name]
    entry = ENGINES[agent.engine]
    if not entry.samples:
        yield Fault(key, f"engine {agent.engine!r} samples nothing", "remove it")
    if not entry.top_k and any(sampling.every("top_k")):
        yield Fault(f"{key}.top_k", f"the interface of engine {agent.engine!r} has no top_k", "use top_p")
    for option in ("temperature", "max_tokens"):
        if agent.api is not None and getattr(agent.api, option) is not None and sampling.every(option):
            what = f"agents.{name}.api.{option} is set too, and it would win"
            yield Fault(f"{key}.{option}", what, "remove one of them")
