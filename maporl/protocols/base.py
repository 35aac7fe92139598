"""The contract of a protocol, which decides who speaks when and what each speaker sees. Imports no torch."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from maporl.environments.base import Tool
from maporl.errors import ConfigError, Fault
from maporl.text import check_names
from maporl.text import check_template as check_template
from maporl.types import Act, Ask, Example, Utterance, Wait, message_fault
from trl_ext.ppo.options import Checked

Play = Generator[list[Ask] | list[Act] | list[Wait], Any, Any]
"""A generator. It yields what should be said next, receives what was said, and returns the outcome of the dialogue.

It may yield a list of :class:`maporl.types.Act` too, and then receives the list of their results, or a list of one
:class:`maporl.types.Wait`, and is then asked again when that is done.
"""


class Dropped(Exception):
    """A play raises this to end its dialogue, on which nobody is then trained. ``args`` names what failed."""

    def __init__(self, *what: str, outcome: Any = None):
        super().__init__(*what)
        self.outcome = outcome


class Protocol(Checked):
    """The base class of protocols. A protocol is a frozen dataclass of options with a generator :meth:`play`.

    ``play(example, agents)`` **yields a list of Ask, receives the list of Utterance that answers it, and returns the
    outcome**. It knows nothing about engines, tokens or batches. The rollout driver advances all dialogues together and
    groups everything that they ask for into one call per policy.

    ``example.question`` is what agents are asked, with the task's instruction, which asks for the form of a final
    answer. ``example.bare_question`` is the question without it, for an agent that plans, hints or checks.

    A dialogue can be forked; a fork replays the protocol on what was said so far. Therefore a protocol that receives
    the same utterances must ask for the same again. It must draw everything random from ``example.id``,
    ``example.meta["rollout"]`` and ``example.meta["draw"]``. The last is another text whenever the question is asked
    again in a run's training, on any number of processes. It may set ``rewards[NAME]``, ``answers``, ``trainable`` and
    ``settles`` of the utterances that it receives.

    Training needs a credit for each utterance. An answer is graded and scored. Another utterance needs a reader, which
    is a later ask with its id in ``parents``, or a reward that a source gives it or that the protocol pays::

        pays = frozenset({"short"})

        def play(self, example, agents):
            question = [{"role": "user", "content": example.question}]
            (plan,) = yield [Ask(agents[0], question, answers=False)]
            plan.rewards["short"] = float(len(plan.text) < 80)
            told = [{"role": "user", "content": plan.text + example.question}]
            yield [Ask(agents[1], told, parents=(plan.id,))]

    With ``reward.sources: {label: 1, short: 0.5}`` a short plan has the credit 0.5. Without ``short`` there it has the
    credit of the answer. A run stops if no utterance of an agent has a credit.

    The attributes below tell callers what they must know. A subclass overrides those that differ.
    """

    turns: int = 1
    """The largest number of answers that an agent gives."""
    opening: str = "{question}"
    """The text that asks the question of an agent that has seen no other answer yet."""
    players: int | None = None
    """How many agents play. None means any number."""
    least_players: int = 1
    """The smallest number of agents."""
    own_questions: bool = False
    """Whether it brings its own questions, as a game does. Its task then only counts episodes (``task: episodes``)."""
    roles: bool = False
    """Whether it gives the agents roles."""
    records: frozenset[str] = frozenset()
    """The additional columns that it records and that can group advantages: caller, game, seed, state."""
    pays: frozenset[str] = frozenset()
    """The names of the rewards that it sets itself. ``reward.sources`` gives them weights."""
    uses_tools: frozenset[str] = frozenset()
    """The names of the tools that it calls itself (:class:`maporl.types.Act`). They stand under ``tools:``."""
    acts_in: frozenset[str] = frozenset()
    """The names of the environments in which it acts for the agents, so that these need no tools there."""
    hears_others: bool = True
    """Whether an agent can answer after it saw another answer. If not, all answer once, at the same time."""
    any_agent: bool = False
    """Whether any of its agents can say what it asks for, so that a branching may choose who does (``tree_search``).

    It must then ask one agent at a time, with ``fresh=True``, and take what another one has said.
    """
    every_step_scored: bool = True
    """Whether what is said in a step has its score when the acts that follow the step are done.

    If so, branches can be compared after any step.
    """
    simultaneous: bool = False
    """Whether all answers of a turn are given in one step, so that none of them follows another."""
    score_between_turns: bool = False
    """Whether it must know an answer's score, the weighted sum of all sources, before it continues."""
    grade_between_turns: bool = False
    """Whether it must know the grade of an answer before it continues. It may change it."""
    replayable: bool = True
    """Whether it asks the same again when it is sent the same, so that its dialogues can be forked."""
    waits: bool = False
    """Whether it waits for something outside of the dialogue (:class:`maporl.types.Wait`), which takes its time and may
    let what is asked at once come in any order."""
    runs_program: bool = False
    """Whether a user's program sends the requests, so that there may be none."""
    pass_: str | None = None
    """The answer by which an agent declines. A configuration calls it ``pass``. None: nobody may decline.

    Such an utterance is sent to the protocol with ``answers=False`` and the tag ``passed``. It is not graded, and its
    credit is the mean credit of the answers of its turn. The protocol must not show it to others.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word(self.pass_)

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play one example with ``agents``, given in speaking order.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}: a protocol defines play(example, agents), a generator")

    @property
    def label(self) -> str:
        """The name of the protocol in messages."""
        return type(self).__name__.lower()

    def tools(self, agent: str, agents: tuple[str, ...]) -> Sequence[Tool]:
        """Return the tools of ``agent`` that the protocol itself answers, such as one that asks another agent.

        An utterance that calls one is sent to the protocol with ``calls`` whose ``result`` is None. The protocol then
        asks the agent with ``continues=said.id`` and a message ``{"role": "tool", "name": ..., "content": ...}`` for
        each of them. The tool's ``run`` is not called.
        """
        return ()

    def mentioned(self) -> set[str]:
        """Return the agents that its options name. They must all play."""
        return set()

    def helpers(self) -> tuple[str, ...]:
        """Return agents that play although they are not listed among the players, such as a summariser."""
        return ()

    def between_turns(self) -> frozenset[str]:
        """Return the names of the reward sources whose values it must know before it continues."""
        return frozenset()

    def mark_passes(self, said: Sequence[Utterance]) -> None:
        """Mark the new utterances by which agents declined, before they are graded."""
        mark_passes(said, self.pass_)

    def in_evaluation(self) -> "Protocol":
        """Return the protocol as it is played in evaluations. By default it is this one."""
        return self

    def in_rehearsal(self) -> "Protocol":
        """Return the protocol for dry runs with mock completions before a run. By default it is this one."""
        return self

    def check_rehearsal(self, rehearsal: Any) -> Iterable[Fault]:
        """Return what is wrong with how it played (:class:`maporl.validation.rehearsal.Rehearsal`). By default
        nothing."""
        return ()

    def at_update(self, update: int) -> "Protocol":
        """Return the protocol as it is played in ``update``, counted from 1."""
        return self

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        """Check that the tools that it calls itself take what it gives them. ``tools`` are those of the run by name.

        Raises:
            ValueError: one does not.
        """

    def check_example(self, example: Example) -> None:
        """Check that ``example``, one of the task's, has what the protocol reads of it. By default it reads the
        question alone.

        Raises:
            ConfigError: it lacks something.
        """

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that these agents can play it.

        Raises:
            ValueError: there are too few or too many of them; names the agents and what to do.
        """
        if self.players is not None and len(players) != self.players:
            raise ValueError(f"{self.label} has {self.players} players but agents are {list(players)}; list that many")
        if len(players) < self.least_players:
            raise ValueError(f"{self.label} needs {NUMBERS[self.least_players]} agents, got {list(players)}; add one")


