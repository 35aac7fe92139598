"""Play a few questions with made-up words, to find what the text of a configuration does not show.

A rehearsal plays the configuration's protocol and branching and loads no model. It finds groups of one row, which would
stop a run at its first update, and prompts that never show an agent what others said.
"""

import difflib
import random
from collections import Counter
from collections.abc import Callable, Mapping

from maporl.advantages.baselines import baseline_of
from maporl.advantages.estimator import GroupOfOne, estimate_all
from maporl.advantages.returns import return_of
from maporl.advantages.transforms import build_transforms
from maporl.config.parse import entry_name
from maporl.config.schema import Config
from maporl.engines.base import Engine, Reply, Request
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.protocols.propose import in_place_of_question
from maporl.rewards.build import scores_others
from maporl.rewards.counterfactual import set_contributions
from maporl.rewards.credit import assign_credit
from maporl.rewards.rules import build_rules
from maporl.rollout.branching import BRANCHINGS, play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.run import ResolvedRun
from maporl.schedules import Plan
from maporl.training.samples import samples_by_policy, turn_batch, untrained_columns
from maporl.types import Dialogue, Grade, Stop
from maporl.validation.first_steps import MOST_STEPS, first_steps
from trl_ext.ppo.options import GREEDY, Decoding
from trl_ext.process import distributed

MOST = 256
"""The dialogues of a rehearsal. More of them show nothing new, and a check takes seconds."""
FEW = 8
"""The dialogues of a rehearsal in environments, of which each may be a session on a server."""
UPDATES = 1_000
"""The updates whose plans are looked at."""
Script = Callable[[Request], str]


DECIDE = frozenset({"router"})
"""Roles whose words only decide who speaks next, so that nobody need be shown them."""


def check_groups(run: ResolvedRun, world: World | None = None) -> list[str]:
    """Check that every row of an update has others to be compared with. Return a warning if that depends on the words.

    The protocol is played twice: once with empty answers, and once with right answers and legal moves.

    Raises:
        ConfigError: both times, a group has a single member.
    """
    if return_of(run.config.advantage).per_token or run.config.advantage.singleton == "zero":
        return []
    empty, right = (_group_of_one(run, script, world or World()) for script in (_nothing, _right))
    if empty is not None and right is not None:
        raise ConfigError(str(empty))
    plays = {"with empty or illegal answers": empty, "with right answers": right}
    return [f"warning: {error} This happens to dialogues {how}." for how, error in plays.items() if error is not None]


def check_questions(run: ResolvedRun) -> list[str]:
    """Return a warning if nobody is asked the questions of the task, because the protocol brings its own."""
    if not (run.protocol.own_questions and run.task.has_questions):
        return []
    return [
        f"warning: task: protocol {run.protocol.label} brings its own questions, so nobody is asked those of task "
        f"{run.config.task['name']}; set task: {{name: episodes}}"
    ]


def check_roles(run: ResolvedRun, world: World | None = None) -> list[str]:
    """Return a warning for each role that a reward rule names, where nobody had it in a rehearsal and somebody had one of nearly its name.

    A role of another name may come up in other dialogues, such as that of a searcher whom nobody asked. Three dialogues are played: with empty answers, with right ones, and with what a warm start teaches.
    """
    rules = [
        (entry_name(entry), rule)
        for entry, rule in zip(run.config.reward.rules, build_rules(run.config.reward.rules), strict=True)
    ]
    named = [(name, role) for name, rule in rules for role in getattr(rule, "roles", ())]
    if not named:
        return []
    had = {agent.role for agent in run.config.agents.values()} - {None}
    for script in (_nothing, _right, _marked()):
        (dialogue,), _ = first_steps(_driver(run, _Players(script), world or World()), [run.task[0]])
        had |= {u.role for u in dialogue.utterances} - {None}
    roles = sorted(str(role) for role in had)
    return [
        f"warning: reward.rules: {name} pays the role {role!r}, which nobody had in three rehearsals; did you mean {near[0]!r}? The roles there "
        f"were {roles}"
        for name, role in dict.fromkeys(named)
        if role not in had and (near := difflib.get_close_matches(role, roles, 1, 0.8))
    ]


