"""The turns of agents that call tools: one step of a protocol becomes as many steps as its calls need. No torch.

Data flow: a protocol's asks -> :func:`play_step`, which yields asks and acts -> the last utterance of each turn, which
the protocol receives. Each utterance of a turn is one segment. What a tool returned is a message of the next segment.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from maporl.config.call_options import CallLimits
from maporl.config.imports import unknown
from maporl.environments.arguments import ArgumentCheck
from maporl.environments.base import CallRefused
from maporl.environments.calls import CallFormat, Written
from maporl.errors import ConfigError
from maporl.types import Act, Ask, Call, CallError, Message, Result, TurnEnd, Utterance

Moves = list[Ask] | list[Act]
Step = Generator[Moves, list[Utterance] | list[Result], list[Utterance]]
"""Yields what is asked and done next, is sent utterances and results, and returns the last segment of each turn."""


@dataclass(frozen=True)
class AgentTools:
    """The tools of one agent, and its call format.

    Args:
        format: how it writes calls.
        checks: checks the arguments of each tool's calls.
        places: the environment of each tool. None is a tool that keeps no state.
        limits: how much it may call.
        cut: takes a text and the most tokens of it. It returns the text that fits and how many tokens were left out.
        handed: the names of the tools whose calls the protocol answers itself.
        room: takes a segment and the messages that would follow it, and returns how many tokens are then left in the
            model's context. It may be negative. None means that the context has no known end.
    """

    format: CallFormat
    checks: Mapping[str, ArgumentCheck]
    places: Mapping[str, str | None]
    limits: CallLimits
    cut: Callable[[str, int], tuple[str, int]]
    handed: frozenset[str] = frozenset()
    room: Callable[[Utterance, list[Message]], int | None] = lambda segment, messages: None


def play_step(asks: list[Ask], tools: Mapping[str, AgentTools], open_turns: "dict[int, Turn]") -> Step:
    """Play one step of a protocol: its ``asks``, with all calls that the agents make in their turns.

    Agents that are asked together wait for each other. A call of a protocol's own tool ends the step for its agent. The
    protocol answers it by an ask that continues the turn.

    Args:
        asks: what the protocol asks for.
        tools: the tools of each agent that has some.
        open_turns: the turns that wait for the protocol, by the ids of their last segments. This takes those that
            go on from it, and adds those that wait.

    Raises:
        ConfigError: an ask continues a turn that does not wait for it, or does not bring one result for each call.
    """
    turns = [_turn_of(ask, tools.get(ask.agent), open_turns) for ask in asks]
    going = turns
    while going:
        said = yield [turn.ask for turn in going]
        for turn, utterance in zip(going, said, strict=True):
            turn.take(utterance)  # type: ignore[arg-type]  # an ask is answered by an utterance
        if acts := [act for turn in going for act in turn.acts]:
            results = iter((yield acts))
            for turn in going:
                turn.see([next(results) for _ in turn.acts])  # type: ignore[misc]  # an act is answered by a result
        going = [turn for turn in going if turn.goes_on()]
    for turn in turns:
        if turn.waits():
            open_turns[turn.segment.id] = turn
    return [turn.segment for turn in turns]


def _turn_of(ask: Ask, tools: AgentTools | None, open_turns: "dict[int, Turn]") -> "Turn":
    """Return a new turn, or one that waited for what ``ask`` brings."""
    if ask.continues is None:
        return Turn(ask, tools)
    turn = open_turns.pop(ask.continues, None)
    if turn is None:
        raise ConfigError(
            f"the protocol continues utterance {ask.continues!r} of agent {ask.agent!r}, which waits for nothing; "
            "continue an utterance that called one of the protocol's own tools"
        )
    turn.resume(ask)
    return turn


@dataclass
class Turn:
    """An agent's turn. ``ask`` is what it is asked next."""

    ask: Ask
    tools: AgentTools | None
    called: int = 0
    failed: int = 0
    last: bool = False
    acts: list[Act] = field(default_factory=list)

    def take(self, segment: Utterance) -> None:
        """Take what the agent said, and find the calls in it that can be carried out."""
        self.segment, self.acts, self._open = segment, [], list[Call]()
        if self.tools is None:
            return
        if not segment.stop.whole:
            segment.turn_end = TurnEnd.LENGTH
            return
        written = self.tools.format.read(segment.text, segment.prompt_ids, segment.response_ids)
        for index, one in enumerate(written):
            call = Call(f"{segment.id}.{index}", one.name, one.arguments, self.tools.places.get(one.name))
            segment.calls.append(call)
            if not self.last:
                self._judge(call, one, index)
        if not written or self.last:
            segment.turn_end = TurnEnd.LIMIT if self.last else TurnEnd.ANSWER

    def _judge(self, call: Call, written: Written, index: int) -> None:
        """Make an act of a call, or refuse it."""
        assert self.tools is not None
        try:
            call.arguments = self._allowed(written, index)
        except CallRefused as error:
            call.result = Result(str(error), error=error.kind)
            return
        if call.name in self.tools.handed:
            return
        self._open.append(call)
        self.acts.append(Act(self.ask.agent, call.name, call.arguments, self.segment.id, call.place, call.id))

    def _allowed(self, written: Written, index: int) -> dict[str, Any]:
        tools = self.tools
        assert tools is not None
        if written.error is not None:
            raise CallRefused("unread", written.error)
        if written.name not in tools.checks:
            raise CallRefused("unknown", unknown(written.name, tools.checks))
        if tools.format.most is not None and index >= tools.format.most:
            raise CallRefused("limit", f"at most {tools.format.most} call in one message; call again")
        if self.called + index >= tools.limits.calls:
            raise CallRefused("limit", f"at most {tools.limits.calls} calls are allowed")
        return tools.checks[written.name](written.arguments)

    def see(self, results: list[Result]) -> None:
        """Take the results of the acts, cut to what the agent is shown, and pay what they pay."""
        for call, result in zip(self._open, results, strict=True):
            self._take_result(call, result)
            if result.reward is not None:
                paid = self.segment.rewards
                paid[paid_as(call)] = paid.get(paid_as(call), 0.0) + result.reward

    def _take_result(self, call: Call, result: Result) -> None:
        assert self.tools is not None
        text, left_out = self.tools.cut(result.text, self.tools.limits.result_tokens)
        # the result of a forked dialogue is the one that was cut for the other
        call.result = replace(result, text=text, left_out=result.left_out + left_out)

    def goes_on(self) -> bool:
        """Decide whether the turn goes on, and prepare what the agent is asked next."""
        if self.tools is None or self.segment.turn_end is not None:
            return False
        if self.waits():
            self.segment.answers = False
            return False
        self._count()
        end = self._ended()
        if end is None:
            messages = self._messages()
            room = self.tools.room(self.segment, messages)
            if room is not None and room < 0:
                messages = self._shortened(-room)
                room = self.tools.room(self.segment, messages)
            end = TurnEnd.CONTEXT if room is not None and room < 0 else None
        if end is not None:
            self.segment.turn_end = end
            return False
        self.segment.answers = False
        parents = (self.segment.id,)
        self.ask = replace(self.ask, messages=messages, parents=parents, continues=self.segment.id, taught=())
        return True

    def waits(self) -> bool:
        """Return whether the protocol must answer a call before the turn can go on."""
        if self.tools is None or self.segment.turn_end is not None:
            return False
        return None in [call.result for call in self.segment.calls]

    def resume(self, ask: Ask) -> None:
        """Take the protocol's answers to the calls that waited for it, and prepare what the agent is asked next.

        Raises:
            ConfigError: ``ask`` has another number of results, or another agent.
        """
        waiting = [call for call in self.segment.calls if call.result is None]
        results = [message for message in ask.messages if message["role"] == "tool"]
        if len(results) != len(waiting) or ask.agent != self.ask.agent:
            raise ConfigError(
                f"the protocol continues utterance {self.segment.id} of agent {self.ask.agent!r} with {len(results)} "
                f"results for agent {ask.agent!r}; expected one message of the role tool for each of its "
                f"{len(waiting)} calls"
            )
        for call, message in zip(waiting, results, strict=True):
            self._take_result(call, Result(message["content"]))
        extra = [message for message in ask.messages if message["role"] != "tool"]
        self._count()
        end = self._ended()
        self.last = self.last or end is TurnEnd.LIMIT
        parents = tuple(dict.fromkeys([self.segment.id, *ask.parents]))
        self.ask = replace(ask, messages=[*self._messages(), *extra], parents=parents, taught=())

    def _count(self) -> None:
        for call in self.segment.calls:
            assert call.result is not None
            self.called += 1
            self.failed = 0 if call.result.error is None else self.failed + 1

    def _ended(self) -> TurnEnd | None:
        assert self.tools is not None
        results = [call.result for call in self.segment.calls if call.result is not None]
        if any(result.error == "lost" for result in results):
            return TurnEnd.LOST
        if any(result.done or result.error == "over" for result in results):
            return TurnEnd.OVER
        limits = self.tools.limits
        if self.called >= limits.calls or self.failed >= limits.failures:
            if limits.at_limit == "end":
                return TurnEnd.LIMIT
            self.last = True
        return None

    def _messages(self) -> list[Message]:
        """Return the results as messages, and what the agent is told if it may not call any more."""
        assert self.tools is not None
        messages: list[Message] = []
        for call in self.segment.calls:
            assert call.result is not None
            error: dict[str, CallError] = {} if call.result.error is None else {"error": call.result.error}
            text = _marked(call.result)
            messages.append({"role": "tool", "name": call.name or "call", "content": text, **error})
        if self.last:
            messages.append({"role": "user", "content": self.tools.format.texts.limit})
        return messages

    def _shortened(self, tokens: int) -> list[Message]:
        """Return the messages with the longest results cut further, so that ``tokens`` fewer are shown."""
        assert self.tools is not None
        for call in sorted(self.segment.calls, key=lambda call: -len(call.result.text if call.result else "")):
            if tokens <= 0 or call.result is None:
                break
            _, size = self.tools.cut(call.result.text, 0)
            text, more = self.tools.cut(call.result.text, max(0, size - tokens))
            call.result = replace(call.result, text=text, left_out=call.result.left_out + more)
            tokens -= more
        return self._messages()


def paid_as(call: Call) -> str:
    """Return the name of the reward that a call pays: its environment's, or else its own."""
    return call.place or call.name


def _marked(result: Result) -> str:
    """Return what the agent is shown, with a mark where the text was cut."""
    return result.text if not result.left_out else f"{result.text} [... {result.left_out} more tokens]"
