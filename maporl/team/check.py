"""Check the agents of a configuration before their models are loaded. Imports no torch."""

from collections.abc import Iterator

from maporl.config.agents import place_of, section_faults
from maporl.config.algorithm import OF_CENTRAL
from maporl.config.engines import ENGINES
from maporl.config.imports import unknown
from maporl.config.schema import AgentSection, Config
from maporl.decoding import Sampling, greedy_learners
from maporl.errors import Fault
from maporl.rewards.build import asks_untrained
from maporl.run import ResolvedRun


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what is wrong with agents, their critics, and the weights before training that somebody asks."""
    yield from section_faults(run.config)
    for name, agent in run.config.agents.items():
        if agent.weights and agent.trainable:
            yield from _critic(name, agent, run.config)
    yield from _untrained_weights(run.config)


def _critic(name: str, agent: AgentSection, config: Config) -> Iterator[Fault]:
    """Yield what an agent that is trained lacks for its kind of critic."""
    key, kind, freezes = place_of(name, "training.critic", config), *_critic_of(name, config)
    if kind == "central":
        yield from _central_critic(name, agent, key, config)
    if kind in ("head", "none") and freezes != "none":
        what = f"{freezes} is for critics with a trunk of their own; agents.{name} has {kind!r}"
        freeze = place_of(name, "training.critic_freeze", config)
        yield Fault(freeze, what, "use critic: model, adapter or central, or remove it")
    if kind != "adapter":
        return
    if agent.lora is None and agent.adapter is None:
        what = f"'adapter' needs a LoRA, and agents.{name} has none"
        yield Fault(key, what, "add lora: {} to it or use critic: head")
    if config.training.gradient_checkpointing:
        what = "'adapter' excludes training.gradient_checkpointing, which would compute by the wrong adapter"
        yield Fault(key, what, "use critic: head or set training.gradient_checkpointing: false")


def _critic_of(name: str, config: Config) -> tuple[str, str]:
    """Return the kind of critic that an agent's policy has, and what of it does not learn."""
    training = config.of(name).training
    return training.critic, training.critic_freeze


def _central_critic(name: str, agent: AgentSection, key: str, config: Config) -> Iterator[Fault]:
    """Yield why the shared critic cannot be a copy of each agent's model, or one device cannot hold everything."""
    if agent.load_in_4bit or agent.load_in_8bit:
        what = f"'central' trains a copy of agents.{name}'s model, which is quantized"
        yield Fault(key, what, "use critic: head")
    if config.training.placement == "split":
        yield Fault(key, "'central' excludes training.placement: split", "set training.placement: shared")
    for other, section in config.agents.items():
        if not (section.weights and section.trainable and _critic_of(other, config)[0] == "central"):
            continue
        for what in OF_CENTRAL:
            both = config.of(name), config.of(other)
            mine, theirs = ((vars(own.training) | vars(own.ppo))[what] for own in both)
            if mine != theirs:
                told = f"'central' is one critic, but {name!r} and {other!r} differ in {what}: {mine!r} and {theirs!r}"
                yield Fault(key, told, "give them the same, or use critic: head")
        for what in ("model", "tiny", "tokenizer"):
            if getattr(agent, what) != getattr(section, what):
                told = f"'central' is for agents that read the same tokens, but {name!r} and {other!r} differ in {what}"
                yield Fault(key, told, "give them the same, or use critic: head")


def _untrained_weights(config: Config) -> Iterator[Fault]:
    """Yield the option that asks the weights before training where no adapter and no reference keeps them."""
    asked = None if config.stages else asks_untrained(config.restate, config.reward.asked)  # a loop loads them
    key, _, value = (asked or "").partition(": ")
    for name, agent in config.agents.items() if asked else ():
        kept = agent.lora is not None or agent.adapter is not None or config.of(name).ppo.kl_coef != 0
        if agent.weights and agent.trainable and not kept:
            what = f"{value} asks the weights before training, and agents.{name} keeps none at ppo.kl_coef 0"
            yield Fault(key, what, "give it a lora, set ppo.kl_coef above 0, or remove that option")


def check_sampling(run: ResolvedRun) -> Iterator[Fault]:
    """Yield agents and roles that have a sampling and do not exist, and what their engines cannot do of it."""
    config, sampling = run.config, run.sampling
    for name in sampling.held_out:
        if name not in config.agents:
            yield Fault("evaluation.sampling", unknown(name, config.agents))
    roles = {agent.role for agent in config.agents.values()}
    for role in sampling.roles:
        if role not in roles and not run.protocol.roles:
            declared = sorted(role for role in roles if role is not None)
            what = f"nobody speaks in this role; agents have the roles {declared}"
            yield Fault(f"protocol.sampling.{role}", what, f"so set agents.NAME.role: {role}, or agents.NAME.sampling")
    for role, drawn in sampling.roles.items():
        for form in drawn.every("structured_output"):
            yield from form.faults(f"protocol.sampling.{role}.structured_output")
    for name in config.agents:
        for key, values in (
            (f"agents.{name}.sampling", sampling.agents.get(name)),
            (f"evaluation.sampling.{name}", sampling.held_out.get(name)),
        ):
            if values is not None:
                yield from _engine(name, values, config, key)
    yield from greedy_learners(sampling, run.learners, run.protocol.roles)


def _engine(name: str, sampling: Sampling, config: Config, key: str) -> Iterator[Fault]:
    """Yield what the engine of agent ``name`` cannot do of its sampling."""
    agent = config.agents[name]
    entry = ENGINES[agent.engine]
    if not entry.samples:
        yield Fault(key, f"engine {agent.engine!r} samples nothing", "remove it")
    if not entry.top_k and any(sampling.every("top_k")):
        yield Fault(f"{key}.top_k", f"the interface of engine {agent.engine!r} has no top_k", "use top_p")
    for form in sampling.every("structured_output"):
        yield from form.faults(f"{key}.structured_output")
        if agent.api is not None and form.json_schema is None:
            yield Fault(f"{key}.structured_output", "an API is asked for JSON schemas alone", "give json_schema")
    for option in ("temperature", "max_tokens"):
        if agent.api is not None and getattr(agent.api, option) is not None and sampling.every(option):
            what = f"agents.{name}.api.{option} is set too, and it would win"
            yield Fault(f"{key}.{option}", what, "remove one of them")
