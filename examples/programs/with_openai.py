"""Two agents, with the `openai` package: a solver answers, and a checker tells it what it thinks of the answer."""

from openai import OpenAI


def solve(question: str, base_url: str, api_key: str) -> str:
    client = OpenAI(base_url=base_url, api_key=api_key)

    def ask(agent: str, messages: list) -> str:
        reply = client.chat.completions.create(model=agent, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return reply.choices[0].message.content

    solver = [{"role": "system", "content": "Calculate."}, {"role": "user", "content": question}]
    first = ask("solver", solver)
    thought = ask("checker", [{"role": "user", "content": f"{question} {first}?"}])
    solver.append({"role": "user", "content": f"A colleague says: {thought} What is your answer?"})
    return ask("solver", solver)
