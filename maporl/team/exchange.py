"""Which agents learn, and which speak with each other's weights: the checks of the schedule. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence

from maporl.config import Config
from maporl.config.agents import place_of
from maporl.config.algorithm import Algorithm
from maporl.config.imports import unknown
from maporl.errors import Fault, refused
from maporl.protocols import growth
from maporl.run import ResolvedRun
from maporl.schedules import Schedule


def somebody_learns(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why nothing would be trained."""
    config = run.config
    learning = {name for name, agent in config.agents.items() if agent.trainable and agent.weights}
    if not learning:
        yield Fault("agents", "none is trainable, so nothing would be trained", "set trainable: true for one")
    if learning.isdisjoint(run.speakers) and not config.stages:  # a loop may teach one that does not play
        what = f"of {list(run.speakers)} none is trainable, so nothing would be trained"
        yield Fault("protocol.agents", what, f"add one of {sorted(learning)} or set trainable: true for one that plays")


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield why the schedule trains what cannot be, when it cannot be."""
    config, protocol = run.config, run.protocol
    yield from refused(lambda: config.schedule.resolved(protocol.turns, run.agents))
    yield from growth.faults(protocol, config.schedule.growth, run.speakers)
    yield from _shared_weights(config)
    yield from swapped(config.schedule, {name: agent.learns_by for name, agent in config.agents.items()})
    yield from _turns_to_learn(run)


def _shared_weights(config: Config) -> Iterator[Fault]:
    """Yield what differs between the models of agents that are to speak with the same weights."""
    swap, pool = config.schedule.swap, config.schedule.opponent_pool
    groups = {
        "schedule.swap": swap.agents if swap else [],
        "schedule.opponent_pool": [pool.of, pool.agent] if pool else [],
    }
    same = ("engine", "model", "tiny", "tokenizer", "chat_template", "template_options", "lora", "policy_per")
    for key, names in groups.items():
        for name in names[1:]:
            for what in same:
                mine, first = getattr(config.agents[name], what), getattr(config.agents[names[0]], what)
                if mine != first:
                    other = f"differ in {what}: {first!r:.60} and {mine!r:.60}"
                    told = f"{names[0]!r} and {name!r} must speak with the same weights but {other}"
                    yield Fault(key, told, "give them the same, or leave one of them out")


def swapped(schedule: Schedule, learns: Mapping[str, Algorithm]) -> Iterator[Fault]:
    """Yield agents that exchange their weights and learn in different ways, by the algorithm of each agent."""
    names = [] if schedule.swap is None else schedule.swap.agents
    if len({str((own.advantage, own.ppo, own.critic)) for own in map(learns.__getitem__, names)}) > 1:
        what = f"{' and '.join(names)} exchange their weights and learn by different algorithms"
        yield Fault("schedule.swap", what, "give them one algorithm, or leave schedule.swap out")


def _turns_to_learn(run: ResolvedRun) -> Iterator[Fault]:
    """Yield agents and critics that could not learn when the schedule says that they do."""
    config, schedule = run.config, run.config.schedule
    for name in [] if schedule.round_robin is None else schedule.round_robin.agents or run.speakers:
        agent = config.agents[name]
        if not agent.trainable or not agent.weights:
            what = f"agent {name!r} should be trained in its turn, but it is frozen, or its engine has no weights"
            yield Fault("schedule.round_robin", what, "list the trainable agents in schedule.round_robin.agents")
    algorithms = {name: config.of(name) for name in run.learners}
    lacking = {n for n, c in algorithms.items() if c.advantage.baseline != "critic" or c.training.critic == "none"}
    asked: dict[str, list[str]] = {}
    for name in algorithms:
        asked.setdefault(place_of(name, "schedule.critic_warmup", config), []).append(name)
    for key, whose in asked.items():
        warmup = algorithms[whose[0]].schedule.critic_warmup
        if warmup and lacking.issuperset(whose):
            remedy = "set training.critic: head and advantage.baseline: critic, or critic_warmup: 0"
            yield Fault(key, "a critic is missing", remedy)
        if 0 < config.updates <= warmup:
            what = f"only the critics would learn in all {config.updates} updates"
            yield Fault(key, what, "choose a smaller number, or more updates")


def exchanged(run: ResolvedRun, names: Sequence[str], key: str = "--swap") -> Iterator[Fault]:
    """Yield why the agents ``names`` cannot speak with each other's weights in an evaluation.

    An agent does not play, has no weights here, or stands twice; there are fewer than two; two of them have the same
    weights already; or their engines differ.
    """
    agents, owners = run.config.agents, dict[str, str]()
    for name in names:
        if name not in run.speakers:
            yield Fault(key, unknown(name, run.speakers))
            return
        agent = agents[name]
        if not agent.weights or agent.engine != agents[names[0]].engine:
            what = (
                f"expected agents whose weights one engine samples from, but {names[0]!r} has the engine "
                f"{agents[names[0]].engine!r} and {name!r} has {agent.engine!r}"
            )
            yield Fault(key, what, "leave one of them out")
        first = owners.setdefault(agent.policy or name, name)
        if first != name:
            yield Fault(key, f"{first!r} and {name!r} share one policy, so nothing would change")
    if len(owners) < max(2, len(names)):
        yield Fault(key, f"expected two different agents or more of {list(run.speakers)}, got {list(names)}")
