"""pip install llama-index-llms-openai-like llama-index-core"""

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.llms.openai_like import OpenAILike
from sums import AGAIN, Sum, add

SAYS = {"structured": ['<call>{"name": "Sum", "arguments": {"answer": 1234}}</call>']}


def model(base_url: str, api_key: str) -> OpenAILike:
    return OpenAILike("solver", api_base=base_url, api_key=api_key, is_chat_model=True, is_function_calling_model=True)


def chat(question: str, base_url: str, api_key: str) -> str:
    talk = SimpleChatEngine.from_defaults(llm=model(base_url, api_key))
    talk.chat(question)
    return str(talk.chat(AGAIN))


async def tools(question: str, base_url: str, api_key: str) -> str:
    return str(await FunctionAgent(tools=[add], llm=model(base_url, api_key), streaming=False).run(question))


async def stream(question: str, base_url: str, api_key: str) -> str:
    handler = FunctionAgent(tools=[add], llm=model(base_url, api_key)).run(question)
    return "".join([event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)])


def structured(question: str, base_url: str, api_key: str) -> str:
    return str(model(base_url, api_key).as_structured_llm(Sum).complete(question).raw.answer)
