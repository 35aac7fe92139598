"""Says in plain sentences what a run learns from: scores, credit, fines, charges, comparisons, and what does not learn.

It is made from the parts themselves, with their options, and there is one of it: ``maporl check`` prints it, a run
prints and records it when it begins, and its page shows it.
"""

import dataclasses
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from maporl.advantages.baselines import baseline_of
from maporl.advantages.returns import return_of
from maporl.advantages.scales import scale_of
from maporl.advantages.transforms import build_transforms
from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig, BonusSection, BranchingSection, PenaltySection, RewardSection
from maporl.decoding import TeamSampling
from maporl.report.language import listed
from maporl.rewards.rules import build_rules
from maporl.schedules import Plan, Schedule
from trl_ext.ppo.options import PPOOptions

FAULTS = {
    "too_short": "fewer than {} tokens",
    "no_final_answer": "no final answer",
    "repetition": "it repeats itself",
    "no_eos": "it does not end by itself",
}
CALLS = {"call": "each call", "call_unread": "a call that cannot be read", "call_failed": "a call that failed"}
INCENTIVES = (
    "where a right majority persuades an agent",
    "where it becomes right against a wrong majority",
    "for a wrong answer from which the others become right",
    "where it persuades the others and is right",
)
"""When each of the four numbers of a bonus is paid."""
MOST_SPANS = 6
"""Spans of updates that a line lists. A schedule that repeats is clear from fewer."""
MOST_UPDATES = 10_000
"""Updates whose plans are looked at."""
_DRAWN = {"temperature": None, "top_p": 1.0, "top_k": 0}
"""How a token is drawn, with the values that a line leaves out."""
_TOLD = frozenset({"learning_rate", "value_learning_rate", "critic", "objective", "kl_coef", "kl_estimator", "kl_in"})
"""The options of a policy that its line tells in words."""
COMPARED_OVER = {"group": "its group", "agent": "its agent", "batch": "all"}


