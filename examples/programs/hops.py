"""A planner asks a searcher, who looks facts up: a plain program with the OpenAI client, which hops.yaml trains."""

import re

from openai import OpenAI

CALLS = 4
CLIENT = OpenAI(base_url="http://localhost", api_key="none")  # making one takes longer than a request


def search(paragraphs: list[dict], name: str) -> str:
    """Return the paragraph about somebody."""
    found = (f"[{number}] {one['title']}: {one['text']}" for number, one in enumerate(paragraphs, 1))
    return next((text for text in found if text.partition("] ")[2].startswith(f"{name}:")), "")


def turn(client: OpenAI, model: str, question: str, tool: str, run) -> str:
    """Let a model answer ``question``. It may call ``<tool>text</tool>``, and is told what ``run(text)`` returns."""
    messages = [{"role": "user", "content": question}]
    for _ in range(CALLS + 1):
        stop = [f"</{tool}>"]
        said = client.chat.completions.create(model=model, messages=messages, stop=stop).choices[0].message.content
        call = re.search(f"<{tool}>(.*)", said, re.DOTALL)
        if call is None:
            break
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "=" + run(call[1])}]
    return said


def solve(question: str, base_url: str, api_key: str, example: dict) -> str:
    """Answer a question such as ``bd>>``: whom does the one like whom bd likes?"""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)

    def searcher(asked: str) -> str:
        if not asked.strip():
            return ""
        return turn(client, "searcher", asked, "search", lambda name: search(example["meta"]["paragraphs"], name))

    return turn(client, "planner", question, "ask_searcher", searcher)
