"""Check that the parts of a configuration fit each other. This loads no model, and torch only for advantages."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from maporl.config.engines import ENGINES
from maporl.config.imports import unknown
from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig, AgentSection, Config
from maporl.errors import ConfigError
from maporl.protocols import Protocol
from maporl.protocols.growth import check_growth
from maporl.protocols.judging import judge_of
from maporl.rewards.build import UNIT_SOURCES, find_source
from maporl.rewards.likelihood import asks_untrained
from maporl.rewards.rules import build_rules
from maporl.rollout.branching import BRANCHINGS
from maporl.rounding import exceeds
from maporl.run import ResolvedRun
from maporl.tasks import TASKS, build_task
from maporl.team.checks import check_agents
from maporl.team.sampling import check_sampling
from maporl.training.ahead import check_ahead
from maporl.training.branched_credit import check_branched_advantage, check_branched_credit
from maporl.training.rewards_apart import check_rewards_apart
from maporl.validation.ablate import check_ablate, contributions


def check(config: Config, where: str) -> None:
    """Check that the parts of ``config`` fit each other.

    Raises:
        ConfigError: they do not. The message begins with ``where`` and names the first fault.
    """
    run = ResolvedRun(config, where)
    _check_named(config, where)
    _check_output(config, where)
    _check_ppo(config, where)
    check_agents(config, where)
    for name, agent in config.agents.items():
        _check_critic(name, agent, config, where)
    _check_restating(config, where)
    check_sampling(run)
    _check_learning(run)
    _check_reward(run)
    _check_async(config, where)
    _check_branching(run)
    _check_tools(run)
    _check_advantage(run)
    _check_task(run)


def _check_named(config: Config, where: str) -> None:
    """Check that every part of the run has a name with which it can be built here."""
    if config.only_in_python:
        parts = ", ".join(f"{key} ({what})" for key, what in config.only_in_python.items())
        raise ConfigError(
            f"{where}: only_in_python: the run was made in Python with parts that cannot be built from here: {parts:.400}; "
            "define them as dataclasses and functions of a module that can be imported, or use them in Python: "
            "Team.from_pretrained(RUN) loads the team for a trainer with these parts"
        )


def _check_output(config: Config, where: str) -> None:
    folder = Path(config.output_dir)
    if folder.parts[:1] == ("~",):
        raise ConfigError(
            f"{where}: output_dir: {config.output_dir!r:.80}: '~' is not replaced here; write out the folder"
        )
    try:
        there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    except OSError as error:  # such as a name that is too long
        raise ConfigError(
            f"{where}: output_dir: cannot be used ({error.strerror}), got {config.output_dir!r:.80}; give another name"
        ) from None
    if there.exists() and not there.is_dir():
        raise ConfigError(
            f"{where}: output_dir: {str(there)!r} is a file; expected a new or empty folder, so give another name"
        )


def _check_ppo(config: Config, where: str) -> None:
    ppo = config.ppo
    if ppo.total_episodes is not None:
        raise ConfigError(f"{where}: ppo.total_episodes: the length of a run is set by 'updates'; remove it")
    for name, value in dataclasses.asdict(ppo).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: ppo.{name}: expected a finite number, got {value}")
    ids = [ppo.stop_token_id] if isinstance(ppo.stop_token_id, int) else ppo.stop_token_id
    if ids is not None and (not ids or min(ids) < 0):
        raise ConfigError(
            f"{where}: ppo.stop_token_id: expected a token id of at least 0, or a list of them, got {ppo.stop_token_id}"
        )
    if config.questions_per_update() % ppo.num_mini_batches:
        raise ConfigError(
            f"{where}: ppo.num_mini_batches={ppo.num_mini_batches} does not divide the "
            f"{config.questions_per_update()} questions of an update; change it or training.per_device_train_batch_size"
        )


def _check_critic(name: str, agent: AgentSection, config: Config, where: str) -> None:
    key = f"agents.{name}.critic" if agent.critic is not None else "training.critic"
    if agent.weights and agent.trainable and (agent.critic or config.training.critic) == "central":
        _check_central_critic(name, agent, key, config, where)
    if not agent.weights or not agent.trainable or (agent.critic or config.training.critic) != "adapter":
        return
    if agent.lora is None and agent.adapter is None:
        raise ConfigError(
            f"{where}: {key}: 'adapter' needs a LoRA, and agents.{name} has none; add lora: {{}} to it or use critic: head"
        )
    if config.training.gradient_checkpointing:
        raise ConfigError(
            f"{where}: {key}: 'adapter' excludes training.gradient_checkpointing, which would recompute activations under "
            "the wrong adapter; use critic: head or set training.gradient_checkpointing: false"
        )


def _check_central_critic(name: str, agent: AgentSection, key: str, config: Config, where: str) -> None:
    """Check that the critic that agents share can be a copy of each one's model, and that one device holds everything."""
    if agent.load_in_4bit or agent.load_in_8bit:
        raise ConfigError(
            f"{where}: {key}: 'central' trains a copy of agents.{name}'s model, which is quantized; use critic: head"
        )
    if config.training.placement == "split":
        raise ConfigError(
            f"{where}: {key}: 'central' excludes training.placement: split; set training.placement: shared"
        )
    for other, section in config.agents.items():
        for what in ("model", "tiny", "tokenizer"):
            mine, theirs = getattr(agent, what), getattr(section, what)
            if (
                section.weights
                and section.trainable
                and (section.critic or config.training.critic) == "central"
                and mine != theirs
            ):
                raise ConfigError(
                    f"{where}: {key}: 'central' is one critic for agents that read the same tokens, but {name!r} and {other!r} "
                    f"differ in {what}; give them the same, or use critic: head"
                )


