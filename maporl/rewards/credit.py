"""Turns scores into one credit per utterance: penalties, sharing over turns and agents, and the collaboration bonus.

It also says whose score each credit came from, so that a record can be read.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from maporl.config.imports import told
from maporl.config.parse import entry_name
from maporl.config.schema import ChargeSection, PenaltySection, RewardSection
from maporl.errors import ConfigError
from maporl.rewards.rules import build_rules
from maporl.rewards.shaping import collaboration_bonus, share_scores
from maporl.rounding import differ
from maporl.types import Dialogue, Utterance
from trl_ext.copies import is_users, own_copy

PENALTIES = ("too_short", "no_final_answer", "repetition", "no_eos")


def assign_credit(
    dialogues: list[Dialogue],
    agents: tuple[str, ...],
    reward: RewardSection,
    digits: Mapping[str, Collection[int]] | None = None,
    update: int = 1,
) -> None:
    """Set ``rewards["credit"]`` of the utterances of graded and scored ``dialogues``.

    ``reward.rules`` turn the scores into credits. Without rules, an answer's credit is its shared score plus the
    collaboration bonus, and the credit of another utterance is its own score, if a source or the protocol gave it one.
    Then the penalties of answers are subtracted. An utterance by which an agent declined (``protocol.pass``) gets the
    mean credit of the answers of its turn. An utterance that has no credit after this, such as a summary, gets the mean
    credit of the utterances whose speakers were shown it, and of those that it settled. Without them it has no credit
    and is not trained on. In the end the penalties of calls and the charges are subtracted, so nobody else pays them.

    ``update`` is the number of the update, from 1. ``digits`` lists, for each policy, the token ids that may repeat.
    The parts of a credit keep their names: ``bonus``, and ``penalty/NAME`` and ``charge/NAME``, which are negative.
    """
    for dialogue in dialogues:
        for u in dialogue.utterances:
            u.rewards.pop("credit", None)  # a batch that is resampled is credited again
    penalties = reward.penalties
    if penalties is not None:
        answers = [u for d in dialogues for u in d.answers()]
        penalise(answers, penalties, digits or {})
        if penalties.mode == "replace":
            for u in answers:
                u.rewards["score"] = min(_penalties(u), default=u.rewards["score"])
    if reward.rules:
        credit_by_rules(dialogues, reward, update)
    else:
        _by_shares(dialogues, agents, reward)
    if penalties is not None and penalties.mode == "subtract":
        for u in answers:
            if "credit" in u.rewards:
                u.rewards["credit"] += sum(_penalties(u))
    for dialogue in dialogues:
        credit_passes(dialogue)
        credit_by_readers(dialogue)
    if penalties is not None:
        penalise_calls([u for d in dialogues for u in d.utterances if u.calls], penalties)
    charge([u for d in dialogues for u in d.utterances if "credit" in u.rewards], reward.charges)


def credit_by_rules(dialogues: list[Dialogue], reward: RewardSection, update: int = 1) -> None:
    """Apply the rules of ``update`` from left to right to the dialogues of each question.

    Raises:
        ConfigError: a rule raised an error, or returned anything but finite credits.
    """
    rules = build_rules(reward.rules, update=update)
    questions: dict[int, list[Dialogue]] = {}
    for dialogue in dialogues:
        questions.setdefault(dialogue.prompt, []).append(dialogue)
    for siblings in questions.values():
        credits = [{u.id: u.rewards["score"] for u in d.utterances if "score" in u.rewards} for d in siblings]
        for rule, entry in zip(rules, reward.rules, strict=True):
            name = entry_name(entry)
            try:
                own = own_copy((siblings, credits)) if is_users(type(rule), "maporl") else (siblings, credits)
                result = rule(*own)
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"reward.rules: {name}: it failed: {told(error)}") from error
            credits = _must_be_credits(result, siblings, name)
        for dialogue, credit in zip(siblings, credits, strict=True):
            for u in dialogue.utterances:
                if u.id in credit:
                    u.rewards["credit"] = credit[u.id]


def _must_be_credits(credits: Any, dialogues: list[Dialogue], rule: str) -> list[dict[int, float]]:
    """Return what a rule returned, if it is one mapping of utterances to finite credits for each dialogue."""
    if not isinstance(credits, list) or any(not isinstance(credit, dict) for credit in credits):
        got = f"{credits!r:.80}"
    elif len(credits) != len(dialogues):
        got = f"{len(credits)} of them for {len(dialogues)} dialogues"
    else:
        wrong = [f"the credit {value!r:.40}" for credit in credits for value in credit.values() if not _finite(value)]
        said = [{u.id for u in dialogue.utterances} for dialogue in dialogues]
        wrong += [f"the utterance {u!r:.40}" for own, ids in zip(credits, said, strict=True) for u in own.keys() - ids]
        if not wrong:
            return credits
        got = wrong[0]
    raise ConfigError(
        f"reward.rules: {rule}: returned {got}; expected a list of {{utterance id: credit}}, one for each dialogue, "
        "with finite numbers"
    )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value))


def _by_shares(dialogues: list[Dialogue], agents: tuple[str, ...], reward: RewardSection) -> None:
    """Set credits as MAPoRL does: an answer gets shared scores plus the collaboration bonus."""
    # MAPoRL has answers only; the score of another utterance is its own, so it is shared with nobody
    for u in [u for d in dialogues for u in d.utterances if not u.answers and "score" in u.rewards]:
        u.rewards["credit"] = u.rewards["score"]
    answers = [(u, question) for question, dialogue in enumerate(dialogues) for u in dialogue.answers()]
    if not answers:
        return
    grid = _Grid(answers, agents, len(dialogues))
    credit = share_scores(grid.of(lambda u: u.rewards["score"]), reward.horizon, reward.share, reward.discount)
    bonus = None
    if (rule := reward.bonus) is not None:
        correct = grid.of(lambda u: np.nan if u.grade is None or u.grade.correct is None else float(u.grade.correct))
        bonus = np.nan_to_num(collaboration_bonus(correct, rule.alpha, rule.mode, rule.right, rule.wrong))
    for u, cell in grid.cells:
        u.rewards["credit"] = float(credit[cell])
        if bonus is not None:
            u.rewards["bonus"] = float(bonus[cell])
            u.rewards["credit"] += u.rewards["bonus"]


def penalise(answers: list[Utterance], section: PenaltySection, digits: Mapping[str, Collection[int]]) -> None:
    """Record ``rewards["penalty/NAME"] = -amount`` on the answers to which the penalty applies.

    - ``too_short``: the answer has fewer than ``min_tokens`` tokens.
    - ``no_final_answer``: the answer contains no final answer in the required form. This includes an answer that had to
      be restated.
    - ``repetition``: see :func:`maporl.rewards.credit.repeats`.
    - ``no_eos``: the length limit cut the answer off.
    """
    repeating = np.zeros(len(answers), dtype=bool)
    if section.repetition:
        repeating = repeats([u.response_ids for u in answers], [digits.get(u.policy, ()) for u in answers])
    for u, repeated in zip(answers, repeating, strict=True):
        unread = u.restated is not None or u.grade is None or u.grade.answer is None
        earned = {
            "too_short": bool(u.response_ids) and len(u.response_ids) < section.min_tokens,
            "no_final_answer": unread,
            "repetition": bool(repeated),
            "no_eos": not u.stop.whole,
        }
        for name, applies in earned.items():
            if applies and getattr(section, name):
                u.rewards[f"penalty/{name}"] = -getattr(section, name)


def penalise_calls(calling: list[Utterance], section: PenaltySection) -> None:
    """Subtract what calls cost from the credit of the completions that made them, and of no others.

    It is recorded as ``rewards["penalty/NAME"]``: ``call`` for each call, ``call_unread`` once if one cannot be read,
    and ``call_failed`` once if one was read and failed. A call into an environment that was lost is nobody's fault.
    """
    for u in calling:
        errors = [c.result.error for c in u.calls if c.result is not None and c.result.error not in (None, "lost")]
        earned = {
            "call": len(u.calls),
            "call_unread": int("unread" in errors),
            "call_failed": int(any(error != "unread" for error in errors)),
        }
        for name, times in earned.items():
            if cost := times * getattr(section, name):
                u.rewards[f"penalty/{name}"] = -cost
                if "credit" in u.rewards:
                    u.rewards["credit"] -= cost


def charge(credited: list[Utterance], charges: Mapping[str, ChargeSection]) -> None:
    """Subtract from the credit of each utterance what its rewards are charged at. It keeps ``rewards["charge/NAME"]``.

    An utterance that does not have the reward, or was said in another role, is not charged.
    """
    for name, section in charges.items():
        for u in credited:
            if name in u.rewards and is_charged(section, u):
                u.rewards[f"charge/{name}"] = -section.weight * u.rewards[name]
                u.rewards["credit"] += u.rewards[f"charge/{name}"]


def is_charged(section: ChargeSection, utterance: Utterance) -> bool:
    """Return whether an utterance was said in a role, or by an agent, that is charged."""
    return not section.roles or bool({utterance.role, utterance.agent} & set(section.roles))


def _penalties(utterance: Utterance) -> list[float]:
    return [utterance.rewards[f"penalty/{n}"] for n in PENALTIES if f"penalty/{n}" in utterance.rewards]


class _Grid:
    """Answers as cells (turn, agent, question) of arrays."""

    def __init__(self, answers: list[tuple[Utterance, int]], agents: tuple[str, ...], questions: int):
        speaking = {u.agent for u, _ in answers}
        seat = {agent: index for index, agent in enumerate([a for a in agents if a in speaking])}
        self.cells = [(u, (u.turn, seat[u.agent], question)) for u, question in answers]
        self.shape = (1 + max([u.turn for u, _ in answers]), len(seat), questions)

    def of(self, value) -> np.ndarray:
        """Return an array with ``value(utterance)`` in its cell and NaN elsewhere."""
        array = np.full(self.shape, np.nan)
        for u, cell in self.cells:
            array[cell] = value(u)
        return array


def credit_passes(dialogue: Dialogue) -> None:
    """Give each utterance by which an agent declined the mean credit of the answers of its turn.

    If nobody answered in the turn, it keeps what a rule gave it.
    """
    for u in dialogue.utterances:
        if u.tags.get("passed"):
            credits = [v.rewards["credit"] for v in dialogue.at(u.turn) if "credit" in v.rewards]
            if credits:
                u.rewards["credit"] = sum(credits) / len(credits)


def credit_by_readers(dialogue: Dialogue) -> None:
    """Give each utterance without a credit the mean credit of those that were shown it, and of those that it settled.

    The last utterance comes first, because a reader may lack a credit itself.
    """
    for u in reversed(dialogue.utterances):
        if "credit" not in u.rewards:
            heirs = [v for v in dialogue.utterances if u.id in v.parents or v.id in u.settles]
            credits = [v.rewards["credit"] for v in heirs if "credit" in v.rewards]
            if credits:
                u.rewards["credit"] = sum(credits) / len(credits)


LONGEST_NGRAM = 20
"""The longest n-gram whose repetition is searched for, as in MAPoRL's published code."""


