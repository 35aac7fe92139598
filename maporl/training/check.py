"""Check that what a run learns from fits together: options of PPO, credit, branching and advantages.

A branching may compare answers as soon as they are given, and may continue only one candidate of each step. An answer
must then be credited with what it earned itself, so that equal moves in equal states earn equal advantages.
Configurations are checked before a model loads. A trainer checks the parts that it is given (:func:`fitting`). Torch is
imported only for an advantage that is not PPO's own.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from maporl.config.algorithm import OF_TEAM
from maporl.config.backends import BACKENDS
from maporl.config.engines import ENGINES
from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig, BranchingSection, DistillSection, RewardSection
from maporl.errors import Fault, refused
from maporl.protocols.base import Protocol
from maporl.rewards.build import asks_untrained
from maporl.rewards.check import score_range
from maporl.rewards.rules import Along, build_rules
from maporl.rollout.branching import BRANCHINGS
from maporl.run import ResolvedRun, each_algorithm
from maporl.training import ahead
from maporl.training.doubts import narrowed
from trl_ext.ppo.options import PPOOptions

STEP_SOURCES = frozenset({"reported", "verdict"})
"""Rewards that are paid for a step as soon as it was taken."""


def check_options(run: ResolvedRun) -> Iterator[Fault]:
    """Yield options of PPO that cannot be, whatever is played."""
    ppo = run.config.ppo
    if ppo.total_episodes is not None:
        yield Fault("ppo.total_episodes", "the length of a run is set by 'updates'", "remove it")
    yield from each_algorithm(_minibatches, run)


def _minibatches(run: ResolvedRun) -> Iterator[Fault]:
    """Yield that the questions of an update cannot be dealt to minibatches."""
    parts, questions = run.config.ppo.num_mini_batches, run.config.questions_per_update()
    if questions % parts:
        what = f"{parts} does not divide the {questions} questions of an update"
        yield Fault("ppo.num_mini_batches", what, "change it or training.per_device_train_batch_size")


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what does not fit together of what is learned from.

    Raises:
        ConfigError: a transform of the advantage does not exist, or has a wrong option.
    """
    config = run.config
    if config.training.async_depth:
        yield from _ahead(run)
    distills = not config.grouped or BACKENDS[config.cluster.backend].distills
    if config.reward.distill is not None and not distills:
        yield Fault("reward.distill", "its teacher is asked in the trainer's own process", "use cluster.backend: local")
    training = config.training
    yield from by_role(training.role_gradients, training.balance, not config.grouped, 1)
    if training.eval_steps and not config.evaluation.questions:
        what = f"{training.eval_steps} asks for evaluations but evaluation.questions is 0"
        yield Fault("training.eval_steps", what, "set evaluation.questions above 0 or training.eval_steps to 0")
    yield from each_algorithm(_algorithm, run)
    if any(agent.learns_by != OF_TEAM for agent in config.agents.values()):
        from maporl.advantages.check import check_algorithms  # needs torch

        yield from check_algorithms(run)


