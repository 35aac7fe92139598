"""Replies that come piece by piece, with the `openai` package: each piece is shown as it comes, in an application for
people. Here they are only put together.
"""

from openai import OpenAI


def solve(question: str, base_url: str, api_key: str) -> str:
    client = OpenAI(base_url=base_url, api_key=api_key)

    def ask(agent: str, messages: list) -> str:
        text = ""
        with client.chat.completions.create(
            model=agent, messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            for chunk in stream:
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
        messages.append({"role": "assistant", "content": text})
        return text

    talk = [{"role": "user", "content": question}]
    for _ in range(2):
        said = ask("solver", talk)
        doubt = ask("checker", [{"role": "user", "content": f"{question} {said}?"}])
        talk.append({"role": "user", "content": doubt})
    return ask("solver", talk)
