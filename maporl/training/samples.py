"""Turn the dialogues of an update into training samples: one for each utterance, with the columns of advantages."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maporl.advantages.batch import COLUMNS, TurnBatch
from maporl.rewards.base import where
from maporl.schedules import Plan
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance
from trl_ext.chat.encoding import Tokenizer, encode_prompt
from trl_ext.ppo.batch import Completion
from trl_ext.trainer.update_batch import UpdateBatch

Name = tuple
"""The name of an utterance in an update. Its copies in dialogues that were forked after it have the same name."""


SOMETIMES = frozenset(("game", "seed", "state", "task"))
"""The columns that only some protocols and tasks have. They are recorded if a row has them."""


@dataclass(frozen=True)
class Columns:
    """The columns of an utterance for advantages: its place, its agent and its credit.

    It holds no tokens and no text, and it is what processes send to each other. ``values`` are those of the columns of
    :class:`maporl.advantages.batch.TurnBatch`, which says what they are, by name. The utterances to which two columns
    refer stand beside them by :data:`Name`: ``caller``, and in ``earlier`` (step, agent, name) of each earlier
    utterance of the dialogue, of which one is the parent. ``rewards`` are its rewards by name.
    """

    name: Name
    credit: float
    values: Mapping[str, Any]
    caller: Name | None = None
    earlier: tuple[tuple[int, str, Name], ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, dialogue: Dialogue, utterance: Utterance, names: Sequence[Name], policy: str = "") -> "Columns":
        """Return the columns of an utterance that has a credit.

        ``names`` are those of the dialogue's utterances. ``policy`` is empty if no policy is trained on it.
        """
        spoken = zip(dialogue.utterances, names, strict=True)
        values = {
            "prompt": dialogue.prompt,
            "rollout": dialogue.rollout,
            "agent": utterance.agent,
            "role": utterance.role,
            "turn": utterance.turn,
            "order": utterance.order,
            "game": utterance.tags.get("game"),
            "seed": utterance.tags.get("seed"),
            "state": utterance.tags.get("state"),
            "action": _action(utterance),
            "tokens": len(utterance.response_ids),
            "seconds": sum([call.result.seconds for call in utterance.calls if call.result is not None]),
            "task": dialogue.asked(utterance).meta.get("task"),
            "policy": policy,
        }
        return cls(
            name=names[utterance.id],
            credit=utterance.rewards["credit"],
            values=values,
            caller=None if utterance.caller is None else names[utterance.caller],
            earlier=tuple([(u.order, u.agent, name) for u, name in spoken if u.order < utterance.order]),
            rewards=dict(utterance.rewards),
        )


@dataclass(kw_only=True)
class TrainingSample(Completion):
    """A completion with its utterance and its columns. Its ``score`` is the mean credit of the utterance's copies."""

    columns: Columns
    utterance: Utterance = field(repr=False)


def samples_by_policy(
    dialogues: list[Dialogue],
    tokenizers: Mapping[str, Tokenizer],
    plan: Plan,
    update: int,
    turns: int = 1,
    options: Mapping[str, Any] | None = None,
) -> dict[str, list[TrainingSample]]:
    """Return the samples that each policy is trained on, in the order of dialogues and turns.

    An utterance without a credit is left out, and :mod:`maporl.training.untrained` counts it.
    The copies of one utterance, in dialogues that were forked after it, are one sample. Its score is their mean score.
    A policy without samples is left out.

    Args:
        dialogues: the dialogues of the update, with credits.
        tokenizers: the tokenizers of the policies that are trained.
        plan: the agents and turns that are trained.
        update: the number of the update, for labels.
        turns: the turns of the protocol. With ``critic_per_turn``, turn k uses output k of the critic, and later turns
            use the last one.
        options: the options of each policy: ``critic_context`` says what its critic reads before an utterance, and with
            ``ratio: trajectory`` all utterances of an agent in a dialogue are one trajectory. A turn that was called is
            a trajectory of its own. None: what the critic reads and trajectories are not asked for.
    """
    samples: dict[str, list[TrainingSample]] = {}
    copies: dict[Name, tuple[TrainingSample, list[float]]] = {}
    for dialogue in dialogues:
        names = names_of(dialogue)
        for utterance, name in zip(dialogue.utterances, names, strict=True):
            if "credit" not in utterance.rewards or not may_learn(utterance, tokenizers, plan):
                continue
            credit = utterance.rewards["credit"]
            if utterance.sample is not None and name in copies:
                first, credits = copies[name]
                credits.append(credit)
                first.score = sum(credits) / len(credits)
                continue
            own = None if options is None else options[utterance.policy]
            context = "dialogue" if own is None else own.critic_context
            sample = TrainingSample(
                prompt_ids=utterance.prompt_ids,
                response_ids=utterance.response_ids,
                ended=utterance.stop.whole,
                label=f"update {update}, {where(dialogue, utterance)}",
                text=utterance.text,
                head=min(utterance.turn, turns - 1) if own is not None and own.critic_per_turn else 0,
                score=credit,
                sampled_logprobs=utterance.logprobs,
                trajectory=_trajectory(dialogue, utterance) if own is not None and own.ratio == "trajectory" else None,
                critic_prompt_ids=None
                if context == "dialogue"
                else _critic_prompt(dialogue, utterance, context, tokenizers[utterance.policy]),
                columns=Columns.of(dialogue, utterance, names, utterance.policy),
                utterance=utterance,
                temperature=utterance.temperature,
                grammar=utterance.grammar,
            )
            copies[name] = (sample, [credit])
            samples.setdefault(utterance.policy, []).append(sample)
    return samples


