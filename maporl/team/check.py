"""Check the agents of a configuration before their models are loaded. Imports no torch."""

from collections.abc import Iterator

from maporl.config.agents import section_faults
from maporl.config.schema import AgentSection, Config
from maporl.errors import Fault
from maporl.rewards.likelihood import asks_untrained
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
    key = f"agents.{name}.critic" if agent.critic is not None else "training.critic"
    kind = config.critic_of(agent)
    if kind == "central":
        yield from _central_critic(name, agent, key, config)
    if kind != "adapter":
        return
    if agent.lora is None and agent.adapter is None:
        what = f"'adapter' needs a LoRA, and agents.{name} has none"
        yield Fault(key, what, "add lora: {} to it or use critic: head")
    if config.training.gradient_checkpointing:
        yield Fault(
            key,
            "'adapter' excludes training.gradient_checkpointing, which would recompute activations under the wrong "
            "adapter",
            "use critic: head or set training.gradient_checkpointing: false",
        )


def _central_critic(name: str, agent: AgentSection, key: str, config: Config) -> Iterator[Fault]:
    """Yield why the shared critic cannot be a copy of each agent's model, or one device cannot hold everything."""
    if agent.load_in_4bit or agent.load_in_8bit:
        what = f"'central' trains a copy of agents.{name}'s model, which is quantized"
        yield Fault(key, what, "use critic: head")
    if config.training.placement == "split":
        yield Fault(key, "'central' excludes training.placement: split", "set training.placement: shared")
    for other, section in config.agents.items():
        if not (section.weights and section.trainable and config.critic_of(section) == "central"):
            continue
        for what in ("model", "tiny", "tokenizer"):
            if getattr(agent, what) != getattr(section, what):
                yield Fault(
                    key,
                    f"'central' is one critic for agents that read the same tokens, but {name!r} and {other!r} differ "
                    f"in {what}",
                    "give them the same, or use critic: head",
                )


def _untrained_weights(config: Config) -> Iterator[Fault]:
    """Yield the option that asks the weights before training where no adapter and no reference keeps them."""
    asked = None if config.loop.stages else asks_untrained(config.restate, config.reward.sources)  # a loop loads them
    if not asked or config.ppo.kl_coef != 0:
        return
    key, _, value = asked.partition(": ")
    for name, agent in config.agents.items():
        if agent.weights and agent.trainable and agent.lora is None and agent.adapter is None:
            yield Fault(
                key,
                f"{value} asks the weights before training, but agents.{name} trains all its weights and keeps no "
                "reference at ppo.kl_coef 0",
                "give it a lora, set ppo.kl_coef above 0, or remove that option",
            )