def repeats(
    answers: Sequence[Sequence[int]], exempt: Sequence[Collection[int]] | None = None, times: int = 3
) -> np.ndarray:
    """Return which answers contain some n-gram of tokens (n = 1 .. 20) more than ``times`` times in a row: bool
    [answer].

    ``exempt`` lists, for each answer, token ids that do not count, such as digits. An n-gram that contains only such
    ids may repeat, because 1111 is a number. The time is linear in the number of tokens: an n-gram stands k times in a
    row if k-1 periods in a row agree with the period after them.
    """
    repeating = np.zeros(len(answers), dtype=bool)
    order = np.argsort([len(a) for a in answers], kind="stable")
    for chunk in np.array_split(order, max(1, len(answers) // 512)):  # answers of similar length share an array
        if len(chunk):
            repeating[chunk] = _repeats(
                [answers[i] for i in chunk], [exempt[i] if exempt else () for i in chunk], times
            )
    return repeating


def _repeats(answers: list[Sequence[int]], exempt: list[Collection[int]], times: int) -> np.ndarray:
    width = max((len(a) for a in answers), default=0)
    # padding differs at every position, so it never repeats
    ids = np.tile(-1 - np.arange(width), (len(answers), 1))
    counts = np.zeros((len(answers), width + 1), dtype=np.int64)  # tokens that are not exempt, up to a position
    for row, (answer, ignored) in enumerate(zip(answers, exempt, strict=True)):
        ids[row, : len(answer)] = answer
        marks = [token not in ignored for token in answer]
        counts[row, 1 : len(answer) + 1] = np.cumsum(marks)
        counts[row, len(answer) + 1 :] = counts[row, len(answer)]
    repeating = np.zeros(len(answers), dtype=bool)
    for n in range(1, min(LONGEST_NGRAM, width // (times + 1)) + 1):
        same = ids[:, n:] == ids[:, :-n]
        agreeing = np.zeros((len(answers), same.shape[1] + 1), dtype=np.int64)
        np.cumsum(same, axis=1, out=agreeing[:, 1:])
        span = times * n
        starts = agreeing[:, span:] - agreeing[:, :-span] == span
        counted = counts[:, n : n + starts.shape[1]] > counts[:, : starts.shape[1]]
        repeating |= (starts & counted).any(1)
    return repeating


MOST_SCORED = 64
"""The scored utterances of a dialogue up to which origins are told. Credit is assigned once more for each of them."""

Origins = dict[int, list[tuple[int, float]]]
"""For each utterance of a dialogue, the utterances whose scores are part of its credit, with those parts."""


def origins(
    dialogue: Dialogue, siblings: Sequence[Dialogue], agents: Sequence[str], reward: RewardSection, update: int
) -> Origins:
    """Return what each score of a scored ``dialogue`` adds to each credit in it: the credit minus that without it.

    The parts sum to the credit before bonus, fines and charges where rules are sums of scores. What rules add beside
    that, such as a price of words, or what they take from other dialogues of the question, is in no part.

    Args:
        dialogue: one of the ``siblings``.
        siblings: all dialogues of its question.
        agents: the agents that play, in order.
        reward: how scores become credit.
        update: the number of the update, from 1.
    """
    scored = [number for number, u in enumerate(dialogue.utterances) if u.rewards.get("score")]
    if not scored or len(scored) > MOST_SCORED:
        return {}
    scores = replace(reward, penalties=None, bonus=None, charges={})
    place = next(number for number, sibling in enumerate(siblings) if sibling is dialogue)

    def credits(without: int | None) -> dict[int, float]:
        copies = [replace(d, utterances=[replace(u, rewards=dict(u.rewards)) for u in d.utterances]) for d in siblings]
        own = copies[place].utterances
        if without is not None:
            own[without].rewards["score"] = 0.0
        assign_credit(copies, tuple(agents), scores, update=update)
        return {number: u.rewards["credit"] for number, u in enumerate(own) if "credit" in u.rewards}

    whole = credits(None)
    parts: Origins = {number: [] for number in whole}
    for number in scored:
        for other, value in credits(number).items():
            if other in whole and differ([whole[other], value]):
                parts[other].append((number, whole[other] - value))
    return parts
