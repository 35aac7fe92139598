"""Playing: many dialogues in lock-step, so that each policy answers one batch per step; and forking them."""

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.transcript import Transcript
from maporl.protocols.base import Play, Protocol
from maporl.tasks.base import Task
from maporl.types import Ask, Dialogue, Example, Utterance


@dataclass(frozen=True)
class SpeakerSpec:
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
class Episode:
    """A dialogue in progress: ``sent`` is what the protocol was sent so far, step by step; ``seed`` the number of the
    rollout that its protocol draws from; ``state`` names the fork whose next step it plays."""

    dialogue: Dialogue
    play: Play
    seed: int = 0
    asks: list[Ask] = field(default_factory=list)
    sent: list[list[Utterance]] = field(default_factory=list)
    transcripts: dict[str, Transcript] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    over: bool = False
    state: str | None = None


class RolloutDriver:
    """Where dialogues are played: opens them, advances many by one step, and forks one at any step it has been through.

    A fork replays the protocol on what was said, so a protocol must ask the same again when it is sent the same; what it
    draws at random it draws from ``example.id`` and ``example.meta["rollout"]``.

    ``draw`` names the random numbers of everything said here: an answer's depend on it and on the answer's place in its
    dialogue, so that they are the same however dialogues are spread over batches or processes. None: torch's random state.
    ``first`` is the number of the first question, where others are played elsewhere.
    """

    def __init__(
        self,
        task: Task,
        protocol: Protocol,
        seats: Mapping[str, SpeakerSpec],
        engines: Mapping[str, Engine],
        temperature: float,
        referee: Referee | None = None,
        common_seed: bool = True,
        draw: tuple | None = None,
        first: int = 0,
    ):
        self.task, self.protocol, self.seats, self.engines = task, protocol, seats, engines
        self.temperature, self.referee, self.common_seed = temperature, referee, common_seed
        self.draw, self.first = draw, first
        self._samples = itertools.count()
        self._states = itertools.count()

    def open(self, example: Example, prompt: int, rollout: int = 0) -> Episode:
        """A new dialogue, ready for its first step; ``prompt`` and ``rollout`` name it in the batch."""
        one = Episode(
            Dialogue(example, [], prompt=self.first + prompt, rollout=rollout), self._play(example, rollout), rollout
        )
        _advance(one, None, self.seats)
        return one

    def fork(self, one: Episode, rollout: int, steps: int | None = None) -> Episode:
        """A copy of ``one`` as it was after ``steps`` steps (default: as it is), named ``rollout`` in the batch."""
        steps = len(one.sent) if steps is None else steps
        dialogue = Dialogue(one.dialogue.example, [], prompt=one.dialogue.prompt, rollout=rollout)
        twin = Episode(dialogue, self._play(dialogue.example, one.seed), one.seed)
        _advance(twin, None, self.seats)
        for said in one.sent[:steps]:
            twin.turns |= {u.agent: u.turn + 1 for u in said}
            copies = [self._copy(u) for u in said]
            dialogue.utterances += copies
            _advance(twin, copies, self.seats)
        for agent in {u.agent for u in dialogue.utterances if not u.fresh}:
            twin.transcripts[agent] = one.transcripts[agent].after(
                [u for u in dialogue.utterances if u.agent == agent and not u.fresh]
            )
        return twin

    def branch(self, one: Episode, rollouts: list[int]) -> list[Episode]:
        """``one`` and forks of it, named ``rollouts``; what they say next was said in one and the same state."""
        one.state = f"fork {self.first}.{next(self._states)}"
        twins = [self.fork(one, rollout) for rollout in rollouts]
        for twin in twins:
            twin.state = one.state
        return [one, *twins]

    def step(self, live: list[Episode]) -> list[list[Utterance]]:
        """Let each say what it asks for, all in one batch; returns what was said in each."""
        requests = [request for one in live for request in _requests(one, self.seats, self.draw)]
        replies = _answer(requests, self.seats, self.engines, self.temperature)
        pairs = iter(zip(requests, replies, strict=True))
        news = []
        for one in live:
            said = [_utterance(*next(pairs), len(one.sent), self.seats) for _ in one.asks]
            for u in said:
                if one.state is not None:
                    u.tags.setdefault("state", one.state)
            one.state = None
            one.dialogue.utterances += said
            news.append(said)
        if self.referee is not None:
            self.referee([replace(one.dialogue, utterances=new) for one, new in zip(live, news, strict=True)])
        for one, said in zip(live, news, strict=True):
            _advance(one, said, self.seats)
        return news

    def put(self, one: Episode, said: list[tuple[Episode, Utterance]]) -> None:
        """Give ``one`` as its next step what others said in the same place."""
        copies = [self._copy(u) for _, u in said]
        one.dialogue.utterances += copies
        for (other, _), u in zip(said, copies, strict=True):
            one.turns[u.agent] = u.turn + 1
            if not u.fresh:
                own = [v for v in one.dialogue.utterances if v.agent == u.agent and not v.fresh]
                one.transcripts[u.agent] = other.transcripts[u.agent].after(own)
        _advance(one, copies, self.seats)

    def finish(self, live: list[Episode]) -> None:
        """Play all of them to their ends."""
        while live := [one for one in live if not one.over]:
            self.step(live)

    def release(self) -> None:
        """Let engines drop what they kept of dialogues in progress."""
        for engine in self.engines.values():
            if hasattr(engine, "release"):
                engine.release()

    def play(self, examples: list[Example], rollouts: int = 1) -> list[Dialogue]:
        """``rollouts`` dialogues on every example, to their ends, in order; those of one example together."""
        live = [self.open(e, prompt, r) for prompt, e in enumerate(examples) for r in range(rollouts)]
        self.finish(live)
        self.release()
        return [one.dialogue for one in live]

    def _play(self, example: Example, rollout: int) -> Play:
        meta = example.meta | {"rollout": 0 if self.common_seed else rollout}
        return self.protocol.play(replace(example, question=self.task.question(example), meta=meta), tuple(self.seats))

    def _copy(self, utterance: Utterance) -> Utterance:
        if utterance.sample is None:
            utterance.sample = next(self._samples)
        return replace(utterance, rewards=dict(utterance.rewards), tags=copy.copy(utterance.tags))


