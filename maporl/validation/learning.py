"""Say what a run will train before it does: who learns in which turns and updates, bonuses and penalties. No torch."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from maporl.config.schema import BonusSection, PenaltySection
from maporl.errors import Fault
from maporl.run import ResolvedRun
from maporl.schedules import Plan, Schedule

MOST_SPANS = 6
"""Spans of updates that a line lists. A schedule that repeats is clear from fewer."""
MOST_UPDATES = 10_000
"""Updates whose plans are looked at."""
_INCENTIVES = (
    "where a right majority persuades an agent",
    "where it becomes right against a wrong majority",
    "for a wrong answer from which the others become right",
    "where it persuades the others and is right",
)
"""When each of the four numbers of a bonus is paid."""


def learning_lines(run: ResolvedRun) -> list[str]:
    """Return a line that says who learns in which turns and updates, and warnings for what is never reached."""
    config, turns = run.config, run.protocol.turns
    if config.loop.stages or not run.learners:
        return []  # the line of a loop says what its stages train
    schedule = config.schedule.resolved(turns, run.agents)
    plans = list(map(schedule.plan, range(1, min(config.updates, MOST_UPDATES) + 1)))
    spans = _spans(plans, tuple(run.learners), turns)
    told = [what if len(spans) == 1 else f"{when}: {what}" for when, what in spans[:MOST_SPANS]]
    told += ["and so on"] if len(spans) > MOST_SPANS else []
    silent = [name for name in run.speakers if name not in run.learners]
    told += [f"{_and(silent)} {'plays' if len(silent) == 1 else 'play'} and never {_verb(silent)}"] if silent else []
    told += list(_other_weights(schedule))
    faults = (*_never(run, plans), *_unreached(run))
    return [f"learning: {'; '.join(told)}", *(f"warning: {fault}" for fault in faults)]


def _spans(plans: list[Plan], learners: tuple[str, ...], turns: int) -> list[tuple[str, str]]:
    """Return the updates of each span, and who learns in them."""
    spans, first = [], 1
    for what, same in groupby(_learn(plan, learners, turns) for plan in plans):
        last = first + len(list(same)) - 1
        spans.append((f"update {first}" if first == last else f"updates {first} to {last}", what))
        first = last + 1
    return spans


def _learn(plan: Plan, learners: tuple[str, ...], turns: int) -> str:
    """Return who learns by a plan, in which turns."""
    by_turns: dict[tuple[int, ...], list[str]] = {}
    for name in learners:
        of = tuple(turn for turn in range(turns) if plan.learns(name, turn))
        by_turns.setdefault(of, []).append(name)
    by_turns.pop((), None)
    told = "; ".join(f"{_and(names)}{_turns(of, turns)}" for of, names in by_turns.items())
    return f"only the critics of {told}" if told and plan.critic_only else told or "nobody"


def _turns(of: tuple[int, ...], turns: int) -> str:
    if turns == 1:
        return ""
    if len(of) == turns:
        return " in all turns"
    return f" in turn{'s' if len(of) > 1 else ''} {_and([str(turn + 1) for turn in of])}"


def _other_weights(schedule: Schedule) -> Iterator[str]:
    if schedule.swap is not None:
        yield f"{_and(schedule.swap.agents)} exchange their weights every {schedule.swap.every} updates"
    pool = schedule.opponent_pool
    if pool is not None:
        share = f"{pool.probability:.0%} of the updates"
        yield f"in {share} {pool.agent} speaks with past weights of {pool.of}, and then does not learn"


def _never(run: ResolvedRun, plans: list[Plan]) -> Iterator[Fault]:
    """Yield the learners that no update trains."""
    if len(plans) < run.config.updates:
        return  # not all of them were looked at
    for name in run.learners:
        if not any(plan.learns(name, turn) for plan in plans for turn in range(run.protocol.turns)):
            yield Fault(
                "schedule",
                f"{name} learns in none of the {len(plans)} updates",
                "give the run more updates, or change the schedule",
                "warning",
            )


def _unreached(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what begins after the last update."""
    config, updates = run.config, run.config.updates
    begins = {"schedule.curriculum": [stage.update for stage in config.schedule.curriculum]}
    growth = config.schedule.growth
    if growth is not None:
        begins["schedule.growth"] = [1 + growth.every * number for number in range(1, growth.stages)]
    for key, firsts in begins.items():
        if late := [first for first in firsts if first > updates]:
            what = f"its stage from update {late[0]} on is never reached in {updates} updates"
            yield Fault(key, what, "give the run more updates, or begin it earlier", "warning")
    warmup = config.training.warmup_steps
    if warmup >= updates > 0:
        yield Fault(
            "training.warmup_steps",
            f"the learning rate rises for {warmup:g} updates, and the run has {updates}, so it is never reached",
            "choose fewer, or more updates",
            "warning",
        )


def bonus_line(bonus: BonusSection | None) -> list[str]:
    """Return a line with what each incentive pays."""
    if bonus is None:
        return []
    signs = (1, 1, 1, 1) if bonus.mode == "paper" else (1, 1, -1, -1)
    paid = [
        f"{sign * amount:+g} {when}"
        for sign, amount, when in zip(signs, bonus.alpha, _INCENTIVES, strict=True)
        if amount
    ]
    if not paid:
        return ["bonus: nothing, because all of alpha is 0"]
    return [f"bonus: {'; '.join(paid)}; the opposite moves cost as much"]


def penalty_line(penalties: PenaltySection | None, missing_eos: float | None) -> list[str]:
    """Return a line with what each penalty costs, and on what.

    Args:
        penalties: those of answers and calls.
        missing_eos: what an utterance without end costs, or None.
    """
    told: list[str] = []
    if penalties is not None:
        fines = {
            f"of fewer than {penalties.min_tokens} tokens": penalties.too_short if penalties.min_tokens else 0.0,
            "without a final answer": penalties.no_final_answer,
            "that repeats itself": penalties.repetition,
            "that the length limit cuts off": penalties.no_eos,
        }
        listed = [f"{cost:g} for an answer {which}" for which, cost in fines.items() if cost]
        instead = "the score of an answer becomes minus the largest of " if penalties.mode == "replace" else ""
        told += [f"{instead}{', '.join(listed)}"] if listed else []
        calls = {"call": penalties.call, "call that cannot be read": penalties.call_unread}
        calls["call that fails"] = penalties.call_failed
        told += [f"{cost:g} for each {which}" for which, cost in calls.items() if cost]
    if missing_eos:
        told.append(f"{missing_eos:g} for each utterance that the length limit cuts off (ppo.missing_eos_penalty)")
    return [f"penalties: {'; '.join(told)}"] if told else []


def _verb(names: list[str]) -> str:
    return "learns" if len(names) == 1 else "learn"


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
