"""From dialogues to what learners are trained on."""

from collections.abc import Mapping
from dataclasses import dataclass

from maporl.rewards.base import where
from maporl.schedules import Plan
from maporl.types import Dialogue, Stop, Utterance
from trl_ext.chat import Tokenizer, encode_prompt
from trl_ext.token_batch import Completion


@dataclass(kw_only=True)
class TrainingSample(Completion):
    """An answer that knows what it was in its dialogue."""

    dialogue: Dialogue
    utterance: Utterance


def samples_by_policy(
    dialogues: list[Dialogue],
    tokenizers: Mapping[str, Tokenizer],
    plan: Plan,
    update: int,
    critic_outputs: int = 1,
    critic_context: str = "dialogue",
) -> dict[str, list[TrainingSample]]:
    """What each policy learns from in ``update``, in order of dialogue and turn; policies with nothing are absent.

    ``tokenizers`` has the policies that learn; ``plan`` the agents and turns. Copies of one utterance, in dialogues that
    were forked after it, are one answer, whose score is the mean of theirs. ``critic_context`` is what the critic reads
    before the answer: everything its agent saw ("dialogue"), the question alone ("answer"), or the question and all
    agents' words so far ("joint").
    """
    answers: dict[str, list[TrainingSample]] = {}
    copies: dict[tuple[int, int], tuple[TrainingSample, list[float]]] = {}
    for dialogue in dialogues:
        for utterance in dialogue.utterances:
            learns = utterance.trainable and utterance.policy in tokenizers
            if not learns or not plan.learns(utterance.agent, utterance.turn):
                continue
            credit = utterance.rewards["credit"]
            if utterance.sample is not None and (dialogue.prompt, utterance.sample) in copies:
                first, credits = copies[dialogue.prompt, utterance.sample]
                credits.append(credit)
                first.score = sum(credits) / len(credits)
                continue
            said = TrainingSample(
                prompt_ids=utterance.prompt_ids,
                response_ids=utterance.response_ids,
                ended=utterance.stop is Stop.EOS,
                label=f"update {update}, {where(dialogue, utterance)}",
                text=utterance.text,
                head=min(utterance.turn, critic_outputs - 1),
                score=credit,
                sampled_logprobs=utterance.logprobs,
                critic_prompt_ids=_critic_prompt(dialogue, utterance, critic_context, tokenizers[utterance.policy]),
                dialogue=dialogue,
                utterance=utterance,
            )
            if utterance.sample is not None:
                copies[dialogue.prompt, utterance.sample] = (said, [credit])
            answers.setdefault(utterance.policy, []).append(said)
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
