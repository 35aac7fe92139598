"""A manager with a colleague whom it calls as a tool, with smolagents.

pip install "smolagents[openai]"
"""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def solve(question: str, base_url: str, api_key: str) -> str:
    def model(name: str) -> OpenAIServerModel:
        return OpenAIServerModel(name, api_base=base_url, api_key=api_key)

    checker = ToolCallingAgent(
        [add], model("checker"), name="checker", description="Calculates.", max_steps=2, verbosity_level=0
    )
    solver = ToolCallingAgent([], model("solver"), managed_agents=[checker], max_steps=3, verbosity_level=0)
    return str(solver.run(question))
