"""Ask the untrained model to restate a final answer that grading cannot find.

Only graders and the other agents read the restated answer. The tokens that are trained on stay as they were sampled.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from maporl.tasks.base import Task
from maporl.team.team import Team
from maporl.types import Dialogue, Message, Utterance
from trl_ext.chat.encoding import encode_prompt
from trl_ext.learning.policy import starting_point
from trl_ext.models.forward import completion_logprobs
from trl_ext.ppo.options import GREEDY
from trl_ext.sampling.sample import generate

Say = Callable[[str, list[list[Message]], int], list[str]]
"""(policy, conversations, most tokens) -> the greedy answer of the policy's untrained weights to each conversation."""

LONGEST = 15
"""Most tokens of a restated answer."""
WORDINGS = (
    "Give only the final answer of your solution above, in this form and with nothing else: {form}",
    "Your solution above concludes with an answer. Write that answer on one line and nothing else: {form}",
    "Fill in the answer that you found above: {form}",
)
"""Requests that are tried in turn. A greedy answer to the same words would be the same, so the words differ."""


def restate(dialogues: list[Dialogue], task: Task, say: Say) -> None:
    """Fill in ``restated`` for the answers in whose text grading finds no final answer.

    ``say`` asks the untrained weights.
    """
    unread = [
        (d, u)
        for d in dialogues
        for u in d.answers()
        if u.restated is None and u.policy and u.response_ids
        if u.is_thought or task.grade(d.asked(u), u.text).answer is None
    ]
    for wording in WORDINGS:
        request = wording.format(form=task.answer_form)
        for policy in dict.fromkeys(u.policy for _, u in unread):
            answers = [(d, u) for d, u in unread if u.policy == policy]
            conversations = [
                [
                    {"role": "user", "content": task.question(d.asked(u))},
                    {"role": "assistant", "content": u.text},
                    {"role": "user", "content": request},
                ]
                for d, u in answers
            ]
            for (d, u), text in zip(answers, say(policy, conversations, LONGEST), strict=True):
                answer = task.grade(d.asked(u), text).answer
                if answer is not None:
                    u.restated = f"Answer: {answer}"
        unread = [(d, u) for d, u in unread if u.restated is None]


class UntrainedWeights:
    """The weights that the policies started from. They restate answers greedily, and say how likely words are to them.

    Args:
        team: the policies, for their tokenizers.
        model_of: opens the untrained model of a policy, which is given by name.
        batch_size: the number of conversations that are answered at a time.
    """

    def __init__(self, team: Team, model_of: Callable[[str], AbstractContextManager[Any]], batch_size: int):
        self.team, self.model_of, self.batch_size = team, model_of, batch_size

    @classmethod
    def before_training(cls, team: Team, batch_size: int) -> "UntrainedWeights":
        """Keep the present weights of ``team``, before trained weights are loaded over them.

        A new adapter does not change its base model, so the base with adapters off serves. Other weights are copied.
        """
        for policy in team.policies.values():
            if policy.trainable:
                start = starting_point(policy.model, policy.adapter) if policy.adapter else None
                policy.refer_to(None, start, needed=True)
        opened = {name: p.reference_model if p.trainable else p.active for name, p in team.policies.items()}
        return cls(team, lambda name: opened[name](), batch_size)

    def nll(self, utterances: list[Utterance]) -> list[float]:
        """Return the mean negative log-probability of each utterance's tokens, in nats a token, after what its agent
        saw."""
        nlls: dict[int, float] = {}
        for name in dict.fromkeys(u.policy for u in utterances):
            policy_utterances = [u for u in utterances if u.policy == name]
            logprobs = self.logprobs(name, [(u.prompt_ids, u.response_ids) for u in policy_utterances])
            nlls |= {id(u): -total / len(u.response_ids) for u, total in zip(policy_utterances, logprobs, strict=True)}
        return [nlls[id(u)] for u in utterances]

    def generate(self, policy: str, conversations: list[list[Message]], most: int) -> list[str]:
        """Return the greedy answers of the untrained weights of ``policy``, with at most ``most`` tokens each.

        Raises:
            PromptTooLong: a conversation does not fit the model's context.
        """
        voice = self.team.policies[policy].voice
        prompts = [encode_prompt(voice.tokenizer, messages) for messages in conversations]
        for prompt in prompts:
            voice.check_length(len(prompt), most, f"restating an answer of policy {policy!r}")
        answers = self.complete(policy, prompts, most)
        return [voice.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]

    def logprobs(self, policy: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Return the log-probability of each completion after its prompt, in nats.

        ``rows`` are the two as token ids.
        """
        with self.model_of(policy) as model:
            return completion_logprobs(model, rows)

    def complete(self, policy: str, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return the ids of the greedy completion of each prompt, with at most ``most`` tokens."""
        voice = self.team.policies[policy].voice
        with self.model_of(policy) as model:
            return generate(model, prompts, voice.draw(None, GREEDY, most), voice.tokenizer, self.batch_size)