def _check_restating(config: Config, where: str) -> None:
    """Check that the untrained weights stay in memory: under adapters, or as the reference of the KL penalty."""
    asked = None if config.loop.stages else asks_untrained(config.restate, config.reward.sources)  # a loop loads them
    for name, agent in config.agents.items():
        whole = agent.weights and agent.trainable and agent.lora is None and agent.adapter is None
        if asked and whole and config.ppo.kl_coef == 0:
            raise ConfigError(
                f"{where}: {asked} asks the weights before training, but agents.{name} trains all its weights and keeps no "
                "reference at ppo.kl_coef 0; give it a lora, set ppo.kl_coef above 0, or remove that option"
            )


def _check_learning(run: ResolvedRun) -> None:
    """Check that an agent that plays is trained, and that the schedule names existing agents and turns."""
    config, protocol, where = run.config, run.protocol, run.where
    learning = {name for name, a in config.agents.items() if a.trainable and a.weights}
    if not learning:
        raise ConfigError(
            f"{where}: agents: none is trainable, so nothing would be trained; set trainable: true for one"
        )
    playing = run.speakers
    if learning.isdisjoint(playing) and not config.loop.stages:  # a loop may teach one that does not play
        raise ConfigError(
            f"{where}: protocol.agents: of {list(playing)} none is trainable, so nothing would be trained; add one of "
            f"{sorted(learning)} or set trainable: true for one that plays"
        )
    try:
        config.schedule.resolved(protocol.turns, tuple(config.agents))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    check_growth(protocol, config.schedule.growth, playing, where)
    _check_exchange(config, playing, where)


def _check_exchange(config: Config, playing: tuple[str, ...], where: str) -> None:
    """Check that agents that exchange weights have equal models, and that scheduled agents can be trained."""
    schedule = config.schedule
    groups = {"schedule.swap": schedule.swap.agents if schedule.swap else []}
    if schedule.opponent_pool is not None:
        groups["schedule.opponent_pool"] = [schedule.opponent_pool.of, schedule.opponent_pool.agent]
    for key, names in groups.items():
        for name in names[1:]:
            for what in (
                "engine",
                "model",
                "tiny",
                "tokenizer",
                "chat_template",
                "template_options",
                "lora",
                "policy_per",
            ):
                mine, first = getattr(config.agents[name], what), getattr(config.agents[names[0]], what)
                if mine != first:
                    raise ConfigError(
                        f"{where}: {key}: {names[0]!r} and {name!r} must speak with the same weights but differ in "
                        f"{what}: {first!r:.60} and {mine!r:.60}; give them the same, or leave one of them out"
                    )
    rotation = [] if schedule.round_robin is None else schedule.round_robin.agents or list(playing)
    for name in rotation:
        agent = config.agents[name]
        if not agent.trainable or not agent.weights:
            raise ConfigError(
                f"{where}: schedule.round_robin: agent {name!r} should be trained in its turn, but it is frozen "
                "(trainable: false, or an engine without weights); list the trainable agents in schedule.round_robin.agents"
            )
    if schedule.critic_warmup and (config.advantage.baseline != "critic" or config.training.critic == "none"):
        raise ConfigError(
            f"{where}: schedule.critic_warmup: a critic is missing; set training.critic: head and advantage.baseline: "
            "critic, or critic_warmup: 0"
        )
    if 0 < config.updates <= schedule.critic_warmup:
        raise ConfigError(
            f"{where}: schedule.critic_warmup: only the critics would learn in all {config.updates} updates; choose a smaller "
            "number, or more updates"
        )