def check_documents(run: ResolvedRun, world: World | None = None) -> list[str]:
    """Return a warning if the task gives documents to write questions on, and the protocol shows them to nobody, or has them answered."""
    example = run.task[0]
    if not in_place_of_question(example):
        return []
    players = _Players(_marked())
    first_steps(_driver(run, players, world or World()), [example])
    name = run.config.protocol["name"]
    use = "use protocol: {name: propose, vouch: stated}, or name a task with questions"
    shown = [r for r in players.requests if any(example.question in m["content"] for m in r.ask.messages)]
    if not shown:
        return [f"warning: task: it gives documents, and protocol {name!r} shows them to nobody; {use}"]
    if any(r.ask.answers and r.ask.example is None for r in shown):
        return [
            f"warning: task: it gives documents, and protocol {name!r} asks for answers to them as if they were questions, which have no "
            f"right answer; {use}"
        ]
    return []


def check_hearing(run: ResolvedRun, world: World | None = None) -> list[str]:
    """Return a warning for agents that speak after others and are never shown what those said.

    A protocol that runs tools itself shows what the tools made of the words, and is not looked at. An agent whose words decide
    who speaks next says one after the other of what it would be taught.
    """
    if run.protocol.uses_tools:
        return []
    players = _Players(_marked())
    first_steps(_driver(run, players, world or World()), [run.task[0]])
    shown: dict[str, bool] = {}
    for request in players.requests:
        heard = [u for u in request.heard if u.agent != request.ask.agent and u.role not in DECIDE]
        marks = [(_mark(u.agent, u.id), u) for u in heard]
        others = [mark for mark, u in marks if mark in u.text]
        text = "".join(message["content"] for message in request.ask.messages)
        if others:
            shown[request.ask.agent] = shown.get(request.ask.agent, False) or any(mark in text for mark in others)
    deaf = [agent for agent, heard in shown.items() if not heard]
    if not deaf:
        return []
    return [
        f"warning: protocol: the prompts of {', '.join(deaf)} show nothing of what other agents said, so each of them only goes "
        "over its own answers; if that is not meant, put the placeholder for it into the texts of the protocol, as {others} "
        "in 'later' and {text} in 'quote'"
    ]


def check_any_agent(run: ResolvedRun, world: World | None = None) -> None:
    """Check that a protocol which lets any agent speak (``any_agent``) can be searched: another agent says what it asks each one for.

    Raises:
        ConfigError: it asks several agents at once, one in its conversation, or one that does not play, or fails.
    """
    if run.config.branching.how != "tree_search" or not run.protocol.any_agent:
        return
    for script in (_nothing, _right):
        driver = _driver(run, _Players(script), world or World())
        agents = list(driver.specs)
        (episode,) = driver.opened([run.task[0]])
        while not episode.over and len(episode.sent) < MOST_STEPS:
            other = next((agent for agent in agents if agent != episode.asks[0].agent), agents[0])
            driver.address(episode, other)
            driver.step([episode])
        driver.release()