def learns_from(
    reward: RewardSection,
    algorithms: Sequence[tuple[Collection[str], AdvantageConfig, PPOOptions]],
    branching: BranchingSection,
    ppo: PPOOptions,
    learners: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Return what a run learns from, a sentence or two for each part, in the order in which they are computed.

    Args:
        reward: sources, and how their scores become credit.
        algorithms: for agents that learn alike, their names, how their credits are compared, and their options of PPO.
        branching: how many dialogues a question has.
        ppo: the options of PPO of the run, for its penalties.
        learners: by name, what each policy that is trained is (:func:`facts_of`).
    """
    learned = []
    for agents, advantage, options in algorithms:
        learning = {name: facts for name, facts in learners.items() if not {*agents}.isdisjoint(facts["agents"])}
        critics = {name: facts["critic"] for name, facts in learning.items()}
        whose = f"{listed([*agents])}: " if len(algorithms) > 1 else ""
        learned += [whose + line for line in (*_penalty(options), *_comparison(advantage, branching, critics))]
    return [
        *learner_lines(learners),
        *_scores(reward),
        *_fines(reward.penalties, ppo),
        *_charges(reward),
        *_teaching(reward),
        *learned,
    ]


def facts_of(
    made: Mapping[str, Any],
    agents: Sequence[str],
    adapter: bool,
    ppo: PPOOptions,
    algorithm: Mapping[str, Any],
    advantages: Mapping[str, AdvantageConfig],
    sampling: TeamSampling,
    roles: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return what a policy that is trained is, for its line and for the audit of the run.

    Args:
        made: its learner's rates, critic, objective and KL (:func:`trl_ext.learning.audit.learner_facts`).
        agents: the agents for which it speaks.
        adapter: whether it is an adapter.
        ppo: its options of PPO.
        algorithm: the options that its own algorithm has set, with their values.
        advantages: what computes the advantages of each agent.
        sampling: how answers are sampled where this differs from the run.
        roles: the roles of the agents that are trained.
    """
    playing = [agent for agent in agents if agent in roles] or list(agents)
    drawn = []
    for agent in playing:
        own = sampling.of(agent, training=True).at(None, roles.get(agent), 0, ppo.decoding)
        values = {
            name: vars(own)[name] if own is not None and vars(own)[name] is not None else vars(ppo)[name]
            for name in _DRAWN
        }
        parts = [f"{name} {value:g}" for name, value in values.items() if value != _DRAWN[name]]
        if own is not None and own.structured_output is not None:
            parts.append(f"held to {own.at(0)['structured_output'].kind}")
        drawn.append(", ".join(parts))
    slots = [advantages[agent] for agent in playing]
    names = ("returns", "baseline", "scale")
    told = {name: " or ".join(dict.fromkeys(getattr(own, name) for own in slots)) for name in names}
    grouped = any(baseline_of(a).over == "group" and not return_of(a).per_token for a in slots)
    return {
        **made,
        "agents": list(agents),
        "trains": "an adapter" if adapter else "all weights",
        **told,
        "own": {name: value for name, value in algorithm.items() if name not in _TOLD},
        "groups": "groups" if grouped else "updates",
        "kl": f"KL {ppo.kl_coef:g} ({ppo.kl_estimator}, in the {ppo.kl_in})" if ppo.kl_coef else "no KL",
        "sampled": " or ".join(dict.fromkeys(drawn)),
        "longest": max(sampling.longest(agent, ppo.response_length) for agent in playing),
    }  # fmt: skip


def learner_lines(learners: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each policy that is trained, or one for several that are alike."""
    alike: dict[str, list[str]] = {}
    for name, f in learners.items():
        critic = f"critic {f['critic']} at {f['critic_learning_rate']:g}" if f["critic"] else "critic none"
        what = (
            f"{f['trains']} at learning rate {f['learning_rate']:g}, {critic}, {f['returns']} with baseline "
            f"{f['baseline']} and scale {f['scale']}, objective {f['objective']}, {f['kl']}, sampled with "
            f"{f['sampled']}, at most {f['longest']} tokens an answer"
        )
        options = [f"{option} {_value(value)}" for option, value in f["own"].items()]
        what += f"; of its own: {', '.join(options)}" if options else ""
        others = f" (for {listed(f['agents'])})" if f["agents"] != [name] else ""
        alike.setdefault(what, []).append(name + others)
    return [f"policy {listed(names)}: {what}" for what, names in alike.items()]


def who_learns(schedule: Schedule, learners: Sequence[str], speakers: Sequence[str], turns: int, updates: int) -> str:
    """Return who learns, in which turns and updates.

    Args:
        schedule: what learns when, without a preset (:meth:`maporl.schedules.Schedule.resolved`).
        learners: the agents that play and are trained.
        speakers: the agents that play.
        turns: the turns of the protocol.
        updates: the updates of the run.
    """
    plans = map(schedule.plan, range(1, min(updates, MOST_UPDATES) + 1))
    spans = _spans(plans, tuple(learners), turns)
    told = [what if len(spans) == 1 else f"{when}: {what}" for when, what in spans[:MOST_SPANS]]
    told += ["and so on"] if len(spans) > MOST_SPANS else []
    silent = [name for name in speakers if name not in learners]
    if silent:
        told.append(f"{listed(silent)} {'plays and never learns' if len(silent) == 1 else 'play and never learn'}")
    return f"learning: {'; '.join([*told, *_other_weights(schedule)])}"


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
        "last": f"{whose} in {'the' if reward.share == 'all' else 'its'} last turn",
        "discounted_sum": f"its own score, and {whose} in each later turn, {reward.discount:g} times as much a turn, "
        "divided by the sum of these weights",
    }[reward.horizon]
    if (reward.horizon, reward.share) == ("current", "individual"):
        what = "its own score"
    yield f"credit of an answer: {what}"
    if reward.bonus is not None:
        yield f"bonus: {_incentives(reward.bonus)}"


def _incentives(bonus: BonusSection) -> str:
    signs = (1, 1, 1, 1) if bonus.mode == "paper" else (1, 1, -1, -1)
    amounts = [sign * amount for sign, amount in zip(signs, bonus.alpha, strict=True)]
    paid = [f"{amount:+g} {when}" for amount, when in zip(amounts, INCENTIVES, strict=True) if amount]
    return f"{'; '.join(paid)}; the opposite moves cost as much" if paid else "nothing, because all of alpha is 0"


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


def _teaching(reward: RewardSection) -> Iterator[str]:
    if reward.distill is not None:
        itself = reward.distill.teacher == "dialogue"
        who = "its own policy, shown another dialogue," if itself else reward.distill.teacher
        yield f"distillation: {reward.distill.weight:g} x how much likelier {who} finds each token of a first answer"


def _penalty(ppo: PPOOptions) -> Iterator[str]:
    if ppo.kl_coef:
        where = "off the reward of each token" if ppo.kl_in == "reward" else "in the loss"
        yield f"KL from the weights before training: {ppo.kl_coef:g} ({ppo.kl_estimator}), {where}"


def _comparison(advantage: AdvantageConfig, branching: BranchingSection, critics: Mapping[str, str]) -> Iterator[str]:
    returned, baseline, scale = return_of(advantage), baseline_of(advantage), scale_of(advantage)
    without = [name for name, critic in critics.items() if not critic]
    against = f"{advantage.baseline}, {_first_sentence(baseline.compute)}"
    if advantage.baseline == "critic":
        against = "what the critic expects" if len(without) < len(critics) else "nothing, because nobody has a critic"
        if without and len(without) < len(critics):
            against += f" ({listed(without)}, without a critic: with nothing)"
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


def _spans(plans: Iterable[Plan], learners: tuple[str, ...], turns: int) -> list[tuple[str, str]]:
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
    told = "; ".join(f"{listed(names)}{_turns(of, turns)}" for of, names in by_turns.items())
    return f"only the critics of {told}" if told and plan.critic_only else told or "nobody"


def _turns(of: tuple[int, ...], turns: int) -> str:
    if turns == 1:
        return ""
    if len(of) == turns:
        return " in all turns"
    return f" in turn{'s' if len(of) > 1 else ''} {listed([str(turn + 1) for turn in of])}"


def _other_weights(schedule: Schedule) -> Iterator[str]:
    if schedule.swap is not None:
        yield f"{listed(schedule.swap.agents)} exchange their weights every {schedule.swap.every} updates"
    pool = schedule.opponent_pool
    if pool is not None:
        share = f"{pool.probability:.0%} of the updates"
        yield f"in {share} {pool.agent} speaks with past weights of {pool.of}, and then does not learn"


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
    text = re.sub(r" \([^()]*arXiv [^()]*\)", "", text)  # a part that one paper uses is not its method
    return text.removeprefix("Return ").removesuffix(".")
