"""Two agents, with the `anthropic` package: a solver who may use a tool, and a checker who tells it what it thinks.

pip install anthropic
"""

from anthropic import Anthropic

NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


def solve(question: str, base_url: str, api_key: str) -> str:
    client = Anthropic(base_url=base_url, api_key=api_key)

    def ask(agent: str, messages: list, tools: list) -> str:
        reply = client.messages.create(
            model=agent, max_tokens=1024, system="Calculate.", messages=messages, tools=tools
        )
        messages.append({"role": "assistant", "content": reply.content})
        if reply.stop_reason != "tool_use":
            return reply.content[0].text
        calls = [block for block in reply.content if block.type == "tool_use"]
        sums = [(call.id, call.input["a"] + call.input["b"]) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": name, "content": str(value)} for name, value in sums]
        messages.append({"role": "user", "content": results})
        return ask(agent, messages, tools)

    talk = [{"role": "user", "content": question}]
    first = ask("solver", talk, [ADD])
    thought = ask("checker", [{"role": "user", "content": f"{question} {first}?"}], [])
    talk.append({"role": "user", "content": f"A colleague says: {thought} What is your answer?"})
    return ask("solver", talk, [ADD])
