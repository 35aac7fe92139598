"""Tools that agents call, and environments in which they act.

``TOOLS`` and ``ENVIRONMENTS`` name those that come with maporl. Each entry is a function or a class that is called with
the options of its section. One of ``TOOLS`` returns a :class:`Tool`, a :class:`Toolbox` or a typed function. One of
``ENVIRONMENTS`` returns an :class:`Environment`.
"""

from maporl.config.imports import Parts
from maporl.environments.base import Environment as Environment
from maporl.environments.base import Tool as Tool
from maporl.environments.base import Toolbox as Toolbox
from maporl.environments.calculator import calculator
from maporl.environments.python import Python, RunTests
from maporl.environments.search import QuestionSearch, bm25
from maporl.environments.triplets import TripletTool

TOOLS = Parts(
    {
        "bm25": bm25,
        "calculator": calculator,
        "mcp": "maporl.integrations.mcp:MCPTools",
        "python": Python,
        "run_tests": RunTests,
        "triplet": TripletTool,
    }
)

ENVIRONMENTS = Parts(
    {
        "bm25": QuestionSearch,
        "mcp": "maporl.integrations.mcp:MCPEnvironment",
        "openenv": "maporl.integrations.open_env:OpenEnv",
    }
)
