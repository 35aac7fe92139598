"""pip install dspy"""

import dspy
from sums import AGAIN, add

SAYS = {
    "chat": ["[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]", "[[ ## answer ## ]]\n1234\n\n[[ ## completed ## ]]"],
    "tools": [
        "[[ ## next_thought ## ]]\nI add.\n[[ ## next_tool_name ## ]]\nadd\n[[ ## next_tool_args ## ]]\n"
        '{"a": 1200, "b": 34}',
        "[[ ## next_thought ## ]]\nDone.\n[[ ## next_tool_name ## ]]\nfinish\n[[ ## next_tool_args ## ]]\n{}",
        "[[ ## reasoning ## ]]\nI added.\n[[ ## answer ## ]]\n1234",
    ],
    "stream": ["[[ ## answer ## ]]\n1234"],
    "responses": ["[[ ## answer ## ]]\n1234"],
    "structured": ['{"answer": 1234}'],
}


def lm(base_url: str, api_key: str, **options) -> dspy.LM:
    return dspy.LM("openai/solver", api_base=base_url, api_key=api_key, cache=False, **options)


def chat(question: str, base_url: str, api_key: str) -> str:
    answer = dspy.Predict("history: dspy.History, question -> answer")
    with dspy.context(lm=lm(base_url, api_key)):
        first = answer(question=question, history=dspy.History(messages=[]))
        history = dspy.History(messages=[{"question": question, "answer": first.answer}])
        return answer(question=AGAIN, history=history).answer


def tools(question: str, base_url: str, api_key: str) -> str:
    with dspy.context(lm=lm(base_url, api_key)):
        return dspy.ReAct("question -> answer", tools=[add])(question=question).answer


async def stream(question: str, base_url: str, api_key: str) -> str:
    with dspy.context(lm=lm(base_url, api_key)):
        pieces = dspy.streamify(dspy.Predict("question -> answer"))(question=question)
        return [piece async for piece in pieces][-1].answer


def responses(question: str, base_url: str, api_key: str) -> str:
    with dspy.context(lm=lm(base_url, api_key, model_type="responses")):
        return dspy.Predict("question -> answer")(question=question).answer


def structured(question: str, base_url: str, api_key: str) -> str:
    with dspy.context(lm=lm(base_url, api_key), adapter=dspy.JSONAdapter()):
        return str(dspy.Predict("question -> answer: int")(question=question).answer)
