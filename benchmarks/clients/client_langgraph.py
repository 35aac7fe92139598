"""pip install langgraph langchain-openai"""

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from sums import AGAIN, add

THREAD = {"configurable": {"thread_id": "1"}}


def graph(base_url: str, api_key: str, **options):
    model = ChatOpenAI(model="solver", base_url=base_url, api_key=api_key, **options).bind_tools([tool(add)])
    built = StateGraph(MessagesState)
    built.add_node("solver", lambda state: {"messages": [model.invoke(state["messages"])]})
    built.add_node("tools", ToolNode([tool(add)]))
    built.add_edge(START, "solver")
    built.add_conditional_edges("solver", tools_condition)
    built.add_edge("tools", "solver")
    return built.compile(checkpointer=InMemorySaver())


def chat(question: str, base_url: str, api_key: str) -> str:
    talk = graph(base_url, api_key)
    for text in (question, AGAIN):
        state = talk.invoke({"messages": [HumanMessage(text)]}, THREAD)
    return state["messages"][-1].text


def tools(question: str, base_url: str, api_key: str, **options) -> str:
    state = graph(base_url, api_key, **options).invoke({"messages": [HumanMessage(question)]}, THREAD)
    return state["messages"][-1].text


def stream(question: str, base_url: str, api_key: str) -> str:
    events = graph(base_url, api_key).stream({"messages": [HumanMessage(question)]}, THREAD, stream_mode="messages")
    return [piece.text for piece, of in events if of["langgraph_node"] == "solver" and piece.text][-1]


def responses(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, use_responses_api=True)
