"""Rows that hold texts become token ids of the policy that learns them. No torch."""

from dataclasses import replace

from maporl.loops.rows import Row
from maporl.rollout.requests import opening
from maporl.tasks.base import Task
from maporl.team.agents import Policy
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import encode_prompt, turn_end


def encoded(row: Row, policy: Policy, system: str | None, task: Task) -> Row:
    """Return ``row`` with token ids, if it holds texts: the question as a chat, the pieces one by one, and what ends an
    answer.

    Args:
        row: the row.
        policy: the policy that learns it.
        system: the system prompt of the agent that speaks with the policy.
        task: says how the question is put.
    """
    if row.example is None:
        return row
    question = {"role": "user", "content": task.question(row.example)}
    prompt = encode_prompt(policy.tokenizer, [*opening(system, task.before_question(row.example)), question], None)
    ids: list[int] = []
    bears: list[bool] = []
    for text, learned in row.pieces:
        new = encode_words(policy.tokenizer, text, special=True)
        ids += new
        bears += [learned] * len(new)
    end = turn_end(policy.tokenizer).ids
    bears += [True] * len(end)
    return replace(row, prompt_ids=prompt, completion_ids=[*ids, *end], bears_loss=bears, pieces=(), example=None)
