"""A program that cuts its memory, as chat applications and coding agents do, with the `openai` package: once a talk has
more than ``most`` messages, a summary by the solver itself takes the place of all but the last ones.
"""

from openai import OpenAI

TURNS, KEPT = 12, 2
CLIENT = OpenAI(base_url="http://localhost", api_key="none")  # making one takes longer than a request


def solve(question: str, base_url: str, api_key: str, most: int | None = 8) -> str:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)

    def ask(agent: str, messages: list) -> str:
        return client.chat.completions.create(model=agent, messages=messages).choices[0].message.content

    solver = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        said = ask("solver", solver)
        thought = ask("checker", [{"role": "user", "content": f"{question} {said}?"}])
        solver += [{"role": "assistant", "content": said}, {"role": "user", "content": thought}]
        if most is not None and len(solver) > most:
            old, recent = solver[:-KEPT], solver[-KEPT:]
            summary = ask("solver", [*old, {"role": "user", "content": "Sum up what was said."}])
            solver = [{"role": "user", "content": f"{question} So far: {summary}"}, *recent]
    return ask("solver", solver)


def keep_all(question: str, base_url: str, api_key: str) -> str:
    """The same without a summary, to compare with."""
    return solve(question, base_url, api_key, most=None)