def check_exchange(run: ResolvedRun, names: Sequence[str], where: str = "--swap") -> None:
    """Check that the agents ``names`` can speak with each other's weights in an evaluation.

    Raises:
        ConfigError: an agent does not play, has no weights here, or stands twice; there are fewer than two; two of them
            have the same weights already; or their engines differ.
    """
    config, playing = run.config, run.speakers
    owners: dict[str, str] = {}
    for name in names:
        if name not in playing:
            raise ConfigError(f"{where}: {unknown(name, playing)}")
        agent = config.agents[name]
        if not agent.weights or agent.engine != config.agents[names[0]].engine:
            raise ConfigError(
                f"{where}: expected agents whose weights one engine samples from, but {names[0]!r} has the engine "
                f"{config.agents[names[0]].engine!r} and {name!r} has {agent.engine!r}; leave one of them out"
            )
        first = owners.setdefault(agent.policy or name, name)
        if first != name:
            raise ConfigError(f"{where}: {first!r} and {name!r} share one policy, so nothing would change")
    if len(owners) < max(2, len(names)):
        raise ConfigError(f"{where}: expected two different agents or more of {list(playing)}, got {list(names)}")


def _check_reward(run: ResolvedRun) -> None:
    config, protocol, where = run.config, run.protocol, run.where
    pays: frozenset[str] = protocol.pays | frozenset([*config.tools, *config.environments])
    used = {*config.reward.sources, *protocol.between_turns()}
    for source in sorted(used - pays):
        find_source(source, f"{where}: reward.sources", pays)
    rules = build_rules(config.reward.rules, f"{where}: reward.rules")
    given = {*config.reward.sources, *pays, *contributions(config.branching.ablate)}
    for entry, rule in zip(config.reward.rules, rules, strict=True):
        for reward in sorted(rule.reads - given):
            raise ConfigError(
                f"{where}: reward.rules: {entry_name(entry)} reads the reward {reward!r}, which nothing gives here, so it would always be 0; "
                f"name one of {sorted(given)}, or add it to reward.sources (with weight 0 it counts in rules alone)"
            )
        for column in sorted(rule.needs - protocol.records):
            raise ConfigError(
                f"{where}: reward.rules: {entry_name(entry)} needs {column}s, but protocol {config.protocol['name']!r} records no {column}s; use "
                "a protocol that does (call_return records callers), or leave the rule out"
            )
    if config.reward.bonus is not None and rules:
        raise ConfigError(f"{where}: reward: bonus goes with horizon, share and discount, not with rules; remove one")
    if "brevity" in used and config.reward.brevity is None:
        raise ConfigError(
            f"{where}: reward.brevity: the source 'brevity' needs it; for example reward.brevity: {{tokens: "
            f"{config.ppo.response_length}}}"
        )
    if "judgement" in used and getattr(protocol, "judge", None) is None:
        raise ConfigError(
            f"{where}: reward.sources: judgement scores what an agent says of results that it called for, and protocol "
            f"{config.protocol['name']!r} asks nobody for that; use protocol call_return with judge: TEXT"
        )
    if judge_of(protocol) is None and any(rule.needs_verdicts for rule in rules):
        raise ConfigError(
            f"{where}: reward.rules: consistency pays verdicts on what was said, and nobody gives any; set protocol.step_judge: "
            "{agent: NAME}, or leave the rule out"
        )
    for kind in ("judge", "arena", "annotator"):
        section = getattr(config.reward, kind)
        if kind in used and section is None:
            raise ConfigError(
                f"{where}: reward.{kind}: the source {kind!r} needs it; for example reward.{kind}: {{agent: NAME}}"
            )
        if section is not None and (section.agent not in config.agents or section.agent in run.speakers):
            raise ConfigError(
                f"{where}: reward.{kind}.agent: {section.agent!r} must be one of {list(config.agents)} that does not play; add it "
                "under agents: and list the others in protocol.agents"
            )
    if "arena" in config.reward.sources and config.branching.most < 2 and config.branching.how == "independent":
        raise ConfigError(
            f"{where}: reward.sources: arena compares a question's dialogues; set branching.group to 2 or more"
        )
    verifier = config.reward.verifier
    if "verifier" in used and verifier is not None and verifier.tiny is not None and not verifier.learn_every:
        raise ConfigError(
            f"{where}: reward.verifier.tiny: a random verifier knows nothing, so it must learn before it scores; set "
            "reward.verifier.learn_every"
        )
    strangers = [] if verifier is None else [name for name in verifier.authors if name not in config.agents]
    if strangers:
        raise ConfigError(
            f"{where}: reward.verifier.authors: the team has no agent {strangers[0]!r}; expected some of {list(config.agents)}"
        )
    if "verifier" in used and verifier is None:
        raise ConfigError(
            f"{where}: reward.verifier: a verifier scores or gives feedback here, so its model is needed; for example "
            "reward.verifier: {model: FOLDER}, or {urls: [http://127.0.0.1:8501]} of a server"
        )


