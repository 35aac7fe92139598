"""Asking an agent many questions outside of a dialogue, and labelling its answers."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from maporl.config.imports import unknown
from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.grading import find_label
from maporl.tasks.base import Task
from maporl.team.loading import own_device
from maporl.team.team import Policy, Team
from maporl.types import Example
from trl_ext.chat.encoding import PromptTooLong, encode_prompt
from trl_ext.ppo.options import Decoding
from trl_ext.process.random_states import forked_rng
from trl_ext.sampling.sample import generate

JUDGE_PROMPT = (
    "Question:\n{question}\n\nA right answer, for comparison:\n{reference}\n\nThe answer to judge:\n{answer}\n\n"
    "Is this answer right? End with one line: Answer: yes or Answer: no"
)
"""The question to a judge. It shows the reference, so that the judge compares instead of solving the question again."""

Label = tuple[bool | None, str]
"""(right, reason): whether an answer is right, or None if nobody can tell, and why."""


class Speaker:
    """One agent, with the weights of its first turn, that answers single messages. Each starts a new conversation.

    ``option`` is the name of the option that named the agent, for the error.

    Raises:
        ConfigError: the configuration has no such agent, or no model speaks for it.
    """

    def __init__(self, config: Config, team: Team, agent: str, option: str):
        if agent not in team.policies_of:
            what = "is a human" if agent in team.agents else unknown(agent, team.policies_of)
            raise ConfigError(f"{option} {agent}: {what}; name an agent of the configuration that a model speaks for")
        self.agent = agent
        self.policy: Policy = team.policies_of[agent][0]
        self.system = team.agents[agent].system
        self.longest = config.ppo.response_length
        self.policy.find_stop_ids(config.ppo)
        model: Any = self.policy.model
        if not getattr(model, "is_loaded_in_4bit", False):  # a quantized model is on its device already
            model.to(own_device(config.training.use_cpu))

    def generate(
        self, texts: Sequence[str], temperature: float, batch_size: int, top_p: float = 1.0, seed: int = 0
    ) -> list[str]:
        """An answer to each text, in order. The same ``seed`` gives the same answers.

        Random numbers elsewhere are not affected.

        Raises:
            ConfigError: a text and an answer of full length do not fit the model's context.
        """
        tokenizer = self.policy.tokenizer
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompts = [encode_prompt(tokenizer, [*system, {"role": "user", "content": text}]) for text in texts]
        try:
            self.policy.voice.check_length(max(map(len, prompts)), self.longest, f"agent {self.agent!r}")
        except PromptTooLong as error:
            raise ConfigError(str(error)) from error
        draw = self.policy.voice.draw(None, Decoding(temperature, top_p), self.longest)
        with forked_rng(), self.policy.active() as model:
            torch.manual_seed(seed)
            answers = generate(model, prompts, draw, tokenizer, batch_size)
        return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]


def seed_of(*place: object) -> random.Random:
    """A generator that depends only on the place in the work, so that a restart draws the same numbers again."""
    return random.Random(":".join(map(str, place)))


def label(
    task: Task, examples: Sequence[Example], answers: Sequence[str], judge: Speaker | None, batch_size: int
) -> list[Label]:
    """A label for each answer, from the task's grader or, if there is one, from a judge's greedy yes or no."""
    if judge is None:
        return [(grade.correct, grade.reason) for grade in task.grade_many(examples, answers)]
    texts = [
        JUDGE_PROMPT.format(question=task.question(example), reference=example.answer, answer=answer)
        for example, answer in zip(examples, answers, strict=True)
    ]
    verdicts = [find_label(text, ("yes", "no")) for text in judge.generate(texts, 0.0, batch_size)]
    return [(None if v is None else v == "yes", "unreadable_judgement" if v is None else "judge") for v in verdicts]
