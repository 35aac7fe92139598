"""Checks of dialogues that are played again without an agent (``branching.ablate``)."""

from maporl.config.schema import AblateSection
from maporl.errors import ConfigError
from maporl.rewards.rules import build_rules
from maporl.rollout.ablation import can_decline
from maporl.rollout.branching import BRANCHINGS
from maporl.run import ResolvedRun


def contributions(ablate: AblateSection | None) -> set[str]:
    """Return the names of the rewards that say what an agent contributed."""
    if ablate is None:
        return set()
    return {"marginal", "shapley"} if ablate.how == "coalitions" else {"marginal"}


def check_ablate(run: ResolvedRun, ablate: AblateSection) -> None:
    """Check that agents can be left out, and that a rule reads what they contributed.

    Raises:
        ConfigError: they cannot, or no rule does.
    """
    config, protocol, playing = run.config, run.protocol, run.speakers
    where = f"{run.where}: branching.ablate"
    for agent in ablate.who:
        if agent not in playing:
            raise ConfigError(f"{where}: who: {agent!r} does not play; name some of {list(playing)}")
    if ablate.placeholder is None and not can_decline(protocol):
        raise ConfigError(
            f"{where}: protocol {protocol.label!r} has no agents that decline, so something must stand in the place of what "
            "is left out; set placeholder, such as (nothing)"
        )
    if config.environments:
        raise ConfigError(
            f"{where}: a dialogue cannot be played again in environments ({next(iter(config.environments))!r}), whose steps were "
            "taken; remove ablate, or the environments"
        )
    if BRANCHINGS[config.branching.how].final:
        raise ConfigError(
            f"{where}: {config.branching.how} credits utterances when they are said, but a contribution is known at the end of a "
            "dialogue; use how: independent, fork_first or fork_every"
        )
    read = {name for rule in build_rules(config.reward.rules) for name in rule.reads}
    if not read & contributions(ablate):
        raise ConfigError(
            f"{where}: no rule reads what the agents contributed, so the dialogues would be played for nothing; add "
            "{mix: {weights: {marginal: 0.5}}} or counterfactual to reward.rules, or remove ablate"
        )
