"""What a rollout consists of: who speaks, the dialogues in progress, and the steps that they wait for.

Imports no torch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from maporl.config.call_options import CallTexts
from maporl.decoding import Sampling, SpeakerSampling, StructuredOutput
from maporl.engines.base import Pending, Reply, Request
from maporl.engines.transcript import Transcript
from maporl.environments.base import tool_of
from maporl.environments.calls import CallFormat, JsonFormat
from maporl.environments.rooms import Rooms
from maporl.environments.turns import AgentTools, Turn
from maporl.environments.turns import Step as TurnStep
from maporl.errors import ConfigError, one_line
from maporl.protocols.base import Play
from maporl.types import Act, Ask, Call, Dialogue, Message, Result, Utterance, has_calls
from trl_ext.chat.templates import fault_of_grammar
from trl_ext.ppo.options import Decoding


@dataclass(frozen=True)
class SpeakerSpec:
    """The properties of an agent that the driver needs.

    Args:
        engine: the name of the engine that answers for the agent.
        policies: the policy of each turn. The last one also speaks in all later turns.
        learning: the policies that are trained.
        system: the system prompt.
        role: the agent's role, which its utterances record.
        tools: what the agent may call, or None.
        sampling: how its answers are sampled. None: as the whole run.
        formats: returns the call format of tools that a protocol brings (:attr:`maporl.types.Ask.schemas`).
        longest: the most tokens of an answer, whatever a refusable ask allows. None: as the ask says.
        tells_tokens: whether its engine shows the tokens of answers (:attr:`maporl.types.Ask.tokens`).
    """

    engine: str
    policies: tuple[str, ...]
    learning: frozenset[str] = frozenset()
    system: str | None = None
    role: str | None = None
    tools: AgentTools | None = None
    sampling: SpeakerSampling | None = None
    formats: Callable[[tuple[dict[str, Any], ...]], CallFormat] = lambda schemas: JsonFormat(
        [tool_of(schema) for schema in schemas], CallTexts()
    )
    longest: int | None = None
    tells_tokens: bool = False

    def policy(self, turn: int) -> str:
        """Return the name of the policy that speaks at ``turn``."""
        return self.policies[min(turn, len(self.policies) - 1)]

    def form_of(self, ask: Ask) -> CallFormat | None:
        """Return how the agent writes calls in the conversation of ``ask``, or None if it may call nothing there.

        Raises:
            ConfigError: a schema is not that of a tool.
        """
        if not ask.schemas:
            return None if self.tools is None else self.tools.format
        form = self.formats(ask.schemas)
        return form.single() or form if ask.single else form

    def heard(self, ask: Ask, form: CallFormat | None) -> list[Message]:
        """Return the messages of ``ask`` as the agent, which calls in ``form``, reads calls and results of anybody."""
        if form is None and has_calls(ask.messages):
            form = self.formats(())
        return ask.messages if form is None else form.heard(ask.messages)

    def refusal_of(self, ask: Ask, turn: int, decoding: Decoding) -> str | None:
        """Return why ``ask``, which is refusable, cannot be answered, in a line for each reason, or None if it can."""
        whys = []
        if self.tools is not None and ask.schemas:
            whys.append(
                "tools: this agent has tools of the run (agents.NAME.tools), and a request may not bring others; leave "
                "it out, or add it to protocol.ignore"
            )
        elif ask.single and ask.schemas and self.formats(ask.schemas).single() is None:
            whys.append(
                "parallel_tool_calls: this agent's chat template writes calls as one list, and no mark ends the first; "
                "set agents.NAME.call_format: json, leave it out, or add it to protocol.ignore"
            )
        if "choice" in ask.tags and self.engine == "openai":
            whys.append(
                "n: this agent is behind an API, which would be asked, and paid, once for each sample; send several "
                "requests, leave it out, or add it to protocol.ignore"
            )
        else:
            whys += self._not_held(ask, turn, decoding)
        if ask.tokens and not self.tells_tokens:
            whys.append(
                "logprobs: this agent's engine does not tell them, because it is an API or no model; leave it out, or "
                "add it to protocol.ignore"
            )
        asked = ask.sampling.at(turn) if ask.sampling is not None and self.policy(turn) in self.learning else {}
        drawn = self.sampling and self.sampling.at(None, ask.role or self.role, turn, decoding)
        run = vars(decoding) | (drawn.at(turn) if drawn else {})
        for name, value in asked.items():
            if name in vars(decoding) and value != run[name]:
                whys.append(
                    f"{name}: this agent is being trained, and answers are drawn with {run[name]}, not with {value}; "
                    "leave it out, or add it to protocol.ignore"
                )
        return "\n".join(whys) or None

    def _not_held(self, ask: Ask, turn: int, decoding: Decoding) -> Iterator[str]:
        """Yield why the answer to ``ask`` cannot be held to what it asks for."""
        field = "tool_choice" if ask.tool_choice != "auto" else "tools" if ask.strict else "response_format"
        remedy = "leave it out, or add it to protocol.ignore"
        asked = ask.tool_choice != "auto" or (ask.structured_output and self.engine != "openai")
        if not self.tells_tokens and asked and self.engine != "scripted":  # a teacher says what the task writes
            yield f"{field}: only models of this run are held to it; {remedy}"
        elif self.tells_tokens and (ask.structured_output or ask.schemas):
            try:
                sampling = self.sampling_of(ask, turn, decoding)
            except (ConfigError, ValueError) as error:
                yield f"{field}: {error}"
                return
            held = None if sampling is None else sampling.at(0).get("structured_output")
            if held is not None and (why := fault_of_grammar(held.text)):
                yield f"{field}: {one_line(why, 300)}; {remedy}"

    def sampling_of(self, ask: Ask, turn: int, decoding: Decoding) -> Sampling | None:
        """Return how the answer to ``ask`` is sampled, or None if it is sampled as the whole run.

        A refusable ask may make answers shorter and not longer than :attr:`longest`. ``decoding`` says how the run
        draws tokens. Calls that must be made, or keep to schemas, make a grammar.

        Raises:
            ConfigError: the answer would be greedy, and its policy is trained on it.
        """
        sampling = (self.sampling or SpeakerSampling()).at(ask.sampling, ask.role or self.role, turn, decoding)
        if self.tells_tokens and ask.schemas and (form := self.form_of(ask)) is not None:
            content = (
                None if sampling is None or sampling.structured_output is None else sampling.at(0)["structured_output"]
            )
            held = form.grammar(ask.tool_choice, ask.strict, content and content.expression)
            if held is not None:
                drawn = sampling or Sampling(temperature=decoding.temperature)
                sampling = replace(drawn, structured_output=StructuredOutput(grammar=held))
        if sampling is None:
            return None
        if ask.refusable and self.longest is not None and sampling.max_tokens is not None:
            # a program's limit may be that of a larger model, and memory and contexts were planned for the run's
            sampling = replace(sampling, max_tokens=min(self.longest, sampling.at(0)["max_tokens"]))
        if sampling.temperature == 0 and self.policy(turn) in self.learning:
            raise ConfigError(
                f"agent {ask.agent!r}, turn {turn + 1}: its sampling has temperature 0, and it is trained; PPO needs "
                "the probability of each answer, so give it a temperature above 0, or do not train it"
            )
        return sampling


@dataclass
class Episode:
    """A dialogue in progress.

    Args:
        dialogue: the record so far.
        play: the protocol's generator.
        seed: the rollout number from which the protocol takes its random numbers.
        rooms: the environments of the dialogue.
        step: the current step of the protocol, with the calls that agents make in it. None: the protocol acts itself.
        asks: what is asked next.
        acts: the calls to carry out next.
        wait: what must be done before the protocol is asked again, or None.
        asked: what was asked in each step, and ``sent`` the utterances of each.
        transcripts: the conversation of each agent.
        open_turns: the turns that wait for the protocol to answer a call, by the ids of their last segments.
        apart: the conversations that stand apart and may go on, by the ids of their utterances.
        turns: the number of turns that each agent has had.
        over: whether the dialogue has ended.
        state: the name of the state from which several forks take their next step.
        replay: gives the replies to requests that need no engine, and None for others. None: all need one.
    """

    dialogue: Dialogue
    play: Play
    rooms: Rooms
    seed: int = 0
    step: TurnStep | None = None
    asks: list[Ask] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    wait: Future[Any] | None = None
    asked: list[list[Ask]] = field(default_factory=list)
    sent: list[list[Utterance]] = field(default_factory=list)
    transcripts: dict[str, Transcript] = field(default_factory=dict)
    open_turns: dict[int, Turn] = field(default_factory=dict)
    apart: dict[int, Transcript] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    over: bool = False
    state: str | None = None
    replay: Callable[[Request], Reply | None] | None = None

    def take(self, moves: list[Ask] | list[Act]) -> None:
        """Take what is asked or called next."""
        # all moves of a step are of one kind
        self.asks, self.acts = ([], moves) if isinstance(moves[0], Act) else (moves, [])  # type: ignore[assignment]


@dataclass(frozen=True)
class Step:
    """The asks of an episode, and the answers that engines are working on."""

    episode: Episode
    requests: list[Request]
    pending: list[Pending]


Sent = tuple[Episode, list[Utterance] | list[Result]]
"""An episode, and what it is sent: what was said, or what calls returned."""


def record_call(dialogue: Dialogue, act: Act, result: Result) -> None:
    """Record a call that a protocol made itself. A turn records those of its agent."""
    if act.call is None:
        calls = dialogue.utterances[act.of].calls
        calls.append(Call(f"{act.of}.{len(calls)}", act.name, act.arguments, act.place, result))


def recorded_results(dialogue: Dialogue, episodes: list[Episode]) -> list[Sent]:
    """Return the results that the acts of episodes had in the ``dialogue`` of which they are forks."""
    sent: list[Sent] = []
    for episode in episodes:
        results = []
        for act in episode.acts:
            name = act.call or f"{act.of}.{len(episode.dialogue.utterances[act.of].calls)}"
            result = next(call.result for call in dialogue.utterances[act.of].calls if call.id == name)
            assert result is not None  # the dialogue has gone on after it
            record_call(episode.dialogue, act, result)
            results.append(result)
        sent.append((episode, results))
    return sent


class Referee:
    """Sees the dialogues of a step one at a time, and may collect them. It must be done with them after :meth:`settle`.

    This base class does nothing. :class:`maporl.rollout.player.ScoringReferee` grades, scores and restates answers.
    """

    batches: bool = False
    """Whether it does work that takes batches, so that all dialogues should take their steps together."""

    def see(self, dialogue: Dialogue) -> None:
        """Receive a dialogue that holds only its new utterances."""

    def settle(self) -> None:
        """Fill in grades and rewards of all utterances that were seen since the last call, in one batch."""
