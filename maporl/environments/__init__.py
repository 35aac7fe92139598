"""Tools that agents call, and environments in which they act.

``TOOLS`` and ``ENVIRONMENTS`` name those that come with maporl. Each entry is a function or a class that is called with
the options of its section. One of ``TOOLS`` returns a :class:`Tool`, a :class:`Toolbox` or a typed function. One of
``ENVIRONMENTS`` returns an :class:`Environment`.
"""

from maporl.config.imports import Parts
from maporl.environments.base import Environment as Environment
from maporl.environments.base import Tool as Tool
from maporl.environments.base import Toolbox as Toolbox

TOOLS = Parts(
    {
        "bm25": "maporl.datasets.search:bm25",
        "calculator": "maporl.environments.calculator:calculator",
        "mcp": "maporl.integrations.mcp:MCPTools",
        "python": "maporl.environments.python:Python",
        "run_tests": "maporl.environments.python:RunTests",
        "triplet": "maporl.methods.triplets:TripletTool",
    }
)

ENVIRONMENTS = Parts(
    {
        "bm25": "maporl.datasets.search:QuestionSearch",
        "mcp": "maporl.integrations.mcp:MCPEnvironment",
        "openenv": "maporl.integrations.open_env:OpenEnv",
    }
)
