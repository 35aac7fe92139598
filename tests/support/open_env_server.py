"""OpenEnv servers for tests: ``python open_env_server.py PORT SLOTS KIND``.

KIND is words (three steps), long (a hundred steps) or tools.
"""

import os
import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

PORT, SLOTS, KIND = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEPS = 100 if KIND == "long" else 3


class Guess(Action):
    """A guess, which may be a word, and a bid."""

    word: str
    bid: int = 1


class Seen(Observation):
    text: str = ""
    left: int = 0


class Guessing(Environment):
    """Guess a number between 0 and 9, in so many steps. The seed draws the number."""

    SUPPORTS_CONCURRENT_SESSIONS = SLOTS > 1

    def reset(self, seed=None, episode_id=None, level="easy", **kwargs):
        self.number, self.steps = (seed or 0) % 10, 0
        return Seen(text=f"Guess a number ({level}).", left=STEPS)

    def step(self, action, timeout_s=None, **kwargs):
        if action.word == "sleep":
            time.sleep(2)
        if action.word == "die":
            os._exit(3)
        if action.word == "fail":
            raise ValueError("this word is forbidden")
        self.steps += 1
        right = action.word == str(self.number)
        done = right or self.steps == STEPS
        return Seen(text="yes" if right else "no", left=STEPS - self.steps, reward=float(right) * action.bid, done=done)

    @property
    def state(self):
        return State(step_count=self.steps)


class Tools(MCPEnvironment):
    """A counter with tools."""

    SUPPORTS_CONCURRENT_SESSIONS = SLOTS > 1

    def __init__(self):
        server = FastMCP("counter")

        @server.tool
        def up(by: int) -> str:
            """Count up."""
            self.count += by
            return f"now {self.count}"

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("it failed")

        super().__init__(server)
        self.count = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Observation(done=False, reward=None)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

    @property
    def state(self):
        return State(step_count=self.count)


if KIND != "tools":
    app = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=SLOTS)
else:
    app = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=SLOTS)
uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="error")
