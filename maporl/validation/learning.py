"""Warn of what a schedule never reaches in the updates of a run. No torch."""

from collections.abc import Iterator

from maporl.errors import Fault
from maporl.run import ResolvedRun
from maporl.schedules import Plan
from maporl.training.learns_from import MOST_UPDATES


def schedule_warnings(run: ResolvedRun) -> list[str]:
    """Return a warning for each learner that no update trains, and for what begins after the last update."""
    config = run.config
    if config.loop.stages or not run.learners:
        return []  # the line of a loop says what its stages train
    schedule = config.schedule.resolved(run.protocol.turns, run.agents)
    plans = list(map(schedule.plan, range(1, min(config.updates, MOST_UPDATES) + 1)))
    return [f"warning: {fault}" for fault in (*_never(run, plans), *_unreached(run))]


def _never(run: ResolvedRun, plans: list[Plan]) -> Iterator[Fault]:
    """Yield the learners that no update trains."""
    if len(plans) < run.config.updates:
        return  # not all of them were looked at
    frozen = [freeze.agent for freeze in run.config.schedule.freeze if freeze.first == 1 and freeze.last is None]
    for name in (name for name in run.learners if name not in frozen):
        if not any(plan.learns(name, turn) for plan in plans for turn in range(run.protocol.turns)):
            yield Fault(
                "schedule",
                f"{name} learns in none of the {len(plans)} updates",
                "give the run more updates, or change the schedule",
                "warning",
            )


def _unreached(run: ResolvedRun) -> Iterator[Fault]:
    """Yield what begins after the last update."""
    config, updates = run.config, run.config.updates
    begins = {"schedule.curriculum": [stage.update for stage in config.schedule.curriculum]}
    growth = config.schedule.growth
    if growth is not None:
        begins["schedule.growth"] = [1 + growth.every * number for number in range(1, growth.stages)]
    for key, firsts in begins.items():
        if late := [first for first in firsts if first > updates]:
            what = f"its stage from update {late[0]} on is never reached in {updates} updates"
            yield Fault(key, what, "give the run more updates, or begin it earlier", "warning")
    warmup = config.training.warmup_steps
    if warmup >= updates > 0:
        yield Fault(
            "training.warmup_steps",
            f"the learning rate rises for {warmup:g} updates, and the run has {updates}, so it is never reached",
            "choose fewer, or more updates",
            "warning",
        )
    options = config.training.lr_scheduler_kwargs or {}
    falls = options.get("num_decay_steps", 0)
    if falls > updates > 0 and "num_stable_steps" not in options:
        yield Fault(
            "training.lr_scheduler_kwargs.num_decay_steps",
            f"the learning rate falls for {falls} updates, and the run has {updates}, so that it begins lower than "
            "training.learning_rate",
            "choose fewer, or more updates",
            "warning",
        )
