"""Questions of a file as a task of inspect_ai, which asks an agent or a team at its address, and knows no more of it.

    maporl api runs/products                                                # serves it on port 8700
    INSPECT_EVAL_MODEL=openai-api/maporl/team inspect eval inspect_task.py -T file=test.jsonl

with MAPORL_BASE_URL=http://127.0.0.1:8700/v1 and MAPORL_API_KEY, which is the address's token, or anything without one.
Each line of the file has a ``question`` and an ``answer``. The last number of a reply is its answer.
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def products(file: str = "questions.jsonl") -> Task:
    """The questions of a file, each asked once."""
    fields = FieldSpec(input="question", target="answer")
    data = json_dataset(str(Path(file).absolute()), fields)
    return Task(dataset=data, solver=generate(), scorer=match(location="end", numeric=True))
