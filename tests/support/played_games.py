"""Games by their rules: best moves, shortest plans, and grids that are filled in. A shop, in which agents buy."""

import random
import time
from collections import defaultdict
from itertools import permutations, product
from types import SimpleNamespace
from typing import ClassVar

from scripted_training import grid_of, shown

from maporl import Arithmetic, Debate
from maporl.config.schema import EnvironmentSection
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.base import Environment, Tool
from maporl.environments.build import TeamTools, build_grants
from maporl.environments.rooms import EnvironmentSpec
from maporl.methods.games.plan_path import STEPS, step_to
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Example, Result
from trl_ext.ppo.options import Decoding


def pushed(state, move, free):
    """What a move does in Sokoban, written once more from the rules."""
    (row, column), boxes = state
    down, right = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}[move]
    there, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if there not in free or (there in boxes and (behind not in free or behind in boxes)):
        return state
    return there, frozenset(behind if box == there else box for box in boxes)


def shortest(state, free, goals):
    """The shortest plan that pushes all boxes onto goals, by a search forwards. None if no plan does."""
    ways, queue = {state: ""}, [state]
    for here in queue:
        if here[1] == goals:
            return ways[here]
        for move in "UDLR":
            after = pushed(here, move, free)
            if after not in ways:
                ways[after] = ways[here] + move
                queue.append(after)
    return None


def full_grids():
    """All ways to fill in a 4 x 4 Sudoku, by trying every four rows."""
    rows = list(permutations((1, 2, 3, 4)))
    for four in product(rows, repeat=4):
        columns = all(len(set(column)) == 4 for column in zip(*four, strict=True))
        blocks = ({*four[r][c : c + 2], *four[r + 1][c : c + 2]} for r in (0, 2) for c in (0, 2))
        if columns and all(len(block) == 4 for block in blocks):
            yield tuple(number for row in four for number in row)


def by_worth(request):
    """The moves of plan-path by how many steps nearer to the goal they lead."""
    here, free, far = grid_of(shown(request), "A", "/")
    worth = defaultdict(list)
    for move in STEPS:
        worth[far[here] - far[step_to(here, move, free)]].append(move)
    return worth


def perfect(request):
    return by_worth(request)[1][0]


def play(protocol, count, words, number=0):
    """Play to the end. Return the outcome and what was said, with rewards, tags, grades and messages."""
    rng = random.Random(number)
    agents = tuple(f"agent{i}" for i in range(count))
    protocol.check_players(agents)
    steps, said = protocol.play(Example(f"e{number}", "", ""), agents), []
    try:
        asks = next(steps)
        while True:
            replies = []
            for ask in asks:
                text = words(ask, rng)
                one = SimpleNamespace(
                    id=len(said), agent=ask.agent, text=text, rewards={}, tags=dict(ask.tags), grade=None,
                    role=ask.role, heard=ask.messages[-1]["content"], step=id(asks),
                )  # fmt: skip
                said.append(one)
                replies.append(one)
            asks = steps.send(replies)
    except StopIteration as end:
        return end.value, said


def cells(observation, agent):
    """The free cells of a board, and who asks."""
    return f"{agent}: {int(observation['action_mask'].sum())} free"


def last_digit(words, legal):
    """The last digit of the words, which must be legal."""
    digits = [c for c in words if c.isdigit()]
    if not digits or digits[-1] not in legal:
        raise ValueError(f"{words!r} names no free cell")
    return legal[digits[-1]]


def broken(observation, agent):
    return observation["nothing"]


def number(observation, agent):
    return 3


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
