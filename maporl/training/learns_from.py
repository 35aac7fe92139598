"""Says in plain sentences what a run learns from: scores, credit, fines, charges, comparisons, and what does not learn.

It is made from the parts themselves, with their options, and there is one of it: ``maporl check`` prints it, a run
prints and records it when it begins, and its page shows it.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence

from maporl.advantages.baselines import baseline_of
from maporl.advantages.returns import return_of
from maporl.advantages.scales import scale_of
from maporl.advantages.transforms import build_transforms
from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig, BranchingSection, PenaltySection, RewardSection
from maporl.rewards.rules import build_rules
from maporl.schedules import Schedule, Span
from trl_ext.ppo.options import PPOOptions

FAULTS = {
    "too_short": "fewer than {} tokens",
    "no_final_answer": "no final answer",
    "repetition": "it repeats itself",
    "no_eos": "it does not end by itself",
}
CALLS = {"call": "each call", "call_unread": "a call that cannot be read", "call_failed": "a call that failed"}
COMPARED_OVER = {"group": "its group", "agent": "its agent", "batch": "all"}


def learns_from(
    reward: RewardSection,
    advantage: AdvantageConfig,
    branching: BranchingSection,
    schedule: Schedule,
    ppo: PPOOptions,
    frozen: Sequence[str] = (),
) -> list[str]:
    """Return what a run learns from, a sentence or two for each part, in the order in which they are computed.

    Args:
        reward: sources, and how their scores become credit.
        advantage: how credits are compared.
        branching: how many dialogues a question has.
        schedule: what learns when, without a preset (:meth:`maporl.schedules.Schedule.resolved`).
        ppo: the options of PPO, for its penalties.
        frozen: the agents that are not trained.
    """
    return [
        *_scores(reward),
        *_fines(reward.penalties, ppo),
        *_charges(reward),
        *_teaching(reward, ppo),
        *_comparison(advantage, branching),
        *_still(schedule, frozen),
    ]


def _scores(reward: RewardSection) -> Iterator[str]:
    weighted = [name if weight == 1 else f"{weight:g} x {name}" for name, weight in reward.sources.items() if weight]
    unweighted = [name for name, weight in reward.sources.items() if not weight]
    told = " + ".join(weighted).replace("+ -", "- ") or "0"
    yield f"score: {told}" + (f" (for rules alone: {', '.join(unweighted)})" if unweighted else "")
    if reward.rules:
        rules = zip(reward.rules, build_rules(reward.rules), strict=True)
        for number, (entry, rule) in enumerate(rules, 1):
            yield f"credit, rule {number}: {entry_name(entry)}{_options(rule)}. {_first_sentence(type(rule))}"
        return
    whose = "the team's mean score" if reward.share == "all" else "its agent's score"
    what = {
        "current": f"{whose} in its turn",
        "last": f"{whose} in the last turn",
        "discounted_sum": f"its own score, and {whose} in each later turn, {reward.discount:g} times as much a turn, "
        "divided by the sum of these weights",
    }[reward.horizon]
    if (reward.horizon, reward.share) == ("current", "individual"):
        what = "its own score"
    yield f"credit of an answer: {what}"
    if reward.bonus is not None:
        bonus = reward.bonus
        yield (
            f"bonus: persuaded by a right majority {bonus.alpha[0]:g}, right against a wrong one {bonus.alpha[1]:g}, "
            f"wrong while the others become right {bonus.alpha[2]:g}, right while they do {bonus.alpha[3]:g}, with a "
            f"minus where right and wrong change places{_options(bonus, ('alpha',))}"
        )


def _fines(penalties: PenaltySection | None, ppo: PPOOptions) -> Iterator[str]:
    if penalties is not None:
        fines = {FAULTS[name].format(penalties.min_tokens): getattr(penalties, name) for name in FAULTS}
        if not penalties.min_tokens:
            del fines[FAULTS["too_short"].format(0)]
        if told := _costs(fines):
            how = "the largest takes the place of the score" if penalties.mode == "replace" else "off its credit alone"
            yield f"fines of an answer: {told}; {how}"
        if told := _costs({what: getattr(penalties, name) for name, what in CALLS.items()}):
            yield f"fines of calls: {told}; off the credit of what called"
    if ppo.missing_eos_penalty is not None:
        yield f"fine: {ppo.missing_eos_penalty:g} off the credit of what does not end by itself"


def _costs(costs: dict[str, float]) -> str:
    return ", ".join(f"{what} {cost:g}" for what, cost in costs.items() if cost)


def _charges(reward: RewardSection) -> Iterator[str]:
    for name, charge in reward.charges.items():
        who = ", ".join(charge.roles) or "whoever has it"
        yield f"charge: {charge.weight:g} x {name}, off the credit of {who} alone"


def _teaching(reward: RewardSection, ppo: PPOOptions) -> Iterator[str]:
    if reward.distill is not None:
        itself = reward.distill.teacher == "dialogue"
        who = "its own policy, shown the dialogue," if itself else reward.distill.teacher
        yield f"distillation: {reward.distill.weight:g} x how much likelier {who} finds each token of a first answer"
    if ppo.kl_coef:
        where = "off the reward of each token" if ppo.kl_in == "reward" else "in the loss"
        yield f"KL from the weights before training: {ppo.kl_coef:g} ({ppo.kl_estimator}), {where}"


def _comparison(advantage: AdvantageConfig, branching: BranchingSection) -> Iterator[str]:
    returned, baseline, scale = return_of(advantage), baseline_of(advantage), scale_of(advantage)
    by_critic = advantage.baseline == "critic"
    against = "what the critic expects" if by_critic else f"{advantage.baseline}, {_first_sentence(baseline.compute)}"
    over = "group" if returned.per_token and scale.over == "nothing" and advantage.scale != "none" else scale.over
    scaled = f", divided by {advantage.scale} over {COMPARED_OVER[over]}" if over in COMPARED_OVER else ""
    yield f"compared: {advantage.returns} with {against}{scaled}"
    if "group" in (baseline.over, over):
        most = branching.most
        dialogues = f"{most} dialogues" if most > 1 else "one dialogue"
        branched = "" if branching.how == "independent" else f" (branching {branching.how})"
        yield f"group: the same {', '.join(advantage.key)}; a question has {dialogues}{branched}"
    for entry, transform in zip(advantage.post, build_transforms(advantage), strict=True):
        yield f"then: {entry_name(entry)}{_options(transform)}. {_first_sentence(type(transform))}"


def _still(schedule: Schedule, frozen: Sequence[str]) -> Iterator[str]:
    if frozen:
        yield f"not trained: {', '.join(frozen)}"
    if not schedule.train_first_turn:
        yield "not trained: the first turn"
    if schedule.opening or schedule.cycle:
        cycle = f"then {_spans(schedule.cycle)}, repeated" if schedule.cycle else "then all turns"
        yield f"turns that learn: {f'first {_spans(schedule.opening)}, ' if schedule.opening else ''}{cycle}"
    for freeze in schedule.freeze:
        yield f"not trained: {freeze.agent} in updates {freeze.first} to {freeze.last}"
    if schedule.round_robin is not None:
        turns = schedule.round_robin
        yield f"one agent learns at a time: {', '.join(turns.agents)}, {turns.every} updates each"
    if schedule.critic_warmup:
        yield f"only critics learn in the first {schedule.critic_warmup} updates"


def _spans(spans: Sequence[Span]) -> str:
    return ", ".join(f"turn {' and '.join(map(str, span.turns))} for {span.updates} updates" for span in spans)


def _options(part: object, known: Sequence[str] = ()) -> str:
    """Return the options of a part, in parentheses, without those that are empty."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = {f.name: getattr(part, f.name) for f in fields if f.name not in known}
    told = ", ".join(f"{name}: {_value(value)}" for name, value in values.items() if value not in (None, (), [], {}))
    return f" ({told})" if told else ""


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first_sentence(part: object) -> str:
    """Return the first paragraph of a part's docstring as a clause, without the marks of reStructuredText."""
    text = " ".join((inspect.getdoc(part) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`(?:[\w.]+\.)?(\w+)`", r"\1", text).replace("``", "")
    return text.removeprefix("Return ").removesuffix(".")
