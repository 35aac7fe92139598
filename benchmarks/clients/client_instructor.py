"""pip install instructor"""

import instructor
from openai import OpenAI
from sums import Sum

SAYS = {"structured": ['<call>{"name": "Sum", "arguments": {"answer": 1234}}</call>']}


def structured(question: str, base_url: str, api_key: str) -> str:
    client = instructor.from_openai(OpenAI(base_url=base_url, api_key=api_key))
    messages = [{"role": "user", "content": question}]
    return str(client.create(model="solver", response_model=Sum, messages=messages).answer)
