"""An environment in which agents buy, and drivers and specifications for it."""

import time
from typing import ClassVar

from maporl import Arithmetic, Debate
from maporl.config.schema import EnvironmentSection
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.base import Environment, Tool
from maporl.environments.build import TeamTools, build_grants
from maporl.environments.rooms import EnvironmentSpec
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Example, Result
from trl_ext.ppo.options import Decoding

TASK = Arithmetic(largest=9)
EXAMPLES = [Example("e", "2+2=", "4", {"stock": 3}), Example("f", "3+3=", "6", {"stock": 3})]


class Shop(Environment):
    """Sells a stock that all agents share. The first buyer of everything earns 1."""

    forks = "replay"
    opened: ClassVar[list["Shop"]] = []

    def __init__(self, slow=0.0):
        self.slow, self.closed = slow, 0
        Shop.opened.append(self)

    def reset(self, seed, row):
        self.left, self.bought = row["stock"], {}
        self.seed = seed
        return f" The shop has {self.left}."

    def tools(self, agent):
        def buy(count: int) -> str:
            """Buy pieces.

            Args:
                count: how many
            """
            time.sleep(self.slow)
            if count > self.left:
                return f"Only {self.left} left."
            self.left -= count
            self.bought[agent] = self.bought.get(agent, 0) + count
            return Result(f"You have {self.bought[agent]}.", reward=0.1 * count)

        return [Tool.of(buy)]

    def observe(self, agent):
        return None if self.left == 3 else f" {self.left} are left."

    def reward(self):
        return {agent: float(count) for agent, count in self.bought.items()}

    def close(self):
        self.closed += 1


def spec(make=Shop, name="shop", agents=("ann", "bob"), **options):
    return EnvironmentSpec(name, make, agents, EnvironmentSection(use=name, **options))


def buys(count):
    return f'<call>{{"name": "buy", "arguments": {{"count": {count}}}}}</call>'


def driver_of(script, world, protocol=None, agents=("ann", "bob"), given=None, **options):
    grants = build_grants(TeamTools.of(given or {}, {}, agents).grants, world)
    specs = {}
    for name in agents:
        kit = agent_tools(name, grants[name], world, None, 100) if name in grants else None
        specs[name] = SpeakerSpec("scripted", (name,), tools=kit)
    engine = ScriptedEngine(script)
    return RolloutDriver(
        TASK, protocol or Debate(turns=1), specs, {"scripted": engine}, Decoding(1.0), world=world, **options
    )


def by_turns(**lines):
    """A script by agent: the next line of it."""
    left = {name: list(own) for name, own in lines.items()}
    return lambda request: left[request.ask.agent].pop(0)
