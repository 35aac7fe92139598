"""Agents who work at the same time, with the asynchronous client of the `openai` package: all answer, all read what the
others have said, and the answer that most of them give in the end is that of the team.
"""

import asyncio
from collections import Counter

from openai import AsyncOpenAI

TEAM = ("solver", "checker")


async def solve(question: str, base_url: str, api_key: str) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def answer(agent: str, messages: list) -> str:
            reply = await client.chat.completions.create(model=agent, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            return reply.choices[0].message.content

        talks = {agent: [{"role": "user", "content": question}] for agent in TEAM}
        said = await asyncio.gather(*(answer(agent, talk) for agent, talk in talks.items()))
        for agent, talk in talks.items():
            others = [text for name, text in zip(TEAM, said, strict=True) if name != agent]
            talk.append({"role": "user", "content": f"Others say: {' '.join(others)} And now?"})
        said = await asyncio.gather(*(answer(agent, talk) for agent, talk in talks.items()))
    return Counter(said).most_common(1)[0][0]