def play_dialogues(
    examples: list[Example],
    task: Task,
    protocol: Protocol,
    seats: Mapping[str, SpeakerSpec],
    engines: Mapping[str, Engine],
    temperature: float,
    referee: Referee | None = None,
) -> list[Dialogue]:
    """Play every example once, to its end, and return the dialogues in order.

    All dialogues advance together: what they ask in one step goes to each engine as one call, and what was said to the
    ``referee`` as one.
    """
    return RolloutDriver(task, protocol, seats, engines, temperature, referee).play(examples)


def _advance(one: Episode, said: list[Utterance] | None, seats: Mapping[str, SpeakerSpec]) -> None:
    """Send the replies in and fetch the next asks, or mark the dialogue as over."""
    try:
        if said is None:
            one.asks = next(one.play)
        else:
            one.sent.append(said)
            one.asks = one.play.send(said)
    except StopIteration as end:
        one.dialogue.outcome, one.over, one.asks = end.value, True, []
        return
    for ask in one.asks:
        if ask.agent not in seats:
            raise ValueError(
                f"the protocol asks agent {ask.agent!r} but agents are {list(seats)}; add it to the team or mend the protocol"
            )


def _requests(one: Episode, seats: Mapping[str, SpeakerSpec], draw: tuple | None) -> list[Request]:
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
        transcript.messages += ask.messages
        label = f"agent {ask.agent!r}, turn {turn + 1}, dialogue {one.dialogue.example.id}.{one.dialogue.rollout}"
        number = len(one.dialogue.utterances) + offset
        own = None if draw is None else (*draw, one.dialogue.prompt, one.dialogue.rollout, number)
        requests.append(Request(ask, one.dialogue.example, turn, number, transcript, label, seat.policy(turn), own))
    return requests


def _answer(
    requests: list[Request], seats: Mapping[str, SpeakerSpec], engines: Mapping[str, Engine], temperature: float
) -> list[Reply]:
    replies: list[Any] = [None] * len(requests)
    for engine in dict.fromkeys(seats[r.ask.agent].engine for r in requests):
        rows = [i for i, r in enumerate(requests) if seats[r.ask.agent].engine == engine]
        for row, reply in zip(rows, engines[engine].generate([requests[i] for i in rows], temperature), strict=True):
            replies[row] = reply
    return replies


def _utterance(request: Request, reply: Reply, step: int, seats: Mapping[str, SpeakerSpec]) -> Utterance:
    ask = request.ask
    seat = seats[ask.agent]
    request.transcript.messages.append({"role": "assistant", "content": reply.text})
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
        fresh=ask.fresh,
        tags=dict(ask.tags),
    )