def may_learn(utterance: Utterance, policies: Collection[str], plan: Plan) -> bool:
    """Return whether one of the ``policies`` would be trained on the utterance by ``plan``, if it had a credit."""
    return utterance.trainable and utterance.policy in policies and plan.learns(utterance.agent, utterance.turn)


def untrained_columns(dialogues: list[Dialogue], known: set[Name]) -> list[Columns]:
    """Return the columns of credited utterances that are not ``known``. No policy is trained on them."""
    others: dict[Name, Columns] = {}
    for dialogue in dialogues:
        names = names_of(dialogue)
        for utterance, name in zip(dialogue.utterances, names, strict=True):
            if "credit" in utterance.rewards and name not in known and name not in others:
                others[name] = Columns.of(dialogue, utterance, names)
    return list(others.values())


def turn_batch(
    columns: Sequence[Columns],
    reward: list[float],
    value: list[float] | None = None,
    sources: Mapping[str, float] | None = None,
    score: list[float] | None = None,
) -> TurnBatch:
    """Return the :class:`TurnBatch` with one row for each entry of ``columns``.

    ``reward`` and ``value`` are the rows' rewards and, with a critic, their values. ``sources`` has the weights of the
    rewards that the batch has apart, too. ``score`` is what the rows earned, if their rewards are less by the KL.
    """
    number = {entry.name: i for i, entry in enumerate(columns)}
    callers = dict(number)
    for entry in columns:  # callers without a row, on which nobody is trained, still tell groups apart
        if entry.caller is not None:
            callers.setdefault(entry.caller, len(number) - len(callers) - 1)

    recorded: dict[str, list] = {}
    for column in COLUMNS:
        if column not in ("parent", "caller"):
            values = [entry.values[column] for entry in columns]
            if column not in SOMETIMES or values.count(None) < len(values):
                recorded[column] = values
    recorded["parent"] = [_parent(entry, number) for entry in columns]
    recorded["caller"] = [None if entry.caller is None else callers[entry.caller] for entry in columns]
    parts = None if sources is None else {name: [entry.rewards.get(name) for entry in columns] for name in sources}
    return TurnBatch(reward, value, score=score, **recorded, parts=parts, part_weights=sources)  # type: ignore[arg-type]


def _parent(entry: Columns, number: Mapping[tuple, int]) -> int | None:
    """Return the row before this one on its branch, or None: of the last step with rows, the agent's or the last."""
    parent, best = None, (-1, False)
    for order, agent, name in entry.earlier:
        if name in number and (order, agent == entry.values["agent"]) >= best:
            parent, best = number[name], (order, agent == entry.values["agent"])
    return parent


def _action(utterance: Utterance) -> str:
    """Return the digest of what the utterance does. All illegal moves are one action: none of them moves anything."""
    if "action" in utterance.tags:
        what = f"move {utterance.tags['action']!r}"
    elif utterance.grade is not None and utterance.grade.answer is not None:
        what = f"answer {utterance.grade.answer}"
    else:
        what = f"text {utterance.text}"
    return hashlib.blake2b(what.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def names_of(dialogue: Dialogue) -> list[Name]:
    """Return the names of a dialogue's utterances in an update, which they share with their copies."""
    place = (dialogue.prompt, dialogue.rollout)
    return [(*place, u.id) if u.sample is None else ("sample", dialogue.prompt, u.sample) for u in dialogue.utterances]


def _trajectory(dialogue: Dialogue, utterance: Utterance) -> tuple:
    alone = None if utterance.caller is None else utterance.turn
    return (dialogue.prompt, dialogue.rollout, utterance.agent, alone)


def _critic_prompt(dialogue: Dialogue, utterance: Utterance, context: str, tokenizer: Tokenizer) -> list[int]:
    """Return the critic's prompt, where it is not the agent's prompt."""
    first = next(u for u in dialogue.utterances if u.agent == utterance.agent)
    if context == "answer":
        return first.prompt_ids
    earlier = [f"{u.agent}, turn {u.turn + 1}: {u.words()}" for u in dialogue.utterances if u.order < utterance.order]
    content = "\n\n".join([first.messages[-1]["content"], *earlier])
    return encode_prompt(tokenizer, [*first.messages[:-1], {"role": "user", "content": content}])


@dataclass(kw_only=True)
class TeamUpdateBatch(UpdateBatch):
    """An :class:`trl_ext.trainer.loop.UpdateBatch` of dialogues.

    Args:
        task: the task that has the questions and grades the answers. With a curriculum it differs between batches.
        plan: which agents are trained in this update, and whose weights speak for which agent.
        dialogues: the dialogues that this process played.
        dropped: those of them that were lost, or whose program failed and was to be dropped.
        samples: the samples that each policy is trained on. ``TokenBatch.sample`` has the index of each row's sample.
        compared: which utterances each utterance is compared with (:meth:`maporl.training.assign.Advantages.compared`).
        critic_only: the policies whose critics alone learn.
    """

    task: Task
    plan: Plan
    dialogues: list[Dialogue] = field(default_factory=list)
    dropped: list[Dialogue] = field(default_factory=list)
    samples: dict[str, list[TrainingSample]] = field(default_factory=dict)
    compared: dict[Name, dict[str, Any]] = field(default_factory=dict)
    critic_only: frozenset[str] = frozenset()
