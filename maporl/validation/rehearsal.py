"""Dry runs of a few questions with mock completions, to find what the text of a configuration does not show. No model.

The first question is played three times: with empty completions, with right answers and legal moves, and with
completions that name their agent. These plays show whether prompts contain the completions of other agents, and whether
an agent has the roles that rules name. More questions are played with empty completions to measure the prompts
(:class:`Measured`), and to find singleton groups (:mod:`maporl.training.lonely`), which would stop a run at its first
update.
"""

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from maporl.config.parse import entry_name
from maporl.config.schema import AgentSection, Config
from maporl.engines.base import Request
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import Fault
from maporl.protocols.base import Protocol
from maporl.rewards.rules import build_rules
from maporl.rollout import made_up
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.rollout.made_up import Players, Script, first_steps, rightness, silence
from maporl.run import ResolvedRun
from maporl.tasks.base import Task, in_place_of_question
from maporl.team.loading import context_length
from maporl.training.lonely import Grouping
from maporl.types import Dialogue
from trl_ext.chat.encoding import Tokenizer
from trl_ext.process import distributed

UPDATES = 1_000
"""The updates whose plans are looked at."""
LABELS = 1_000
"""The right answers of a split that are looked at, the first ones."""
DECIDE = frozenset({"router"})
"""Roles whose words only decide who speaks next, so that nobody need be shown them."""


@dataclass(frozen=True)
class Play:
    """A dialogue that was played, what was asked in it, and whether it ended within the steps of a dry run."""

    dialogue: Dialogue
    requests: list[Request]
    ended: bool


