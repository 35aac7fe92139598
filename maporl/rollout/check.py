"""Check how the dialogues of a run are played: branching, ablation and tools. Imports no torch."""

import math
from collections.abc import Iterator

from maporl.config.schema import AblateSection
from maporl.errors import Fault
from maporl.rewards.build import UNIT_SOURCES
from maporl.rewards.check import contributions
from maporl.rewards.rules import build_rules
from maporl.rollout.ablation import can_decline
from maporl.rollout.branching import BRANCHINGS
from maporl.rounding import exceeds
from maporl.run import ResolvedRun, each_algorithm


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what branching, ablation and tools exclude, and what the protocol needs of them."""
    branching = run.config.branching
    if branching.ablate is not None:
        yield from _ablation(run, branching.ablate)
    if not run.protocol.replayable and (branching.how != "independent" or branching.ablate is not None):
        option = "how" if branching.how != "independent" else "ablate"
        what = f"it forks dialogues, and protocol {run.protocol.label!r} may ask something else when it is played again"
        instead = "set how: independent" if option == "how" else "remove ablate"
        yield Fault(f"branching.{option}", what, f"{instead}, or set protocol.replays: true if it asks the same again")
    if branching.resample and branching.most < 2:
        what = "one dialogue per question has no reward variance"
        yield Fault("branching.resample", what, "set group above 1")
    yield from each_algorithm(_losses, run)
    if branching.posterior == "beta":
        yield from _unit_scores(run)
    yield from _tools(run)


def _losses(run: ResolvedRun) -> Iterator[Fault]:
    """Yield losses that look at trajectories or completions for themselves, where dialogues share or cut these."""
    config = run.config
    how, ppo = config.branching.how, config.ppo
    if ppo.ratio == "trajectory" and how != "independent":
        what = f"a trajectory is an agent's words in one dialogue, but branching.how: {how} makes dialogues share them"
        yield Fault("ppo.ratio", what, "set branching.how: independent, or ppo.ratio: sequence")
    calls = config.environments or any(agent.tools for agent in config.agents.values())
    for key, value in (("aggregation", ppo.aggregation), ("ratio", ppo.ratio)) if calls else ():
        if value == "sequence_sum" or (key == "ratio" and value.startswith("sequence")):
            instead = "token_mean or sequence_mean" if key == "aggregation" else "token or trajectory"
            what = f"{value} looks at each completion for itself, and a turn with calls of tools has several"
            yield Fault(f"ppo.{key}", what, f"set ppo.{key}: {instead}")


def _ablation(run: ResolvedRun, ablate: AblateSection) -> Iterator[Fault]:
    """Yield why agents cannot be left out, or nothing reads what they contributed."""
    key, config = "branching.ablate", run.config
    for agent in ablate.who:
        if agent not in run.speakers:
            yield Fault(f"{key}: who", f"{agent!r} does not play", f"name some of {list(run.speakers)}")
    if ablate.placeholder is None and not can_decline(run.protocol):
        what = f"in {run.protocol.label!r} no agent declines, so something must stand in place of what is left out"
        yield Fault(key, what, "set placeholder, such as (nothing)")
    if config.environments:
        name = next(iter(config.environments))
        what = f"a dialogue cannot be played again in environments ({name!r}), whose steps were taken"
        yield Fault(key, what, "remove ablate, or the environments")
    if BRANCHINGS[config.branching.how].final:
        what = f"{config.branching.how} credits words when they are said; a contribution is known at the end"
        yield Fault(key, what, "use how: independent, fork_first or fork_every")
    read = {name for rule in build_rules(config.reward.rules) for name in rule.reads}
    if not read & contributions(ablate):
        what = "no rule reads what the agents contributed, so the dialogues would be played for nothing"
        remedy = "add {mix: {weights: {marginal: 0.5}}} or counterfactual to reward.rules, or remove ablate"
        yield Fault(key, what, remedy)


def _unit_scores(run: ResolvedRun) -> Iterator[Fault]:
    """Yield an answer that can score below 0, or above 1, where all sources are known to give from 0 to 1."""
    weights = run.config.reward.sources
    if not weights.keys() <= UNIT_SOURCES:
        return  # a search refuses such a score when it sees one
    scores = {"right": math.fsum(weights.values()), "wrong, in the expected form": weights.get("format", 0.0)}
    for what, score in scores.items():
        if exceeds(score, 1.0) or exceeds(0.0, score):
            said = f"beta is for scores from 0 to 1, and an answer that is {what} scores {score:g} by {weights}"
            yield Fault("branching.posterior", said, "set branching.posterior: gaussian, or other weights")


def _tools(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what turns with calls exclude, and the tools that the protocol calls and nobody has."""
    config = run.config
    for name in sorted(run.protocol.uses_tools - config.tools.keys()):
        label = config.protocol["name"]
        yield Fault("protocol", f"{label!r} calls the tool {name!r}", f"add it: tools: {{{name}: {{use: {name}}}}}")
    callers = [name for name, agent in config.agents.items() if agent.tools] or list(config.environments)
    if not callers:
        return
    how = config.branching.how
    if BRANCHINGS[how].judges:
        what = f"{how} compares what agents say at once, and turns of {callers[0]!r} go on after calls of tools"
        yield Fault("branching.how", what, "use how: independent, or let the protocol call the tools")
    if config.branching.joint == "cross":
        what = "cross combines answers that were given in different worlds"
        yield Fault("branching.joint", what, "use joint: aligned with tools and environments")
