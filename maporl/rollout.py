"""Playing: many dialogues in lock-step, so that each policy answers one batch per step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from maporl.engines.base import Engine, Reply, Request
from maporl.protocols.base import Play, Protocol
from maporl.tasks.base import Task
from maporl.transcripts import Transcript
from maporl.types import Ask, Dialogue, Example, Utterance


@dataclass(frozen=True)
class Seat:
    """What the driver needs to know of an agent: which engine answers for it, whose weights at which turn.

    ``policies`` by turn; the last one speaks for all later turns too. ``learning`` are those whose words are trained on.
    """

    engine: str
    policies: tuple[str, ...]
    learning: frozenset[str] = frozenset()
    system: str | None = None
    role: str | None = None

    def policy(self, turn: int) -> str:
        """Whose weights speak at ``turn``."""
        return self.policies[min(turn, len(self.policies) - 1)]


Referee = Callable[[list[Dialogue]], None]
"""Looks at what was just said, before anybody speaks again: each dialogue it is given holds the new utterances only."""


@dataclass
class _Live:
    """A dialogue in progress."""

    dialogue: Dialogue
    play: Play
    asks: list[Ask] = field(default_factory=list)
    transcripts: dict[str, Transcript] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)


def play_dialogues(
    examples: list[Example],
    task: Task,
    protocol: Protocol,
    seats: Mapping[str, Seat],
    engines: Mapping[str, Engine],
    temperature: float,
    rollouts: list[int] | None = None,
    referee: Referee | None = None,
) -> list[Dialogue]:
    """Play every example to its end and return the dialogues in order.

    All dialogues advance together: what they ask in one step goes to each engine as one call, and what was said to the
    ``referee`` as one. ``rollouts`` numbers siblings, where an example stands several times.
    """
    live = []
    for number, example in enumerate(examples):
        dialogue = Dialogue(example, [], prompt=number, rollout=rollouts[number] if rollouts else 0)
        play = protocol.play(replace(example, question=task.question(example)), tuple(seats))
        live.append(_Live(dialogue, play))
    dialogues = [one.dialogue for one in live]
    live = [one for one in live if _advance(one, None, seats)]
    step = -1
    while live:
        step += 1
        requests = [request for one in live for request in _requests(one, seats)]
        replies = _answer(requests, seats, engines, temperature)
        said = [
            _utterance(request, reply, step, seats[request.ask.agent])
            for request, reply in zip(requests, replies, strict=True)
        ]
        news = []
        for one in live:
            new, said = said[: len(one.asks)], said[len(one.asks) :]
            one.dialogue.utterances += new
            news.append(new)
        if referee is not None:
            referee([replace(one.dialogue, utterances=new) for one, new in zip(live, news, strict=True)])
        live = [one for one, new in zip(live, news, strict=True) if _advance(one, new, seats)]
    return dialogues


def _advance(one: _Live, said: list[Utterance] | None, seats: Mapping[str, Seat]) -> bool:
    """Send the replies in and fetch the next asks; False when the dialogue is over."""
    try:
        one.asks = next(one.play) if said is None else one.play.send(said)
    except StopIteration as end:
        one.dialogue.outcome = end.value
        return False
    for ask in one.asks:
        if ask.agent not in seats:
            raise ValueError(
                f"the protocol asks agent {ask.agent!r} but agents are {list(seats)}; add it to the team or mend the protocol"
            )
    return True


def _requests(one: _Live, seats: Mapping[str, Seat]) -> list[Request]:
    requests = []
    speaking: set[str] = set()
    for offset, ask in enumerate(one.asks):
        turn = one.turns.get(ask.agent, 0)
        one.turns[ask.agent] = turn + 1
        begins = ask.fresh or ask.agent not in one.transcripts
        transcript = Transcript() if ask.fresh else one.transcripts.setdefault(ask.agent, Transcript())
        if not ask.fresh and ask.agent in speaking:
            raise ValueError(
                f"the protocol asks agent {ask.agent!r} twice in one step, so its conversation would fork; ask it in two "
                "steps, or with fresh=True"
            )
        speaking |= set() if ask.fresh else {ask.agent}
        seat = seats[ask.agent]
        if begins and seat.system:
            ask = replace(ask, messages=[{"role": "system", "content": seat.system}, *ask.messages])
        label = f"agent {ask.agent!r}, turn {turn + 1}, dialogue {one.dialogue.example.id}.{one.dialogue.rollout}"
        number = len(one.dialogue.utterances) + offset
        requests.append(Request(ask, one.dialogue.example, turn, number, transcript, label, seat.policy(turn)))
    return requests


def _answer(
    requests: list[Request], seats: Mapping[str, Seat], engines: Mapping[str, Engine], temperature: float
) -> list[Reply]:
    replies: list[Any] = [None] * len(requests)
    for engine in dict.fromkeys(seats[r.ask.agent].engine for r in requests):
        rows = [i for i, r in enumerate(requests) if seats[r.ask.agent].engine == engine]
        for row, reply in zip(rows, engines[engine].generate([requests[i] for i in rows], temperature), strict=True):
            replies[row] = reply
    return replies


def _utterance(request: Request, reply: Reply, step: int, seat: Seat) -> Utterance:
    ask = request.ask
    return Utterance(
        id=request.utterance,
        agent=ask.agent,
        policy=request.policy,
        turn=request.turn,
        order=step,
        messages=list(ask.messages),
        text=reply.text,
        role=ask.role or seat.role,
        parents=ask.parents,
        caller=ask.caller,
        prompt_ids=reply.prompt_ids,
        response_ids=reply.response_ids,
        logprobs=reply.logprobs,
        stop=reply.stop,
        trainable=request.policy in seat.learning and bool(reply.response_ids),
        answers=ask.answers,
    )