def _algorithm(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what does not fit together of what the learners of one algorithm learn from."""
    config = run.config
    cut, by_cut = narrowed(run), [n for n in run.learners if ENGINES[config.agents[n].engine].tells_cut]
    if cut and by_cut and (config.ppo.compares_sampler or config.reward.distill is not None):
        ratio = config.ppo.compares_sampler
        reader = f"ppo.{ratio.partition(':')[0]}" if ratio else "reward.distill"
        engines = f"the engine of {', '.join(by_cut)} gives log-probabilities of what {cut} leaves"
        what = f"it would compare those of the whole distribution with others, because {engines}"
        remedy = f"sample from the whole distribution, use engine: transformers, or leave {reader} out"
        yield Fault(reader, what, remedy)
    if config.advantage != AdvantageConfig():
        from maporl.advantages.check import check as check_advantage  # needs torch

        yield from check_advantage(run)
    yield from fitting(config.branching, config.reward, run.protocol, config.advantage, config.ppo)
    if config.ppo.value_loss == "hl_gauss":
        bounds = partial(value_range, config.reward, config.advantage, config.ppo, run.protocol, len(run.speakers))
        yield from refused(bounds)


def unread(run: ResolvedRun) -> Iterator[Fault]:
    """Yield a warning for each option that is set where nothing in the run reads it."""
    told = [*_set(run, _unread(run))]
    yield from told
    if run.config.stages and not any(stage.train == "ppo" for stage in run.config.stages):
        return
    views = [(own, {f.key: f for f in _set(own, _unread_by_learners(own))}) for own in run.by_algorithm()]
    for key, fault in {key: fault for _, found in views for key, fault in found.items()}.items():
        for own, found in views:
            there = dataclasses.replace(fault, key=own.key(key))
            if there != fault and key in found and there not in told:
                yield there
        theirs = [key in found for own, found in views if own.key(key) == key]  # who has the team's value
        if theirs and all(theirs):
            yield fault


def _set(run: ResolvedRun, told: Iterable[tuple[object, str, str]]) -> Iterator[Fault]:
    """Yield a warning for each of the options that are read by nothing whose value is not the default."""
    for is_unread, options, why in told:
        for option in options.split() if is_unread else ():
            *above, name = option.split(".")
            section: Any = run.config
            for key in above:
                section = section[key] if isinstance(section, dict) else getattr(section, key)
            for f in dataclasses.fields(section) if section is not None else ():
                default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
                if f.name == name and getattr(section, name) != default:
                    yield Fault(option, f"it is set, and nothing reads it: {why}", "remove it", "warning")


def _unread(run: ResolvedRun) -> Iterator[tuple[object, str, str]]:
    """Yield whether options are read by nothing, which these are, and why. Parts of a user's own may read anything."""
    from maporl.advantages.baselines import baseline_of  # needs torch

    config, reward = run.config, run.config.reward
    training, stages, how = config.training, config.stages, config.branching.how
    if stages and not any(stage.train == "ppo" for stage in stages):
        steps = "num_ppo_epochs num_mini_batches kl_coef objective aggregation cliprange entropy_coef vf_coef gamma lam"
        rates = "learning_rate value_learning_rate critic lr_scheduler_type warmup_steps max_grad_norm eval_steps"
        options = [f"ppo.{name}" for name in steps.split()] + [f"training.{name}" for name in rates.split()]
        for name, agent in config.agents.items():
            options += [f"agents.{name}.{key}" for key in ("learning_rate", "critic")]
            read = {"weight_decay"}.issuperset(agent.algorithm.of_policy) and not agent.algorithm.advantage
            options += [] if read else [f"agents.{name}.algorithm"]
        yield True, f"advantage schedule updates {' '.join(options)}", "no stage of the loop trains by ppo"
        return
    asked = {*reward.asked, *run.protocol.between_turns(), *("verifier" for s in stages if s.train == "reward")}
    roles = {(agent.policy or name, agent.role or name) for name, agent in config.agents.items()}
    one_role = not run.protocol.roles and len(roles) == len({policy for policy, _ in roles})
    calls = config.environments or run.protocol.uses_tools or any(agent.tools for agent in config.agents.values())
    for option, reader in {"drafts": "best_of", "pick": "tree", "keep": "stages", "choose": "stages"}.items():
        yield how != reader, f"branching.{option}", f"branching.how is not {reader}"
    yield reward.rules, "reward.horizon reward.share reward.discount", "reward.rules take their place"
    no_later_score = not reward.rules and reward.horizon != "discounted_sum"
    yield no_later_score, "reward.discount", "reward.horizon is not discounted_sum"
    for name in ("brevity", "verifier", "judge", "arena", "judgement", "annotator"):
        yield name not in asked, f"reward.{name}", f"reward.sources has no {name}"
    penalties = "reward.penalties.call reward.penalties.call_unread reward.penalties.call_failed"
    yield not calls, penalties, "nobody calls tools"
    evaluation = "evaluation.temperature evaluation.sampling evaluation.top_p evaluation.top_k"
    yield not config.evaluation.questions, evaluation, "evaluation.questions is 0"
    greedy = config.evaluation.questions and config.evaluation.temperature == 0 and not config.evaluation.sampling
    yield greedy, "evaluation.top_p evaluation.top_k", "evaluation.temperature is 0, which takes the likeliest token"
    lessons = "warm_start.batch_size warm_start.learning_rate warm_start.wrong warm_start.agents warm_start.calls"
    yield not config.warm_start.steps, lessons, "warm_start.steps is 0"
    yield not training.save_steps, "training.save_total_limit", "training.save_steps is 0"
    yield one_role, "training.role_gradients training.balance", "no policy speaks in two roles"
    yield (
        not training.load_best_model_at_end,
        "training.metric_for_best_model",
        "training.load_best_model_at_end is off",
    )
    yield not config.grouped, "cluster.batching cluster.failures", "cluster.backend is local"
    yield not training.async_depth, "cluster.on_update", "training.async_depth is 0"
    for name, agent in config.agents.items():
        key = f"agents.{name}"
        rates = f"{key}.learning_rate {key}.critic {key}.algorithm"
        yield not (agent.trainable and agent.weights), rates, f"{name} is not trained"
        values = baseline_of(config.of(name).advantage).needs_critic
        yield not values and agent.critic != "none", f"{key}.critic", "advantage.baseline reads no values"
        yield not calls, f"{key}.call_format {key}.call_texts {key}.limits", "nobody calls tools"


def _unread_by_learners(run: ResolvedRun) -> Iterator[tuple[object, str, str]]:
    """Yield the same of the options by which the learners of one algorithm learn."""
    from maporl.advantages.baselines import baseline_of  # needs torch
    from maporl.advantages.returns import return_of

    advantage, ppo, training = run.config.advantage, run.config.ppo, run.config.training
    terms = [advantage, *(term.within(advantage) for term in advantage.plus)]
    slots = {getattr(term, slot) for term in terms for slot in ("returns", "baseline", "scale")}
    own, per_token = any(":" in name for name in slots), return_of(advantage).per_token
    values = baseline_of(advantage).needs_critic
    no_critic = not values or training.critic == "none"
    of_values = "ppo.vf_coef ppo.value_loss ppo.cliprange_value training.value_learning_rate training.detach_critic"
    of_values += " training.critic_per_turn training.critic_context ppo.lam_alpha ppo.lam_critic ppo.critic_updates"
    yield no_critic, of_values, "no policy has a critic"
    one_number = "advantage.returns has one number for each utterance"
    yield not (no_critic or per_token), "ppo.lam_alpha ppo.lam_critic", one_number
    yield not values and training.critic != "none", "training.critic", "advantage.baseline reads no values"
    yield ppo.value_loss != "huber", "ppo.huber_delta", "ppo.value_loss is not huber"
    bins = "ppo.value_bins ppo.value_range ppo.value_sigma"
    yield ppo.value_loss != "hl_gauss", bins, "ppo.value_loss is not hl_gauss"
    yield ppo.value_loss == "hl_gauss", "ppo.cliprange_value", "ppo.value_loss hl_gauss clips nothing"
    yield no_critic and per_token, "ppo.lam", "without a critic, returns are the sums of rewards to come"
    yield not per_token, "ppo.gamma ppo.lam ppo.whiten_rewards", one_number
    yield per_token, "advantage.eps", "returns over tokens are whitened without it"
    gae = {"turn_gae", "chain_gae", "bi_level_gae"}
    yield not own and not slots & gae, "advantage.lam", "advantage.returns does no GAE over utterances"
    yield not own and not slots & {*gae, "reward_to_go", "tree"}, "advantage.gamma", "advantage.returns has no discount"
    undivided = {term.scale for term in terms} == {"none"} and "whiten" not in map(entry_name, advantage.post)
    yield not own and undivided, "advantage.ddof advantage.eps", "advantage.scale divides by nothing"
    yield not own and "ema" not in slots, "advantage.ema", "advantage.baseline is not ema"
    yield not own and "assisted" not in slots, "advantage.alpha", "advantage.baseline is not assisted"
    yield ppo.kl_coef == 0, "ppo.kl_in ppo.kl_estimator", "ppo.kl_coef is 0"
    yield ppo.objective == "reinforce", "ppo.cliprange ppo.cliprange_high ppo.dual_clip", "reinforce clips nothing"
    yield ppo.objective == "dis", "ppo.dual_clip", "dis has no such bound"
    yield ppo.objective in ("ppo", "dis"), "ppo.tis_cap", "ppo.objective is not reinforce"


def by_role(every: int, balance: str, whole: bool, processes: int) -> Iterator[Fault]:
    """Yield why gradients of roles cannot be measured.

    Args:
        every: in which updates they shall be, ``training.role_gradients``.
        balance: what balances them, ``training.balance``.
        whole: whether the trainer's own process has whole gradients, without Ray and sharding.
        processes: the number of processes that train together.
    """
    if (every or balance != "none") and (not whole or processes > 1):
        apart = f"{processes} processes" if processes > 1 else "them in groups of Ray or in shards"
        what = f"gradients of roles are measured where one process has all of them, and this run has {apart}"
        remedy = "train in one process, without Ray and sharding, or leave role_gradients and balance out"
        yield Fault("training.role_gradients" if balance == "none" else "training.balance", what, remedy)


def _ahead(run: ResolvedRun) -> Iterator[Fault]:
    config = run.config
    grouped = config.grouped  # its engine takes the place of the default one
    entries = {agent.engine: ENGINES[agent.engine] for agent in config.agents.values()}
    finishes = grouped and config.cluster.on_update == "finish"
    return ahead.faults(
        config.training.async_depth,
        {name: entry.remote or grouped for name, entry in entries.items()},
        {name: not entry.weights or finishes for name, entry in entries.items()},
        asks_untrained(config.restate, config.reward.asked),
        all(own.config.ppo.compares_sampler for own in run.by_algorithm()),
        config.schedule.opponent_pool is not None,
    )


def fitting(
    branching: BranchingSection, reward: RewardSection, protocol: Protocol, advantage: AdvantageConfig, ppo: PPOOptions
) -> Iterator[Fault]:
    """Yield what the branching, the credit and the advantage of a run exclude of each other."""
    yield from _branched_credit(branching, reward, protocol)
    if reward.distill is not None:
        yield from _untaught(branching, reward.distill, protocol)
    if advantage == AdvantageConfig():
        return
    from maporl.advantages.check import scaled_noise  # needs torch

    yield from _rewards_apart(advantage, reward, ppo)
    yield from scaled_noise(advantage, ppo)
    yield from _branched_advantage(branching, advantage)


def value_range(
    reward: RewardSection, advantage: AdvantageConfig, ppo: PPOOptions, protocol: Protocol, speakers: int
) -> list[float]:
    """Return the smallest and the largest return that a categorical critic learns: those that are set, or else what the
    credits can sum to over the turns that a return looks at.

    Raises:
        ValueError: the rewards have no known bounds.
    """
    from maporl.advantages.returns import return_of  # needs torch

    rows = 1 if return_of(advantage).along == "utterance" else speakers * max(protocol.turns, 1)
    found = ppo.value_range or score_range(reward, ppo.missing_eos_penalty, rows)
    if found is None:
        raise ValueError(
            "ppo.value_range: hl_gauss needs the smallest and the largest return, and these rewards have no known "
            "bounds; set it, as [0.0, 1.0]"
        )
    return found


def _untaught(branching: BranchingSection, distill: DistillSection, protocol: Protocol) -> Iterator[Fault]:
    """Yield why no teacher could judge an answer that it has not seen."""
    if BRANCHINGS[branching.how].judges:
        what = (
            f"branching {branching.how} decides by the scores of first answers what follows them, so what a teacher "
            "reads would depend on the answer that it judges"
        )
        yield Fault("reward.distill", what, "use how: independent, fork_first or fork_every")
    elif distill.teacher == "dialogue" and not protocol.hears_others:
        yield Fault("reward.distill", f"in protocol {protocol.label!r} all speak once, so talking teaches nothing")
    elif distill.teacher == "dialogue" and branching.most < 2:
        what = "a teacher that has seen an answer cannot judge it; it needs others, and branching.group is 1"
        yield Fault("reward.distill", what, "set branching.group to 2 or more, or let another agent teach")


def _branched_credit(branching: BranchingSection, reward: RewardSection, protocol: Protocol) -> Iterator[Fault]:
    """Yield credit that is not known yet when answers are compared, or that differs between equal candidates."""
    kind, how = BRANCHINGS[branching.how], branching.how
    if kind.judges and not protocol.every_step_scored and not STEP_SOURCES & reward.sources.keys():
        what = f"{how} compares answers at once, but protocol {protocol.label!r} has steps that nothing scores yet"
        remedy = "use how: independent or fork_first, or let a program report scores (reward.sources: reported)"
        yield Fault("branching", what, remedy)
    later = dict.fromkeys(("majority", "peer_majority"), "the last answers of all its dialogues")
    later["repeats"] = "a whole update's proposals"
    for source in [name for name in later if kind.judges and name in reward.sources]:
        what = f"{how} compares answers while they are given, but reward.sources: {source} needs {later[source]}"
        yield Fault("branching", what, f"use how: independent or fork_first, or leave {source} out")
    if not kind.final:
        return
    for key, along in _looks_along(reward).items():
        if along != "utterance" and not (along == "turn" and protocol.simultaneous):
            what = f"{how} goes on with some candidates of a step only, and {key} looks at what follows an answer"
            remedy = "credit its own score (reward.rules: [own]), or use how: independent, fork_first or fork_every"
            yield Fault("branching", f"{what}, so equal candidates would earn different credits", remedy)


def _looks_along(reward: RewardSection) -> dict[str, Along]:
    """Return, for each part of the reward that assigns credit, what an utterance's credit depends on."""
    if reward.rules:
        rules = zip(reward.rules, build_rules(reward.rules), strict=True)
        return {f"reward.rules: {entry_name(entry)}": rule.along for entry, rule in rules}
    shares: Along = "turn" if reward.share == "all" else "utterance"
    along = {f"reward.horizon: {reward.horizon}": shares if reward.horizon == "current" else "dialogue"}
    if reward.bonus is not None and any(reward.bonus.alpha[2:]):
        along["reward.bonus (its influence on the next turn)"] = "dialogue"
    return along


def _branched_advantage(branching: BranchingSection, advantage: AdvantageConfig) -> Iterator[Fault]:
    """Yield what compares utterances by what followed them, where only one candidate of each step goes on."""
    if not BRANCHINGS[branching.how].final:
        return
    from maporl.advantages.returns import return_of
    from maporl.advantages.transforms import build_transforms

    later = [f"returns: {advantage.returns}"] if return_of(advantage).along != "utterance" else []
    later += ["unit: rollout"] if advantage.unit == "rollout" else []
    transforms = zip(advantage.post, build_transforms(advantage), strict=True)
    later += [f"post: {entry_name(entry)}" for entry, transform in transforms if transform.compares_turns]
    if later:
        key, _, value = later[0].partition(": ")
        what = f"{value} looks at other turns, but with how: {branching.how} only some candidates have later turns"
        remedy = (
            "set returns: utterance, unit: row and no such transform, or how: independent, fork_first or fork_every"
        )
        yield Fault(f"advantage.{key}", what, remedy)


def _rewards_apart(advantage: AdvantageConfig, reward: RewardSection, ppo: PPOOptions) -> Iterator[Fault]:
    """Yield what changes the sum of an utterance's own rewards, where these are compared apart."""
    key = "advantage.multi_objective_aggregation"
    if advantage.multi_objective_aggregation != "normalize_then_sum":
        return
    changes = {
        "reward.rules other than own": [entry for entry in reward.rules if entry != "own"],
        "reward.share: all": not reward.rules and reward.share == "all",
        f"reward.horizon: {reward.horizon}": not reward.rules and reward.horizon != "current",
        "reward.bonus": reward.bonus,
        "reward.penalties": reward.penalties,
        "reward.charges": reward.charges,
        "ppo.missing_eos_penalty": ppo.missing_eos_penalty,
        "ppo.kl_coef with kl_in: reward": ppo.kl_coef != 0 and ppo.kl_in == "reward",
    }
    present = [name for name, value in changes.items() if value]
    if present:
        what = f"normalize_then_sum compares each of {list(reward.sources)} alone, but {present[0]} changes their sum"
        yield Fault(key, what, "set reward.rules: [own] and leave that out")
    if len([weight for weight in reward.sources.values() if weight]) < 2:
        what = f"normalize_then_sum needs two rewards with a weight, got reward.sources {reward.sources}"
        yield Fault(key, what, "add one, or remove it")


def check_kinds(parts: dict[str, tuple[Any, type]]) -> None:
    """Check that every part is of its kind, or None.

    Args:
        parts: for each argument's name, what was given, and the class that it should be of.

    Raises:
        ValueError: a part is of another kind. The message says which, and what was expected.
    """
    for name, (part, kind) in parts.items():
        if isinstance(part, type) and issubclass(part, kind):
            raise ValueError(f"{name}: expected an object, got the class {part.__name__}; write {part.__name__}(...)")
        if part is None or isinstance(part, kind):
            continue
        expected = "a mapping" if kind is Mapping else f"a maporl.{kind.__name__}"
        raise ValueError(f"{name}: expected {expected}, got {type(part).__name__} {part!r:.60}")
