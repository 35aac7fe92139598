"""Asking the untrained model to restate a final answer that grading cannot find.

Only grading and the other agents read what it says; the tokens that are trained on stay as they were sampled.
"""

from collections.abc import Callable

from maporl.tasks.base import Task
from maporl.types import Dialogue, Message

Say = Callable[[str, list[list[Message]], int], list[str]]
"""(policy, conversations, most tokens) -> what the policy's untrained weights say to each, greedily."""

LONGEST = 15
WORDINGS = (
    "Give only the final answer of your solution above, in this form and with nothing else: {form}",
    "Your solution above concludes with an answer. Write that answer on one line and nothing else: {form}",
    "Fill in the answer that you found above: {form}",
)
"""One try each, because a greedy answer to the same words would be the same."""


def restate(dialogues: list[Dialogue], task: Task, say: Say) -> None:
    """Fill in ``restated`` of the answers of ``dialogues`` in whose text grading finds no final answer."""
    open_ones = [
        (d, u)
        for d in dialogues
        for u in d.answers()
        if u.restated is None and u.policy and u.response_ids and task.grade(d.example, u.text).answer is None
    ]
    for wording in WORDINGS:
        request = wording.format(form=task.answer_form)
        for policy in dict.fromkeys(u.policy for _, u in open_ones):
            own = [(d, u) for d, u in open_ones if u.policy == policy]
            conversations = [
                [
                    {"role": "user", "content": task.question(d.example)},
                    {"role": "assistant", "content": u.text},
                    {"role": "user", "content": request},
                ]
                for d, u in own
            ]
            for (d, u), text in zip(own, say(policy, conversations, LONGEST), strict=True):
                answer = task.grade(d.example, text).answer
                if answer is not None:
                    u.restated = f"Answer: {answer}"
        open_ones = [(d, u) for d, u in open_ones if u.restated is None]
