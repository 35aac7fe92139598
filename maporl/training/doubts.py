"""What is hardly ever meant: values far outside what anybody uses, and choices that undo each other.

One table, :data:`USUAL`, has the usual range of each number and where it comes from. The functions below it look at
several options, and yield texts of the form "option: what it is; what to do". All are doubts: the run works.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import NamedTuple

from maporl.advantages.baselines import baseline_of
from maporl.advantages.returns import return_of
from maporl.advantages.scales import scale_of
from maporl.config.agents import place_of
from maporl.config.engines import ENGINES
from maporl.config.parse import entry_name, leaves
from maporl.errors import Fault
from maporl.protocols import policy_names
from maporl.rewards.check import UP_TO_ONE
from maporl.rewards.rules import BackPropagate, Last, Mix, Own, TeamMean, TreeMean, ZeroSum, build_rules
from maporl.run import ResolvedRun, each_algorithm
from maporl.training.learns_from import CALLS, FAULTS, MOST_UPDATES


class Usual(NamedTuple):
    """The usual range of a number.

    Args:
        option: its key; ``*`` stands for any text.
        low: the smallest usual value.
        high: the largest usual value.
        source: who uses such values. A number of four and five digits is a paper on arXiv.
        of: what is trained, where the range depends on it.
        off: whether 0 means that something is switched off, which is never doubted.
    """

    option: str
    low: float
    high: float
    source: str
    of: str = ""
    off: bool = True


WHOLE, ADAPTER, TINY = "a whole model", "an adapter or a critic's head", "a tiny model"
USUAL = (
    Usual("*learning_rate", 1e-8, 6e-4, "1e-7 to 1e-5 in papers; pretraining of GPT-3 Small, 2005.14165: 6e-4", WHOLE),
    Usual("*learning_rate", 5e-7, 5e-3, "5e-7 and 5e-4 in MARFT, 2504.16129; 2e-4 in TRL's LoRA examples", ADAPTER),
    Usual("*learning_rate", 1e-6, 2e-2, "3e-4 in quickstart, 1e-2 in examples/programs/team.yaml", TINY),
    Usual("*temperature*", 0.2, 2, "0.7 in TRL's PPO; 0.6 to 1 in papers"),
    Usual("*top_p*", 0.5, 1, "0.8 in C3, 2603.06859", off=False),
    Usual("ppo.kl_coef", 1e-5, 0.5, "0.05 in TRL's PPO; 0.001 in verl's GRPO; 0.2 in MARSHAL, 2510.15414"),
    Usual(
        "ppo.cliprange*", 1e-4, 5, "0.2 in PPO, 1707.06347; 3e-4 in GSPO, 2507.18071; 5 in SAO, 2607.07508", off=False
    ),
    Usual("ppo.dual_clip", 1.5, 20, "3 in Ye et al., 1912.09729; 10 in WideSeek-R1, 2602.04634", off=False),
    Usual("ppo.*tis_cap", 1, 10, "2 in Yao et al. 2025", off=False),
    Usual("ppo.num_ppo_epochs", 1, 10, "4 in TRL's PPO; 5 in MARFT, 2504.16129", off=False),
    Usual("ppo.gamma", 0.9, 1, "1 in TRL's PPO", off=False),
    Usual("ppo.entropy_coef", 1e-6, 0.1, "0.01 in A3C, 1602.01783"),
    Usual("ppo.target_kl", 1e-3, 1, "0.01 to 0.05 in Spinning Up's PPO", off=False),
    Usual("ppo.vf_coef", 1e-3, 2, "0.1 in TRL's PPO; 1.2 in CoMLRL"),
    Usual("reward.discount", 0, 1, "0.3 in MAPoRL, 2502.18439"),
    Usual("training.max_grad_norm", 1e-3, 100, "1 in transformers; 0.01 in ArCHer's code"),
    Usual("training.weight_decay", 0, 0.3, "0.01 in PyTorch's AdamW; 0.1 in GPT-3, 2005.14165"),
    Usual("training.adam_beta2", 0.9, 0.9999, "0.999 in Adam, 1412.6980; 0.95 in GPT-3, 2005.14165", off=False),
)


def doubts(run: ResolvedRun) -> Iterator[Fault]:
    """Yield a warning for each value far outside what anybody uses, and for each choice that is hardly ever meant.

    Of a loop, only the learning rates of its stages are looked at.

    Raises:
        ConfigError: a part of the run cannot be built.
    """
    of_run = () if run.config.stages else (_schedule, _rewards, _cancelling)
    for part in (_unusual, *of_run):
        yield from _faults(part)(run)
    for part in () if run.config.stages else (_rates, _method, _later_twice):
        yield from each_algorithm(_faults(part), run)


def _faults(part: Callable[[ResolvedRun], Iterable[str]]) -> Callable[[ResolvedRun], Iterator[Fault]]:
    def said(run: ResolvedRun) -> Iterator[Fault]:
        for text in part(run):
            key, _, said = text.partition(": ")
            what, _, remedy = said.rpartition("; ")
            yield Fault(key, what, remedy, "warning")

    return said


def narrowed(run: ResolvedRun) -> str:
    """Return the options, with their values, by which training samples from less than the whole distribution."""
    places = ["ppo", *(f"agents.{name}.sampling" for name in run.learners), "protocol.sampling.*"]
    full = {f"{place}.{key}*": full for place in places for key, full in (("top_p", 1), ("top_k", 0))}
    numbers = list(leaves(asdict(run.config)))
    narrow = [
        (place, value) for key in full for place, value in numbers if fnmatchcase(place, key) and value != full[key]
    ]
    return " and ".join(f"{place}={value:g}" for place, value in narrow if value is not None)


def narrow_sampling(run: ResolvedRun) -> list[str]:
    """Return a line if training samples from less than the whole distribution, which is the one that is trained."""
    config, ppo, told = run.config, run.config.ppo, narrowed(run)
    without = [name for name, agent in config.agents.items() if not ENGINES[agent.engine].top_k]
    uncut = f"; agents {', '.join(without)}: their engines have no top_k" if ppo.top_k and without else ""
    line = (
        f"sampling: {told} narrow what answers are sampled from. PPO trains the whole distribution at "
        f"temperature {ppo.temperature:g}: the sampler's, old, new and reference log-probabilities are all taken "
        f"there, so ratios begin at 1, and nothing corrects for what is cut{uncut}"
    )
    return [line] if told else []


def _unusual(run: ResolvedRun) -> Iterator[str]:
    """Yield the values outside the ranges of :data:`USUAL`."""
    config, stages, of = run.config, run.config.stages, defaultdict(set)
    rates = [f"loop.stages.{n}.learning_rate" for n, stage in enumerate(stages) if stage.train != "reward"]
    rates += ["warm_start.learning_rate"] if config.warm_start.steps else []
    for name, agent in config.agents.items():
        if agent.trainable and agent.weights:
            kind = TINY if agent.tiny else ADAPTER if agent.lora or agent.adapter else WHOLE
            for place in (*rates, place_of(name, "training.learning_rate", config)):
                of[place].add(kind)
            own = config.of(name)
            if baseline_of(own.advantage).needs_critic and own.training.critic != "none":
                apart = kind == TINY or own.training.critic in ("model", "central")
                place = place_of(name, "training.value_learning_rate", config)
                of[place].add(kind if kind == TINY else WHOLE if apart else ADAPTER)
    for place, value in leaves(asdict(config)):
        if isinstance(value, bool) or not isinstance(value, int | float) or (stages and place not in rates):
            continue
        of_team = re.sub(r"^agents\.[^.]+\.algorithm\.(?=ppo|advantage)", "", place)
        for usual in (usual for usual in USUAL if fnmatchcase(of_team, usual.option)):
            meant = (value or not usual.off) and (not usual.of or usual.of in of[place])
            if meant and not usual.low <= value <= usual.high:
                far, whose = "below" if value < usual.low else "above", f" of {usual.of}" if usual.of else ""
                yield (
                    f"{place}: {value:g} is far {far} what is usual{whose}, {usual.low:g} to {usual.high:g} "
                    f"({usual.source}); choose a value in this range unless you know why not"
                )


def _schedule(run: ResolvedRun) -> Iterator[str]:
    """Yield the learners that no update trains, and what begins after the last update."""
    turns, updates, schedule = run.protocol.turns, run.config.updates, run.config.schedule
    plans = map(schedule.resolved(turns, run.agents).plan, range(1, min(updates, MOST_UPDATES) + 1))
    learn = {name for plan in plans for name in run.learners for turn in range(turns) if plan.learns(name, turn)}
    learn |= {freeze.agent for freeze in schedule.freeze if freeze.first == 1 and freeze.last is None}  # as is meant
    for name in run.learners if updates <= MOST_UPDATES else ():
        if name not in learn:
            yield f"schedule: {name} learns in none of the {updates} updates; give more updates, or change the schedule"
    begins = [("curriculum", stage.update) for stage in schedule.curriculum]
    if (growth := schedule.growth) is not None:
        begins += [("growth", 1 + growth.every * number) for number in range(1, growth.stages)]
    late = {key: first for key, first in reversed(begins) if first > updates}
    yield from (
        f"schedule.{key}: its stage from update {first} on is never reached in {updates} updates; give more updates, "
        "or begin it earlier"
        for key, first in late.items()
    )


def _rates(run: ResolvedRun) -> Iterator[str]:
    """Yield a rate that rises or falls for longer than the run."""
    updates, training = run.config.updates, run.config.training
    options = training.lr_scheduler_kwargs or {}
    falls = options.get("num_decay_steps", 0)
    yield from _those_that_hold(
        (training.warmup_steps >= updates,
         f"training.warmup_steps: the learning rate rises for {training.warmup_steps:g} updates, and the run has "
         f"{updates}, so it is never reached; choose fewer, or more updates"),
        (falls > updates and "num_stable_steps" not in options,
         f"training.lr_scheduler_kwargs.num_decay_steps: the learning rate falls for {falls} updates, and the run has "
         f"{updates}, so that it begins lower than training.learning_rate; choose fewer, or more updates"),
    )  # fmt: skip


def _method(run: ResolvedRun) -> Iterator[str]:
    """Yield choices of the loss, the advantage and the evaluation."""
    config, advantage, ppo = run.config, run.config.advantage, run.config.ppo
    baseline, steps = baseline_of(advantage), ppo.num_ppo_epochs * ppo.num_mini_batches
    joint = config.training.critic_context == "joint" and baseline.needs_critic
    yield from _those_that_hold(
        (baseline.scales_mean and scale_of(advantage).over != "nothing",
         f"advantage: baseline {advantage.baseline} with scale {advantage.scale} is baseline mean, times n / (n - 1) "
         "for groups of n rows; set advantage.scale: none (RLOO), or advantage.baseline: mean (GRPO)"),
        (ppo.ratio != "token" and ppo.aggregation == "token_mean",
         f"ppo: ratio {ppo.ratio} with aggregation token_mean weighs an answer by its length, although all its tokens "
         "have one ratio; set ppo.aggregation: sequence_mean"),
        (ppo.objective == "reinforce" and ppo.tis_cap is None and steps > 1,
         f"ppo.objective: reinforce has no ratio, and all but the first of the {steps} steps on a batch (passes x "
         "minibatches) train on answers of older weights; make one step (Williams, 1992), or set ppo.tis_cap: 2"),
        (joint and not run.protocol.hears_others,
         "training.critic_context: joint lets the critic read what all agents said before, but in this protocol all "
         "agents speak once, at the same time; set protocol.turns to 2 or more, or critic_context: answer"),
    )  # fmt: skip


def _rewards(run: ResolvedRun) -> Iterator[str]:
    """Yield choices of the rewards."""
    reward = run.config.reward
    sources = {name: weight for name, weight in reward.sources.items() if weight}
    agreed = [name for name in ("majority", "peer_majority") if sources.get(name, 0) > 0]
    yield from _those_that_hold(
        (sources.get("label", 1) < 0,
         f"reward.sources: label has the weight {sources.get('label', 1):g}, so right answers cost; give it more"),
        (agreed and "label" not in reward.sources,
         f"reward.sources: {' and '.join(agreed)} pays agreement, right or wrong, so that a team which gives one "
         "answer to every question earns all of it; watch the accuracy on held-out questions that have labels, and the "
         "entropy, and stop when the accuracy falls"),
    )  # fmt: skip
    fines = {f"reward.penalties.{name}": getattr(reward.penalties, name, 0) for name in (*FAULTS, *CALLS)}
    fines["ppo.missing_eos_penalty"] = run.config.ppo.missing_eos_penalty or 0
    largest = sum(weight for weight in sources.values() if weight > 0)
    for place, fine in fines.items() if sources.keys() <= UP_TO_ONE else ():
        if fine > largest:
            yield (
                f"{place}: {fine:g} is more than the largest reward, {largest:g}, so that a right answer with this "
                "fault is worse than a wrong one without it; 0.01 to 0.2 is usual (Dr. MAS; MAPoRL, 2502.18439)"
            )


def _later_twice(run: ResolvedRun) -> Iterator[str]:
    """Yield returns that add up an agent's turns, where the credit of each of them holds later ones already."""
    reward, advantage = run.config.reward, run.config.advantage
    holds = [] if reward.rules or reward.horizon == "current" else [f"reward.horizon: {reward.horizon}"]
    for entry, rule in zip(reward.rules, build_rules(reward.rules), strict=True):
        whole = (isinstance(rule, TeamMean) and rule.over == "dialogue") or (
            isinstance(rule, Last) and rule.to == "all"
        )
        if whole or isinstance(rule, ZeroSum | BackPropagate | TreeMean):
            holds = [f"reward.rules: {entry_name(entry)}"]
    for returns in (advantage, *(term.within(advantage) for term in advantage.plus)):
        if holds and run.protocol.turns > 1 and return_of(returns).along != "utterance":
            yield (
                f"advantage.returns: {returns.returns} adds up the credits of several turns, each of which holds those "
                f"of later turns by {holds[0]}, so that they count more than once; set advantage.returns: utterance"
            )


