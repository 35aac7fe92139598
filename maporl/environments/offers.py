"""What the tools and environments of a run offer, before a dialogue begins. Imports no torch."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from maporl.config.imports import unknown
from maporl.environments.base import Environment, Tool, may_pay
from maporl.environments.rooms import EnvironmentSpec, guarded
from maporl.errors import ConfigError, Fault
from maporl.types import Act


class Offers:
    """The tools that agents may call, and the rewards that may occur.

    Args:
        tools: the plain tools by name.
        environments: the environments by name.
    """

    def __init__(self, tools: Mapping[str, Tool], environments: Mapping[str, EnvironmentSpec]):
        self.tools, self.environments = tools, environments
        self._known: dict[str, dict[str, list[Tool]]] = {}

    def tools_of(self, environment: str, agent: str) -> list[Tool]:
        """Return the tools that an environment gives ``agent``, of an instance that is never reset.

        Raises:
            EnvironmentFailure: it cannot be made, or its tools cannot be read.
        """
        by_agent = self._known.setdefault(environment, {})
        if not by_agent:
            spec = self.environments[environment]
            example = guarded(spec.make, f"environment {environment!r} cannot be made")
            try:
                for name in spec.agents:
                    made = guarded(partial(_tools_of, example, name), f"environment {environment!r}: tools({name!r})")
                    by_agent[name] = made
            finally:
                guarded(example.close, f"environment {environment!r}: close() of one that never began")
        return by_agent.get(agent, [])

    def forks(self, environment: str) -> str:
        """Return how an environment can be forked: "copy", "replay" or "no"."""
        spec = self.environments[environment]
        made = guarded(spec.make, f"environment {environment!r} cannot be made")
        guarded(made.close, f"environment {environment!r}: close() of one that never began")
        return made.forks

    def unpaid(self, weighed: Collection[str]) -> Iterator[Fault]:
        """Yield the environments and tools with names among the ``weighed`` rewards that pay nothing to anybody, so
        that their weights would change nothing.

        Raises:
            EnvironmentFailure: one of them cannot be made.
        """
        for name, tool in self.tools.items():
            if name in weighed and not may_pay(tool.run):
                what = f"the tool {name!r} pays nothing: it returns no maporl.Result"
                remedy = f"remove {name!r} from the rewards, or let the tool return Result(text, reward=...)"
                yield Fault(f"reward: {name}", what, remedy)
        for name, spec in self.environments.items():
            if name not in weighed or not spec.agents:
                continue
            made = guarded(spec.make, f"environment {name!r} cannot be made")
            try:
                pays = guarded(partial(made.can_pay, spec.agents), f"environment {name!r}: can_pay()")
            finally:
                guarded(made.close, f"environment {name!r}: close() of one that never began")
            if not pays:
                yield Fault(
                    f"reward: {name}",
                    f"the environment {name!r} ({type(made.instance).__name__}) pays nothing: it has no reward, and "
                    "its tools return none",
                    f"remove {name!r} from the rewards, or give its class reward() (get_reward() in a class for TRL), "
                    f"or set environments.{name}.reward to the attribute that has it",
                )

    def rewards(self) -> frozenset[str]:
        """Return the names of the rewards that environments and tools may pay."""
        return frozenset([*self.environments, *self.tools])

    def must_have(self, act: Act) -> None:
        """Check that the run has the tool of a protocol's act.

        Raises:
            ConfigError: it does not.
        """
        names: list[str] = list(self.tools)
        if act.place is not None:
            if act.place not in self.environments:
                raise ConfigError(f"the protocol acts in an environment: {unknown(act.place, self.environments)}")
            names = [tool.name for tool in self.tools_of(act.place, act.agent)]
        if act.name not in names:
            raise ConfigError(f"the protocol calls a tool for agent {act.agent!r}: {unknown(act.name, names)}")


def _tools_of(environment: Environment, agent: str) -> list[Tool]:
    return list(environment.tools(agent))
