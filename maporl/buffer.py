"""From dialogues to what learners are trained on."""

from collections.abc import Mapping

from maporl.rewards.sources import where
from maporl.schedules import Plan
from maporl.types import Dialogue, Stop, Utterance
from trl_ext.chat import Tokenizer, encode_prompt
from trl_ext.rows import Answer


def answers_by_policy(
    dialogues: list[Dialogue],
    tokenizers: Mapping[str, Tokenizer],
    plan: Plan,
    update: int,
    critic_outputs: int = 1,
    critic_context: str = "dialogue",
) -> dict[str, list[Answer]]:
    """What each policy learns from in ``update``, in order of dialogue and turn; policies with nothing are absent.

    ``tokenizers`` has the policies that learn; ``plan`` the agents and turns. Advantages are whitened per (agent,
    turn). ``critic_context`` is what the critic reads before the answer: everything its agent saw ("dialogue"), the
    question alone ("answer"), or the question and all agents' words so far ("joint").
    """
    answers: dict[str, list[Answer]] = {}
    for dialogue in dialogues:
        for utterance in dialogue.utterances:
            learns = utterance.trainable and utterance.policy in tokenizers
            if not learns or not plan.learns(utterance.agent, utterance.turn):
                continue
            answers.setdefault(utterance.policy, []).append(
                Answer(
                    prompt_ids=utterance.prompt_ids,
                    response_ids=utterance.response_ids,
                    ended=utterance.stop is Stop.EOS,
                    label=f"update {update}, {where(dialogue, utterance)}",
                    text=utterance.text,
                    group=(utterance.agent, utterance.turn),
                    head=min(utterance.turn, critic_outputs - 1),
                    score=utterance.rewards["credit"],
                    critic_prompt_ids=_critic_prompt(dialogue, utterance, critic_context, tokenizers[utterance.policy]),
                )
            )
    return answers


def _critic_prompt(dialogue: Dialogue, utterance: Utterance, context: str, tokenizer: Tokenizer) -> list[int] | None:
    """None: what the agent itself saw."""
    if context == "dialogue":
        return None
    first = next(u for u in dialogue.utterances if u.agent == utterance.agent)
    if context == "answer":
        return first.prompt_ids
    said = [f"{u.agent}, turn {u.turn + 1}: {u.words()}" for u in dialogue.utterances if u.order < utterance.order]
    content = "\n\n".join([first.messages[-1]["content"], *said])
    return encode_prompt(tokenizer, [*first.messages[:-1], {"role": "user", "content": content}])