def must_be_protocol(part: Any, where: str) -> Protocol:
    """Return ``part`` if it is a :class:`Protocol` whose names are sets.

    Raises:
        ConfigError: it is something else, or ``pays``, ``records`` or ``between_turns()`` is not a set of names.
            ``where`` says in the error which part is meant.
    """
    if not isinstance(part, Protocol):
        raise ConfigError(f"{where}: expected a maporl.Protocol, got {type(part).__name__}; derive its class from it")
    for what, names in (
        ("pays", part.pays),
        ("records", part.records),
        ("uses_tools", part.uses_tools),
        ("acts_in", part.acts_in),
        ("between_turns()", part.between_turns()),
    ):
        check_names(names, f"{where}: {type(part).__name__}.{what}")
    return part


def must_be_play(play: Any, where: str) -> Play:
    """Return ``play`` if it is a generator.

    Raises:
        ConfigError: ``play`` returned something else. ``where`` names the protocol.
    """
    if not isinstance(play, Generator):
        raise ConfigError(f"{where}: its play returned {type(play).__name__}, expected a generator; yield [Ask(...)]")
    return play


def must_be_moves(moves: Any, where: str) -> list[Ask] | list[Act] | list[Wait]:
    """Return what a protocol yielded, if it is a list of Ask with messages that can be read, of Act, or of one Wait.

    Raises:
        ConfigError: it is something else. ``where`` names the protocol.
    """
    listed = list(moves) if isinstance(moves, list | tuple) else []
    asks = [move for move in listed if isinstance(move, Ask)]
    if len(listed) == 1 and isinstance(listed[0], Wait):
        return listed
    if listed and not asks and all(isinstance(move, Act) for move in listed):
        return listed
    if not listed or len(asks) < len(listed):
        raise ConfigError(f"{where}: its play yielded {moves!r:.80}, expected a list of Ask; use yield [Ask(...)]")
    for ask in asks:
        if (why := message_fault(ask.messages)) is not None:
            raise ConfigError(f"{where}: what it asks agent {ask.agent!r} cannot be read: {why}")
    return asks


