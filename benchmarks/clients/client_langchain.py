"""pip install langchain langchain-openai"""

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from sums import AGAIN, Sum, add


def chat(question: str, base_url: str, api_key: str) -> str:
    model = ChatOpenAI(model="solver", base_url=base_url, api_key=api_key)
    messages = [HumanMessage(question)]
    messages += [model.invoke(messages), HumanMessage(AGAIN)]
    return model.invoke(messages).text


def tools(question: str, base_url: str, api_key: str, **options) -> str:
    model = ChatOpenAI(model="solver", base_url=base_url, api_key=api_key, **options)
    return create_agent(model, [add]).invoke({"messages": [HumanMessage(question)]})["messages"][-1].text


def stream(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, streaming=True)


def responses(question: str, base_url: str, api_key: str) -> str:
    return tools(question, base_url, api_key, use_responses_api=True)


def structured(question: str, base_url: str, api_key: str) -> str:
    model = ChatOpenAI(model="solver", base_url=base_url, api_key=api_key)
    return str(model.with_structured_output(Sum).invoke(question).answer)
