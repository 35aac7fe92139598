"""A group chat of three with AutoGen: a solver, a checker and a judge speak in turn, and the judge speaks last.

pip install autogen-agentchat "autogen-ext[openai]"
"""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}
TEAM = {"solver": "Calculate.", "checker": "Say what is wrong.", "judge": "Say the right answer."}


async def solve(question: str, base_url: str, api_key: str) -> str:
    clients = {
        name: OpenAIChatCompletionClient(model=name, base_url=base_url, api_key=api_key, model_info=INFO)
        for name in TEAM
    }
    members = [AssistantAgent(name, clients[name], system_message=text) for name, text in TEAM.items()]
    chat = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(1 + 2 * len(TEAM)))
    try:
        result = await chat.run(task=question)
    finally:
        for client in clients.values():
            await client.close()
    return result.messages[-1].content
