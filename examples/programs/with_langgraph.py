"""A graph of two agents with LangGraph: a solver who may use a tool, and a checker who reads all that was said.

pip install langgraph langchain-openai
"""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def solve(question: str, base_url: str, api_key: str) -> str:
    solver = ChatOpenAI(model="solver", base_url=base_url, api_key=api_key).bind_tools([add])
    checker = ChatOpenAI(model="checker", base_url=base_url, api_key=api_key)

    def solves(state: MessagesState) -> dict:
        return {"messages": [solver.invoke(state["messages"])]}

    def checks(state: MessagesState) -> dict:
        said = state["messages"][-1].text
        return {"messages": [checker.invoke([HumanMessage(f"{question} {said}? Say the right answer.")])]}

    graph = StateGraph(MessagesState)
    graph.add_node("solver", solves)
    graph.add_node("tools", ToolNode([add]))
    graph.add_node("checker", checks)
    graph.add_edge(START, "solver")
    graph.add_conditional_edges("solver", tools_condition, {"tools": "tools", END: "checker"})
    graph.add_edge("tools", "solver")
    graph.add_edge("checker", END)
    state = graph.compile().invoke({"messages": [HumanMessage(question)]})
    return state["messages"][-1].text
