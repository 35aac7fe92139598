"""From dialogues to what learners are trained on: one sample for each utterance, with the columns that advantages need."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maporl.rewards.base import where
from maporl.schedules import Plan
from maporl.types import Dialogue, Stop, Utterance
from trl_ext.chat import Tokenizer, encode_prompt
from trl_ext.token_batch import Completion

Name = tuple
"""What names an utterance in an update: copies of it, in dialogues that were forked after it, have the same name."""


@dataclass(frozen=True)
class Columns:
    """What advantages may know of an utterance: where it stood, who said it, what it was worth. It holds no tokens and no text, and
    it is what travels between processes.

    ``name``, ``caller`` and ``earlier`` refer to utterances by :data:`Name`; ``earlier`` has (step, agent, name) of each utterance
    before it in its dialogue. ``action`` is a digest of what was said. ``policy`` is empty where nobody learns from it.
    """

    name: Name
    policy: str
    prompt: int
    rollout: int
    agent: str
    role: str | None
    turn: int
    order: int
    credit: float
    caller: Name | None
    earlier: tuple[tuple[int, str, Name], ...]
    action: str
    game: Any = None
    seed: Any = None
    state: Any = None

    @classmethod
    def of(cls, dialogue: Dialogue, utterance: Utterance, policy: str = "") -> "Columns":
        """Those of an utterance that has a credit."""
        before = [u for u in dialogue.utterances if u.order < utterance.order]
        caller = None if utterance.caller is None else _name(dialogue, dialogue.utterances[utterance.caller])
        return cls(
            name=_name(dialogue, utterance),
            policy=policy,
            prompt=dialogue.prompt,
            rollout=dialogue.rollout,
            agent=utterance.agent,
            role=utterance.role,
            turn=utterance.turn,
            order=utterance.order,
            credit=utterance.rewards["credit"],
            caller=caller,
            earlier=tuple((u.order, u.agent, _name(dialogue, u)) for u in before),
            action=hashlib.blake2b(utterance.text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest(),
            game=utterance.tags.get("game"),
            seed=utterance.tags.get("seed"),
            state=utterance.tags.get("state"),
        )


@dataclass(kw_only=True)
class TrainingSample(Completion):
    """A completion that knows what it was in its dialogue. Its ``score`` is the mean credit of the utterance's copies."""

    columns: Columns
    utterance: Utterance = field(repr=False)


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
    were forked after it, are one sample, whose score is the mean of theirs. ``critic_context`` is what the critic reads
    before the answer: everything its agent saw ("dialogue"), the question alone ("answer"), or the question and all
    agents' words so far ("joint").
    """
    samples: dict[str, list[TrainingSample]] = {}
    copies: dict[Name, tuple[TrainingSample, list[float]]] = {}
    for dialogue in dialogues:
        for utterance in dialogue.utterances:
            learns = utterance.trainable and utterance.policy in tokenizers
            if not learns or not plan.learns(utterance.agent, utterance.turn):
                continue
            credit = utterance.rewards["credit"]
            name = _name(dialogue, utterance)
            if utterance.sample is not None and name in copies:
                first, credits = copies[name]
                credits.append(credit)
                first.score = sum(credits) / len(credits)
                continue
            sample = TrainingSample(
                prompt_ids=utterance.prompt_ids,
                response_ids=utterance.response_ids,
                ended=utterance.stop is Stop.EOS,
                label=f"update {update}, {where(dialogue, utterance)}",
                text=utterance.text,
                head=min(utterance.turn, critic_outputs - 1),
                score=credit,
                sampled_logprobs=utterance.logprobs,
                critic_prompt_ids=_critic_prompt(dialogue, utterance, critic_context, tokenizers[utterance.policy]),
                columns=Columns.of(dialogue, utterance, utterance.policy),
                utterance=utterance,
            )
            copies[name] = (sample, [credit])
            samples.setdefault(utterance.policy, []).append(sample)
    return samples


def credited_by_nobody_else(dialogues: list[Dialogue], known: set[Name]) -> list[Columns]:
    """The columns of utterances with a credit that are not among the ``known`` ones: nobody learns from them."""
    others: dict[Name, Columns] = {}
    for dialogue in dialogues:
        for utterance in dialogue.utterances:
            name = _name(dialogue, utterance)
            if "credit" in utterance.rewards and name not in known and name not in others:
                others[name] = Columns.of(dialogue, utterance)
    return list(others.values())


def _name(dialogue: Dialogue, utterance: Utterance) -> Name:
    if utterance.sample is not None:
        return ("sample", dialogue.prompt, utterance.sample)
    return (dialogue.prompt, dialogue.rollout, utterance.id)


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
