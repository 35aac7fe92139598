"""The rewards of a taskset of the library verifiers, as a reward source. Imports no torch."""

import asyncio

from maporl.config.schema import RewardSection
from maporl.event_loop import wait
from maporl.integrations.verifiers import Verifiers
from maporl.rewards.base import RewardFailure, RewardSource, Values
from maporl.rewards.build import Voices
from maporl.tasks.base import Task
from maporl.types import Dialogue, Example, Message


class VerifiersReward(RewardSource):
    """The sum of the weighted rewards that a task of :class:`maporl.integrations.verifiers.Verifiers` gives an answer.

    A reward of the task is shown the agent's own conversation up to the answer, as the trace of one agent.
    """

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the sum for each answer, and None for other utterances.

        Raises:
            RewardFailure: the task is another one, or it gives no reward, for example because all of them need a
                runtime.
        """
        if not isinstance(task, Verifiers):
            raise RewardFailure(f"reward source 'verifiers' belongs to task verifiers, and this is task {task.name}")
        asked = [(d.example, conversation(d, u.id)) for d in dialogues for u in d.answers()]

        async def all_of_them() -> list[dict[str, float]]:
            return await asyncio.gather(*(_scored(task, example, said) for example, said in asked))

        remaining = iter(wait(all_of_them()))
        return [[sum(next(remaining).values()) if u.answers else None for u in d.utterances] for d in dialogues]


async def _scored(task: Verifiers, example: Example, said: list[Message]) -> dict[str, float]:
    rewards = await task.rewards(example, said)
    if not rewards:
        raise RewardFailure(
            f"task verifiers: {task.use} gives no reward without a runtime (left out: "
            f"{', '.join(task.left_out()) or 'none'}); use a reward function of your own"
        )
    return rewards


def conversation(dialogue: Dialogue, answer: int) -> list[Message]:
    """Return what an agent said and heard from its first answer to ``answer``, without the prompt."""
    last = next(u for u in dialogue.utterances if u.id == answer)
    utterances = [
        u for u in dialogue.utterances if u.agent == last.agent and u.id <= answer and not (u.fresh and u is not last)
    ]
    said: list[Message] = []
    for number, u in enumerate(utterances):
        said += [] if number == 0 else u.messages
        said.append({"role": "assistant", "content": u.text})
    return said


def build(section: RewardSection, voices: Voices | None) -> RewardSource:
    """Return the sum of the weighted rewards that a task of the library verifiers gives an answer."""
    return VerifiersReward()
