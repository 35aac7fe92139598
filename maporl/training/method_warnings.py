"""Choices of a method that work but hardly ever are what was meant, and sampling that is not what is trained."""

from collections.abc import Iterator

from maporl.advantages.baselines import baseline_of
from maporl.advantages.scales import scale_of
from maporl.config.engines import ENGINES
from maporl.errors import Fault
from maporl.run import ResolvedRun
from trl_ext.ppo.options import Decoding

LARGE_RATE = 0.1
"""A learning rate above it is a slip: no language model learns with it."""


def narrow_sampling(run: ResolvedRun) -> list[str]:
    """Return a line if training samples from less than the whole distribution, which is the one that is trained."""
    config, ppo = run.config, run.config.ppo
    lines = [line for agent in run.learners if (line := _narrow_agent(run, agent))]
    if ppo.decoding == Decoding(ppo.temperature):
        return lines
    line = (
        f"sampling: ppo.top_p={ppo.top_p:g} and ppo.top_k={ppo.top_k} narrow what answers are sampled from. PPO trains "
        f"the whole distribution at temperature {ppo.temperature:g}: old, new and reference log-probabilities are all "
        "taken there, so ratios begin at 1"
    )
    if not ppo.knows_sampler:
        line += "; ppo.engine_tis_cap would weigh each token by its whole probability over that of sampling it"
    without = [name for name, agent in config.agents.items() if not ENGINES[agent.engine].top_k]
    uncut = f"; agents {', '.join(without)}: their engines have no top_k" if ppo.top_k and without else ""
    return [line + uncut, *lines]


def _narrow_agent(run: ResolvedRun, agent: str) -> str:
    """Return a line if the own sampling of ``agent``, or that of its role, is narrower than what is trained, or ""."""
    config, sampling = run.config, run.sampling
    places = {f"agents.{agent}.sampling": sampling.agents.get(agent)}
    role = config.agents[agent].role
    if role is not None:
        places[f"protocol.sampling.{role}"] = sampling.roles.get(role)
    narrow = [
        f"{place}.{key}={value:g}"
        for place, place_sampling in places.items()
        for key, full in (("top_p", 1), ("top_k", 0))
        for value in (place_sampling.every(key) if place_sampling is not None else [])
        if value != full
    ]
    if not narrow:
        return ""
    line = (
        f"sampling: {', '.join(dict.fromkeys(narrow))}: agent {agent} samples from a narrower distribution than the "
        "one that is trained"
    )
    ppo = config.ppo
    corrects = "ratio_to: sampler" if ppo.ratio_to == "sampler" else f"engine_tis_cap={ppo.engine_tis_cap}"
    return (
        f"{line}; ppo.{corrects} corrects for it"
        if ppo.knows_sampler
        else f"{line}; ppo.engine_tis_cap would correct for it"
    )


def method_warnings(run: ResolvedRun) -> Iterator[Fault]:
    """Yield a warning for each choice that works but hardly ever is what was meant."""
    config, advantage, ppo = run.config, run.config.advantage, run.config.ppo
    baseline = baseline_of(advantage)
    if baseline.scales_mean and scale_of(advantage).over != "nothing":
        yield Fault(
            "advantage",
            f"baseline {advantage.baseline} with scale {advantage.scale} is baseline mean, times n / (n - 1) for "
            "groups of n rows",
            "set advantage.scale: none (RLOO), or advantage.baseline: mean (GRPO)",
            "warning",
        )
    if ppo.ratio != "token" and ppo.aggregation == "token_mean":
        yield Fault(
            "ppo",
            f"ratio {ppo.ratio} with aggregation token_mean weighs an answer by its length, although all its tokens "
            "have one ratio",
            "set ppo.aggregation: sequence_mean",
            "warning",
        )
    if config.training.learning_rate > LARGE_RATE:
        yield Fault(
            "training.learning_rate",
            f"AdamW moves each weight by up to {config.training.learning_rate:g} in one step",
            "1e-6 to 1e-3 is usual",
            "warning",
        )
    if config.reward.sources.get("label", 1.0) < 0:
        what = f"label has the weight {config.reward.sources['label']:g}, so right answers cost"
        yield Fault("reward.sources", what, severity="warning")
    if config.reward.sources.get("majority", 0.0) > 0 and "label" not in config.reward.sources:
        yield Fault(
            "reward.sources",
            "majority pays agreement, right or wrong, so that a team which gives one answer to every question earns "
            "all of it",
            "watch the accuracy on held-out questions that have labels, and the entropy, and stop when the accuracy "
            "falls",
            "warning",
        )
    if config.training.critic_context == "joint" and baseline.needs_critic and not run.protocol.hears_others:
        yield Fault(
            "training.critic_context",
            "joint lets the critic read what all agents said before, but in this protocol all agents speak once, at "
            "the same time",
            "set protocol.turns to 2 or more, or critic_context: answer",
            "warning",
        )
