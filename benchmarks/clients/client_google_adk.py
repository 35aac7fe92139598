"""pip install google-adk litellm"""

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from sums import AGAIN, Sum, add


async def said(texts: list[str], base_url: str, api_key: str, mode=StreamingMode.NONE, **options) -> str:
    model = LiteLlm("openai/solver", api_base=base_url, api_key=api_key)
    runner = InMemoryRunner(LlmAgent(name="solver", model=model, **options), app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="1")
    for text in texts:
        message = Content(role="user", parts=[Part(text=text)])
        events = runner.run_async(
            user_id="1", session_id=session.id, new_message=message, run_config=RunConfig(streaming_mode=mode)
        )
        ended = [event async for event in events if event.is_final_response()]
    return ended[-1].content.parts[-1].text


async def chat(question: str, base_url: str, api_key: str) -> str:
    return await said([question, AGAIN], base_url, api_key)


async def tools(question: str, base_url: str, api_key: str) -> str:
    return await said([question], base_url, api_key, tools=[add])


async def stream(question: str, base_url: str, api_key: str) -> str:
    return await said([question], base_url, api_key, StreamingMode.SSE, tools=[add])


async def structured(question: str, base_url: str, api_key: str) -> str:
    return str(Sum.model_validate_json(await said([question], base_url, api_key, output_schema=Sum)).answer)