class _Players(Engine):
    """An engine that says what a script says, and records what it was asked."""

    def __init__(self, script: Script):
        self.script = script
        self.requests: list[Request] = []

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply of one token for each request."""
        self.requests += requests
        return [Reply(self.script(r), prompt_ids=[0], response_ids=[0], stop=Stop.EOS) for r in requests]


def _nothing(request: Request) -> str:
    return ""


def _right(request: Request) -> str:
    """Return a legal move of a game, or the right answer."""
    moves = request.ask.tags.get("moves")
    return random.Random(request.label).choice(moves) if moves else request.example.answer


def _marked() -> Script:
    """Return a script that marks who says what. A word that only decides who speaks next, as it would be taught, has no mark."""
    asked: Counter[str] = Counter()

    def script(request: Request) -> str:
        mark = _mark(request.ask.agent, request.utterance)
        if not request.ask.taught or not request.example.question:  # a move in a game
            return mark
        said = request.ask.taught[asked[request.ask.agent] % len(request.ask.taught)]
        asked[request.ask.agent] += 1
        before, question, after = said.rpartition(request.example.question)
        return f"{before}{question}{mark}{after}" if question else said

    return script


def _mark(agent: str, utterance: int) -> str:
    return f"<{agent} says {utterance}>"


def _driver(run: ResolvedRun, players: Engine, world: World) -> RolloutDriver:
    agents = run.config.agents
    learning = frozenset(name for name, agent in agents.items() if agent.weights and agent.trainable)
    specs = {
        name: SpeakerSpec("players", (name,), learning, agents[name].system, agents[name].role) for name in run.speakers
    }
    engines, common_seed = {"players": players}, run.config.branching.common_seed
    return RolloutDriver(run.task, run.protocol.at_update(1), specs, engines, GREEDY, None, common_seed, world=world)


def _group_of_one(run: ResolvedRun, script: Script, world: World) -> GroupOfOne | None:
    """Return the error of a group with a single member in some update, or None."""
    config, task = run.config, run.task
    driver = _driver(run, _Players(script), world)
    (first,), ended = first_steps(driver, [task[0]])
    if not ended:
        return None  # it is not known what else would be said
    orders = [u.order for u in first.utterances]
    each = BRANCHINGS[config.branching.how].dialogues(
        config.branching, [orders.count(o) for o in dict.fromkeys(orders)]
    )
    questions = config.questions_per_update() * distributed.size()
    played = min(questions, (FEW if world.environments else MOST) // each)
    if played == 0 or (played < questions and "prompt" not in config.advantage.key):
        return None  # groups are larger than what could be played here
    examples = [task[number % len(task)] for number in range(played)]
    dialogues = play_branched(driver, examples, config.branching, lambda some: [0.0] * len(some))
    everything = [*dialogues, *(ablation for dialogue in dialogues for ablation in dialogue.ablations)]
    for utterance in (u for d in everything for u in d.utterances):
        if utterance.answers:
            utterance.grade = utterance.grade or Grade(utterance.text, None, "a rehearsal")
        scored = utterance.rewards.keys() & config.reward.sources.keys() or scores_others(config.reward, utterance)
        if utterance.answers or scored:
            utterance.rewards["score"] = 0.0
    set_contributions(dialogues)
    assign_credit(dialogues, tuple(driver.specs), config.reward)
    schedule = config.schedule.resolved(driver.protocol.turns, tuple(config.agents))
    plans = {str(plan): plan for plan in map(schedule.plan, range(1, min(config.updates, UPDATES) + 1))}
    try:
        for plan in plans.values():
            _compare(config, dialogues, plan, driver.specs)
    except GroupOfOne as error:
        return error
    return None


def _compare(config: Config, dialogues: list[Dialogue], plan: Plan, specs: Mapping[str, SpeakerSpec]) -> None:
    """Compute advantages as an update does, with rewards of 0.

    Raises:
        GroupOfOne: a group has a single member.
    """
    learning = {policy: None for spec in specs.values() for policy in spec.policies if policy in spec.learning}
    samples = samples_by_policy(dialogues, learning, plan, 1)  # type: ignore[arg-type]  # the critic reads no prompt here
    columns = [sample.columns for some in samples.values() for sample in some]
    if not columns:
        return
    if any(transform.needs_untrained_rows for transform in build_transforms(config.advantage)):
        columns += untrained_columns(dialogues, {entry.name for entry in columns})
    zeros = [0.0] * len(columns)
    value = zeros if baseline_of(config.advantage).needs_critic else None
    estimate_all(turn_batch(columns, zeros, value), config.advantage, scaled=False)