def _check_async(config: Config, where: str) -> None:
    if not config.training.async_depth:
        return
    grouped = config.cluster.backend == "ray"  # its engine takes the place of the default one
    entries = {agent.engine: ENGINES[agent.engine] for agent in config.agents.values()}
    try:
        check_ahead(
            config.training.async_depth,
            {name: entry.remote or grouped for name, entry in entries.items()},
            {
                name: not entry.weights or (grouped and config.cluster.on_update == "finish")
                for name, entry in entries.items()
            },
            asks_untrained(config.restate, config.reward.sources),
            config.ppo.engine_tis_cap,
            config.schedule.opponent_pool is not None,
        )
    except ValueError as error:
        raise ConfigError(f"{where}: training.{error}") from None


def _check_branching(run: ResolvedRun) -> None:
    config, protocol, where = run.config, run.protocol, run.where
    branching = config.branching
    if branching.ablate is not None:
        check_ablate(run, branching.ablate)
    if branching.resample and branching.most < 2:
        raise ConfigError(
            f"{where}: branching.resample: one dialogue per question has no reward variance; set group above 1"
        )
    if config.ppo.ratio == "trajectory" and branching.how != "independent":
        raise ConfigError(
            f"{where}: ppo.ratio: a trajectory is what an agent says in one dialogue, but branching.how: {branching.how} makes "
            "dialogues that share utterances; set branching.how: independent, or ppo.ratio: sequence"
        )
    if branching.posterior == "beta":
        _check_unit_scores(config, where)
    check_branched_credit(branching, config.reward, protocol, where)


def _check_unit_scores(config: Config, where: str) -> None:
    """Check that no answer can score less than 0, or more than 1, where all sources are known to give from 0 to 1."""
    weights = config.reward.sources
    if not weights.keys() <= UNIT_SOURCES:
        return  # a search refuses such a score when it sees one
    scores = {"right": math.fsum(weights.values()), "wrong, in the expected form": weights.get("format", 0.0)}
    for what, score in scores.items():
        if exceeds(score, 1.0) or exceeds(0.0, score):
            raise ConfigError(
                f"{where}: branching.posterior: beta is for scores from 0 to 1, and an answer that is {what} would score {score:g} by "
                f"reward.sources {weights}; set branching.posterior: gaussian, or other weights"
            )