def seats(agents: tuple[str, ...], *named: str | None) -> list[str]:
    """Return who sits in each seat: the one who is ``named``, or else the next agent who is not.

    The last may be empty.
    """
    others = iter(agent for agent in agents if agent not in named)
    return [name if name is not None else next(others, "") for name in named]


NUMBERS = {1: "one", 2: "two", 3: "three"}


PASSED = "passed"
"""The tag of an answer by which an agent declined."""


def check_speaks(speaks: Mapping[str, Sequence[int]], turns: int) -> None:
    """Check that ``speaks`` names turns from 1 to ``turns`` for each agent in it, in rising order.

    Raises:
        ValueError: an agent has no turn, or a turn that is not played, or its turns do not rise.
    """
    for agent, numbers in speaks.items():
        if not numbers or list(numbers) != sorted(set(numbers)) or numbers[0] < 1 or numbers[-1] > turns:
            raise ValueError(f"speaks.{agent}: expected rising turns from 1 to {turns}, as [1], got {list(numbers)}")


def check_somebody_speaks(speaks: Mapping[str, Sequence[int]], agents: Sequence[str], turns: int) -> None:
    """Check that at least one of the ``agents`` speaks in each turn.

    Raises:
        ValueError: a turn has no speaker.
    """
    for turn in range(turns):
        if agents and not speakers_of(speaks, agents, turn):
            raise ValueError(f"speaks: nobody speaks in turn {turn + 1}; let one of {list(agents)}, or lower turns")


def speakers_of(speaks: Mapping[str, Sequence[int]], agents: Sequence[str], turn: int) -> list[str]:
    """Return the ``agents`` that speak at ``turn``, counted from 0. An agent that ``speaks`` does not name always does.

    >>> [speakers_of({"bob": (1, 3)}, ("ann", "bob"), turn) for turn in range(3)]
    [['ann', 'bob'], ['ann'], ['ann', 'bob']]
    """
    return [agent for agent in agents if agent not in speaks or turn + 1 in speaks[agent]]


def answered(said: Sequence[Utterance]) -> list[Utterance]:
    """Return the utterances without those by which agents declined."""
    return [u for u in said if not u.tags.get(PASSED)]


def check_word(word: str | None) -> None:
    """Check the word by which agents decline.

    Raises:
        ValueError: it is empty, or has spaces around it, so that no answer could be equal to it.
    """
    if word is not None and (not word or word != word.strip()):
        raise ValueError(f"pass: expected a word without spaces around it, such as PASS, got {word!r:.40}")


def mark_passes(said: Sequence[Utterance], word: str | None, exempt: str | None = None) -> None:
    """Mark the utterances that are ``word`` and nothing else: they get the tag ``passed`` and do not count as answers.

    Args:
        said: the utterances, before they are graded.
        word: the answer by which an agent declines. None: nobody may decline.
        exempt: an agent whose words are always taken as they are.
    """
    for u in said:
        if word is not None and u.agent != exempt and u.text.strip() == word:
            u.tags[PASSED] = True
            u.answers = False