def _cancelling(run: ResolvedRun) -> Iterator[str]:
    """Yield rewards that one agent is paid and another one pays, if both speak by the same weights."""
    reward, rules = run.config.reward, build_rules(run.config.reward.rules)
    spoken: dict[str, dict[str, Counter[str]]] = defaultdict(dict)
    if not all(isinstance(rule, Own | Mix) for rule in rules) or (not rules and reward.share == "all"):
        return  # an agent is also paid for what others say
    for name, role in run.learners.items():
        worth = Counter(reward.sources)
        for rule in (rule for rule in rules if isinstance(rule, Mix) and (not rule.roles or role in rule.roles)):
            worth = Counter({source: rule.credit * weight for source, weight in worth.items()})
            worth.update(rule.weights)
        worth.subtract({n: c.weight for n, c in reward.charges.items() if not c.roles or {name, role} & {*c.roles}})
        for policy in policy_names(name, run.config.agents[name], run.config):
            spoken[policy][name] = worth
    for policy, worths in spoken.items():
        for source in dict.fromkeys(source for worth in worths.values() for source in worth):
            weights = {name: worth[source] for name, worth in worths.items()}
            if any(weights.values()) and abs(sum(weights.values())) < 1e-9:
                told = " and ".join(f"{weight:+g} for {name}" for name, weight in weights.items())
                yield (
                    f"reward: {source} counts {told}, who speak by the weights of {policy}: where they are shown the "
                    "same, one unlearns what the other learns; give them policies of their own, or other weights"
                )


def _those_that_hold(*said: tuple[object, str]) -> Iterator[str]:
    """Yield the texts of those pairs whose first part is true."""
    yield from (text for holds, text in said if holds)