def _check_tools(run: ResolvedRun) -> None:
    """Check what tools and environments exclude, and that a protocol has the tools that it calls."""
    config, protocol, where = run.config, run.protocol, run.where
    for name in sorted(protocol.uses_tools - config.tools.keys()):
        raise ConfigError(
            f"{where}: protocol {config.protocol['name']!r} calls the tool {name!r}; add it: tools: {{{name}: {{use: {name}}}}}"
        )
    given = [name for name, agent in config.agents.items() if agent.tools] or list(config.environments)
    if not given:
        return
    how = config.branching.how
    if BRANCHINGS[how].judges:
        raise ConfigError(
            f"{where}: branching.how: {how} compares what agents say right after they said it, but {given[0]!r} makes turns that "
            "go on after calls of tools; use how: independent, or let the protocol call the tools"
        )
    for key, value in (("aggregation", config.ppo.aggregation), ("ratio", config.ppo.ratio)):
        if value == "sequence_sum" or (key == "ratio" and value.startswith("sequence")):
            instead = "token_mean or sequence_mean" if key == "aggregation" else "token or trajectory"
            raise ConfigError(
                f"{where}: ppo.{key}: {value} looks at each completion for itself, and a turn with calls of tools has several; set "
                f"ppo.{key}: {instead}"
            )
    if config.branching.joint == "cross":
        raise ConfigError(
            f"{where}: branching.joint: cross combines answers that were given in different worlds; use joint: aligned with "
            "tools and environments"
        )


def _check_advantage(run: ResolvedRun) -> None:
    config, protocol, where = run.config, run.protocol, run.where
    if config.advantage == AdvantageConfig():
        return
    from maporl.training.scaled_noise import check_scaled_noise  # needs torch
    from maporl.validation.advantage_checks import (
        check_advantage,
        needs_critic,
    )

    check_advantage(config.advantage, recorded_columns(config, protocol), where)
    check_rewards_apart(config.advantage, config.reward, config.ppo, where)
    check_scaled_noise(config.advantage, config.ppo, where)
    check_branched_advantage(config.branching, config.advantage, where)
    for name, agent in config.agents.items():
        critic = agent.critic or config.training.critic
        if needs_critic(config.advantage) and critic == "none" and agent.trainable and agent.weights:
            raise ConfigError(
                f"{where}: advantage: returns {config.advantage.returns} with baseline critic needs a critic, but agent {name!r} "
                "has none; set training.critic: head, or another advantage.baseline"
            )


def recorded_columns(config: Config, protocol: Protocol) -> list[str]:
    """Return the columns of a :class:`maporl.advantages.TurnBatch` that a run of this configuration records."""
    always = ["prompt", "rollout", "agent", "turn", "order", "parent", "action", "tokens", "seconds", "policy"]
    roles = ["role"] if protocol.roles or any(a.role for a in config.agents.values()) else []
    forks = ["state"] if config.branching.how != "independent" else []
    tasks = ["task"] if config.task.get("name") == "mixture" else []
    return list(dict.fromkeys([*always, *roles, *forks, *tasks, *sorted(protocol.records)]))


def _check_task(run: ResolvedRun) -> None:
    config, protocol, where = run.config, run.protocol, run.where
    name = config.task.get("name")
    task = build_task(config.task, "train", config.seed, where)
    if not task.has_questions and not protocol.own_questions:
        raise ConfigError(
            f"{where}: task {name!r} has no questions, and protocol {config.protocol['name']!r} brings none; use protocol: "
            f"{{name: game}}, or a task with questions: {', '.join(n for n, kind in TASKS.items() if kind.has_questions)}"
        )
    for stage in config.schedule.curriculum:
        build_task(
            config.task | stage.task, "train", config.seed, f"{where}: schedule.curriculum, update {stage.update}"
        )
    for agent, pupil in config.warm_start.agents.items():
        if agent not in config.agents:
            raise ConfigError(f"{where}: warm_start.agents: {unknown(agent, config.agents)}")
        if pupil.skill is not None and pupil.skill not in task.skills:
            known = unknown(pupil.skill, task.skills) if task.skills else f"task {name!r} has no skills; remove it"
            raise ConfigError(f"{where}: warm_start.agents.{agent}.skill: {known}")
    if config.training.eval_steps and not config.evaluation.questions:
        raise ConfigError(
            f"{where}: training.eval_steps={config.training.eval_steps} asks for evaluations but evaluation.questions is 0; "
            "set evaluation.questions above 0 or training.eval_steps to 0"
        )