class Rehearsal:
    """Dry runs of a run's first question with mock completions. Each is played when it is first needed.

    Args:
        run: the run.
        world: its tools and environments, or None for a run without any.
        protocol: what is played in place of the run's protocol.
    """

    def __init__(self, run: ResolvedRun, world: World | None = None, protocol: Protocol | None = None):
        self.run, self.world, self.protocol = run, world or World(), protocol or run.protocol

    @cached_property
    def silent(self) -> Play:
        """All answers are empty."""
        return self._play(silence)

    @cached_property
    def right(self) -> Play:
        """All answers are right, and all moves are legal."""
        return self._play(rightness)

    @cached_property
    def marked(self) -> Play:
        """Every answer says who gives it. A word that only decides who speaks next is what a warm start would teach."""
        return self._play(_marks())

    @property
    def plays(self) -> tuple[Play, Play, Play]:
        """All three."""
        return self.silent, self.right, self.marked

    def of(self, protocol: Protocol) -> "Rehearsal":
        """Return the rehearsal of the same run by another protocol."""
        return Rehearsal(self.run, self.world, protocol)

    def silent_elsewhere(self) -> list[Dialogue]:
        """Return the dialogues on about four questions from all parts of the task, in which all answers are empty."""
        others = [self.run.task[number] for number in range(0, len(self.run.task), len(self.run.task) // 3 + 1)]
        return first_steps(self.driver(Players(silence)), others)[0]

    def driver(
        self, players: Players, task: Task | None = None, tools: Mapping[str, AgentTools] | None = None
    ) -> RolloutDriver:
        """Return a driver in which ``players`` answer for all: of the run's task and its protocol as it is in the first
        update, or of another ``task`` and the whole protocol, in which agents have ``tools``."""
        common_seed = self.run.config.branching.common_seed
        protocol = self.protocol if task is not None else self.protocol.at_update(1)
        decoding = self.run.config.ppo.decoding  # a program may ask for it
        task = self.run.task if task is None else task
        played, specs = protocol.in_rehearsal(), self.specs(tools)
        engines = dict.fromkeys((spec.engine for spec in specs.values()), players)
        return RolloutDriver(task, played, specs, engines, decoding, None, common_seed, world=self.world)

    def specs(self, tools: Mapping[str, AgentTools] | None = None) -> dict[str, SpeakerSpec]:
        """Return what a driver needs to know of the agents, as if their own engines answered for them."""
        agents = self.run.config.agents
        learning = frozenset(name for name, agent in agents.items() if agent.weights and agent.trainable)
        sampling = {name: self.run.sampling.of(name, training=True) for name in self.run.speakers}
        return {
            name: SpeakerSpec(
                agents[name].engine,
                (name,),
                learning,
                agents[name].system,
                agents[name].role,
                sampling=sampling[name],
                tools=(tools or {}).get(name),
                tells_tokens=agents[name].weights,
            )
            for name in self.run.speakers
        }

    def grouping(self) -> Grouping:
        """Return what decides with what each row of an update is compared."""
        config = self.run.config
        schedule = config.schedule.resolved(self.run.protocol.turns, tuple(config.agents))
        return Grouping(
            task=self.run.task,
            protocol=self.run.protocol.at_update(1).in_rehearsal(),
            specs=self.specs(),
            decoding=config.ppo.decoding,
            world=self.world,
            branching=config.branching,
            reward=config.reward,
            advantages={name: config.of(name).advantage for name in config.agents},
            plans=[schedule.plan(update) for update in range(1, min(config.updates, UPDATES) + 1)],
            questions=config.questions_per_update() * distributed.size(),
        )

    def _play(self, script: Script) -> Play:
        players = Players(script)
        [dialogue], ended = first_steps(self.driver(players), [self.run.task[0]])
        return Play(dialogue, players.requests, ended)


def _marks() -> Script:
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


def findings(rehearsal: Rehearsal) -> Iterator[Fault]:
    """Yield a warning for questions that nobody is asked, roles that nobody has, and agents that hear nothing."""
    yield from _questions(rehearsal.run)
    yield from _documents(rehearsal)
    yield from rehearsal.protocol.check_rehearsal(rehearsal)
    yield from _unasked(rehearsal)
    yield from _roles(rehearsal)
    yield from _hearing(rehearsal)


def _questions(run: ResolvedRun) -> Iterator[Fault]:
    """Yield a warning if nobody is asked the questions of the task, because the protocol brings its own."""
    if run.protocol.own_questions and run.task.has_questions:
        what = f"{run.protocol.label} brings its own questions, so nobody is asked those of {run.config.task['name']}"
        yield Fault("task", what, "set task: {name: episodes}", "warning")


def _unasked(rehearsal: Rehearsal) -> Iterator[Fault]:
    """Yield a warning for agents that are trained and that a protocol of the user's own asks nothing in rehearsals.

    Those of the library ask all their agents, or let words decide whom.
    """
    if type(rehearsal.run.protocol).__module__.split(".")[0] == "maporl":
        return
    plays = rehearsal.plays
    asked = {request.ask.agent for play in plays for request in play.requests}
    silent = [name for name in rehearsal.run.learners if name not in asked]
    if silent and all(play.ended for play in plays):
        what = f"three rehearsals asked nothing of agents that are to learn: {', '.join(silent)}"
        remedy = "let the protocol ask them, or set trainable: false; what others say may decide it in the run"
        yield Fault("protocol", what, remedy, "warning")


def _documents(rehearsal: Rehearsal) -> Iterator[Fault]:
    """Yield a warning if documents to write questions on are shown to nobody, or have to be answered."""
    example, name = rehearsal.run.task[0], rehearsal.run.config.protocol["name"]
    if not in_place_of_question(example):
        return
    use = "use protocol: {name: propose, vouch: stated}, or name a task with questions"
    requests = rehearsal.marked.requests
    shown = [r for r in requests if any(example.question in m["content"] for m in r.ask.messages)]
    if not shown:
        what = f"it gives documents, and protocol {name!r} shows them to nobody"
        yield Fault("task", what, use, "warning")
    elif any(r.ask.answers and r.ask.example is None for r in shown):
        what = f"it gives documents, and protocol {name!r} asks for answers to them, of which none is right"
        yield Fault("task", what, use, "warning")


def _roles(rehearsal: Rehearsal) -> Iterator[Fault]:
    """Yield a warning for each role that is charged and that nobody had, and for each that a rule pays and nobody had,
    where somebody had one of nearly its name."""
    # a role of another name may come up in other dialogues, such as that of a searcher whom nobody asked
    config = rehearsal.run.config
    rules = zip(config.reward.rules, build_rules(config.reward.rules), strict=True)
    named = [("rules", entry_name(entry), role) for entry, rule in rules for role in getattr(rule, "roles", ())]
    named += [("charges", name, role) for name, charge in config.reward.charges.items() for role in charge.roles]
    if not named:
        return
    had = {agent.role for agent in config.agents.values()} - {None}
    for play in (rehearsal.silent, rehearsal.right, rehearsal.marked):
        had |= {u.role for u in play.dialogue.utterances} - {None}
    roles = sorted(str(role) for role in had)
    for part, name, role in dict.fromkeys(named):
        charged = part == "charges"
        if role in had or (charged and role in config.agents):
            continue
        near = difflib.get_close_matches(role, [*roles, *(config.agents if charged else ())], 1, 0.8)
        if near or charged:
            meant = f"did you mean {near[0]!r}? " if near else ""
            yield Fault(
                f"reward.{part}",
                f"{name} {'charges' if charged else 'pays'} the role {role!r}, which nobody had in three rehearsals",
                f"{meant}The roles there were {roles}" + (f", and the agents {list(config.agents)}" if charged else ""),
                "warning",
            )


def _hearing(rehearsal: Rehearsal) -> Iterator[Fault]:
    """Yield a warning for agents that speak after others and are never shown what those said."""
    # a protocol that runs tools itself shows what they made of the words, and is not looked at; an agent whose words
    # decide who speaks next says one after the other of what it would be taught
    if rehearsal.run.protocol.uses_tools:
        return
    shown: dict[str, bool] = {}
    for request in rehearsal.marked.requests:
        heard = [u for u in request.heard if u.agent != request.ask.agent and u.role not in DECIDE]
        others = [mark for u in heard if (mark := _mark(u.agent, u.id)) in u.text]
        text = "".join(message["content"] for message in request.ask.messages)
        if others:
            shown[request.ask.agent] = shown.get(request.ask.agent, False) or any(mark in text for mark in others)
    if deaf := [agent for agent, heard_others in shown.items() if not heard_others]:
        yield Fault(
            "protocol",
            f"the prompts of {', '.join(deaf)} show nothing of what other agents said, so each of them only goes over "
            "its own answers",
            "if that is not meant, put the placeholder for it into the texts of the protocol, as {others} in 'later' "
            "and {text} in 'quote'",
            "warning",
        )


def check_any_agent(rehearsal: Rehearsal) -> None:
    """Check that a protocol which lets any agent speak (``any_agent``) can be searched: another agent says what it asks
    each one for.

    Raises:
        ConfigError: it asks several agents at once, one in its conversation, or one that does not play, or fails.
    """
    run = rehearsal.run
    if run.config.branching.how != "tree_search" or not run.protocol.any_agent:
        return
    for script in (silence, rightness):
        driver = rehearsal.driver(Players(script))
        agents = list(driver.specs)
        (episode,) = driver.opened([run.task[0]])
        while not episode.over and len(episode.sent) < made_up.MOST_STEPS:
            other = next((agent for agent in agents if agent != episode.asks[0].agent), agents[0])
            driver.address(episode, other)
            driver.step([episode])
        driver.release()


class Measured:
    """The lengths of prompts and conversations, measured with a team that says nothing, on the longest questions of
    each split.

    Args:
        rehearsal: how the run is rehearsed.
        tokenizers: those of the agents that have one.
        tools: what each agent may call.
    """

    def __init__(self, rehearsal: Rehearsal, tokenizers: Mapping[str, Tokenizer], tools: Mapping[str, AgentTools]):
        self.run, self.players = rehearsal.run, Players(silence, tokenizers)
        self.dialogues: list[Dialogue] = []
        self.whole = True
        run, agents = self.run, self.run.config.agents
        for task in run.splits:
            by_length = sorted(task, key=lambda example: len(task.question(example)))
            longest = -1 if run.protocol.in_rehearsal().waits else -2 if rehearsal.world.environments else -16
            dialogues, ended = first_steps(rehearsal.driver(self.players, task, tools), by_length[longest:])
            self.dialogues += dialogues
            self.whole = self.whole and ended
        self.contexts = {name: _context(name, agents[name]) for name in run.speakers if name in tokenizers}
        most = run.config.ppo.response_length
        self.most_of = {name: run.sampling.longest(name, most) for name in run.speakers}
        self.most = max(self.most_of.values())

    @property
    def steps(self) -> list[int]:
        """The number of utterances of each step of the dialogue with the most steps."""
        counts = [list(Counter(u.order for u in dialogue.utterances).values()) for dialogue in self.dialogues]
        return max(counts, key=len, default=[])

    @property
    def longest(self) -> int:
        """The tokens of the longest conversation if answers are as long as possible."""
        return max((sum(self.tokens(request, length)) for request, length in self.players.prompts), default=0)

    def tokens(self, request: Request, length: int) -> tuple[int, int, int]:
        """Return the tokens of a prompt without answers, and the most of the answers in it and of the answer to it."""
        answers = len(self.run.speakers) * self.most * (1 if request.ask.fresh else request.turn)
        return length, answers, self.most_of.get(request.ask.agent, self.most)

    def faults(self) -> Iterator[Fault]:
        """Yield the first prompt of each agent that does not fit its model's context, empty prompts, those that
        may not fit, and what cannot be read."""
        config, label = self.run.config, self.run.protocol.label
        longer: dict[str, int] = {}
        too_long: set[str] = set()
        for request, length in self.players.prompts:
            agent, context = request.ask.agent, self.contexts[request.ask.agent]
            _, answers, answer = self.tokens(request, length)
            if not length:
                heard = [u.agent for u in request.heard]
                empty = "the answers of " + ", ".join(heard) if heard else "earlier answers"
                yield Fault(
                    f"agents.{agent}",
                    f"its prompt of turn {request.turn + 1} is empty if {empty} are empty, and a model cannot answer "
                    "nothing",
                    f"put a text of its own into what protocol {label} asks, beside what others said",
                )
            if context is None:
                continue
            if length + answer > context and agent not in too_long:
                too_long.add(agent)
                yield self._too_long(request, length, answer, context)
            if length + answers + answer > context:
                longer[agent] = max(longer.get(agent, 0), length + answers + answer)
        if not self.whole:
            what = f"{label} lets dialogues go on for more than {made_up.MOST_STEPS} steps, the most that are rehearsed"
            remedy = "whether later prompts fit the models' contexts, and how long they get, shows in the run"
            yield Fault("protocol", what, remedy, "warning")
        yield from _unread(config, self.players.requests)
        yield from self._unwritable()
        for agent, length in longer.items():
            name = (
                "ppo.response_length"
                if self.most == config.ppo.response_length
                else "max_tokens of the agents' sampling"
            )
            what = (
                f"its last turn may need about {length} tokens if all answers are as long as {name}={self.most} "
                f"allows, but its model reads at most {self.contexts[agent]}"
            )
            yield Fault(f"agents.{agent}", what, "a run stops where it does not fit", "warning")

    def _unwritable(self) -> Iterator[Fault]:
        """Yield agents that cannot write right answers: they lack characters, or may not write so many tokens."""
        labelled = [task for task in self.run.splits if task.labelled and task.has_questions]
        labels = [answer for task in labelled for i in range(min(LABELS, len(task))) if (answer := task[i].answer)]
        for name, tiny in self.run.tinies.items():
            if lacking := "".join(sorted(set().union(*labels) - set(tiny.alphabet))):
                what = f"right answers have characters that it lacks, {lacking!r:.60}, so {name} can never write them"
                yield Fault(f"agents.{name}.tiny.alphabet", what, "add them", "warning")
        for name, tokenizer in self.players.tokenizers.items() if labels else ():
            asked = [r for r in self.players.requests if r.ask.agent == name and r.ask.answers]
            most = max((r.longest(self.most_of[name]) for r in asked), default=None)
            sizes = [len(ids) for ids in tokenizer(labels, add_special_tokens=False)["input_ids"]]
            if most is not None and (longer := sum(size > most for size in sizes)):
                what = f"{longer:,} of {len(sizes):,} right answers have more than the {most} tokens that it may write"
                remedy = f"raise ppo.response_length, or max_tokens of its sampling, to {max(sizes) + 1}, the longest"
                yield Fault(f"agents.{name}", what, remedy, "warning")

    def _too_long(self, request: Request, length: int, answer: int, context: int) -> Fault:
        """Return the fault of a prompt that leaves no room for an answer."""
        agent, most = request.ask.agent, self.run.config.ppo.response_length
        limit = "ppo.response_length" if answer == most else "max_tokens of its sampling"
        which = f"a prompt of turn {request.turn + 1} has at least" if request.turn else "a first prompt has"
        tiny = self.run.config.agents[agent].tiny is not None
        longer = f"raise agents.{agent}.tiny.context" if tiny else "use another model"
        by = "" if context == context_length(agent, self.run.config.agents[agent]) else " (vllm.colocate.max_model_len)"
        return Fault(
            f"agents.{agent}",
            f"{which} {length} tokens and answers may have {answer} ({limit}), but its model reads at most "
            f"{context}{by}",
            f"shorten the protocol's texts or {limit}, or {longer}; question: {request.example.question!r:.80}",
        )


def _context(name: str, agent: AgentSection) -> int | None:
    """Return the most tokens that the agent's model, and vLLM in this process if it samples, reads. None: no limit."""
    limits = [context_length(name, agent)]
    if agent.vllm is not None and agent.vllm.colocate is not None:
        limits.append(agent.vllm.colocate.max_model_len)
    return min((limit for limit in limits if limit is not None), default=None)


def _unread(config: Config, requests: Sequence[Request]) -> Iterator[Fault]:
    """Yield a warning for each tiny model whose prompts have characters that its alphabet lacks."""
    used: dict[str, set[str]] = {}
    for request in requests:
        used.setdefault(request.ask.agent, set()).update(*(message["content"] for message in request.ask.messages))
    for name, characters in used.items():
        tiny = config.agents[name].tiny
        if tiny is not None and (lacking := characters - set(tiny.alphabet)):
            what = (
                f"its prompts have characters that it lacks, {''.join(sorted(lacking))!r:.60}; they are read as "
                "unknown: add them, or shorten the protocol's texts"
            )
            yield Fault(f"agents.{name}.tiny.alphabet", what, severity="warning")
