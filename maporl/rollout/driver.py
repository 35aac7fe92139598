"""Playing many dialogues in lock-step, so that each policy answers one batch per step; and forking them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.transcript import Transcript
from maporl.protocols.base import Play, Protocol
from maporl.rollout.referee import Referee
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


@dataclass
class Episode:
    """A dialogue in progress.

    ``sent`` is what the protocol was sent so far, step by step. ``seed`` is the number of the rollout that its protocol draws from.
    ``state`` names the fork whose next step it plays.
    """

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
    """Opens dialogues, advances many by one step, and forks one at any step it has been through.

    A fork replays the protocol on what was said. Therefore a protocol must ask the same again when it is sent the same; what it
    draws at random it draws from ``example.id`` and ``example.meta["rollout"]``.

    Whatever is numbered here is named by its place (question, rollout, utterance, step) and not by a counter, so that names do not
    depend on the order of playing.

    Args:
        task: puts the examples' questions.
        protocol: who speaks when.
        specs: the agents that play, in order.
        engines: by the names that ``specs`` use.
        temperature: of sampling; 0 is greedy.
        referee: looks at what was just said, before anybody speaks again.
        common_seed: whether what a protocol draws at random is the same in all dialogues of a question.
        rng_key: names the random numbers of everything said here. An answer's depend on it and on the answer's place in its
            dialogue, so that they are the same however dialogues are spread over batches or processes. None: torch's random state.
        first: the number of the first question, where others are played elsewhere.
    """

    def __init__(
        self,
        task: Task,
        protocol: Protocol,
        specs: Mapping[str, SpeakerSpec],
        engines: Mapping[str, Engine],
        temperature: float,
        referee: Referee | None = None,
        common_seed: bool = True,
        rng_key: tuple | None = None,
        first: int = 0,
    ):
        self.task, self.protocol, self.specs, self.engines = task, protocol, specs, engines
        self.temperature, self.common_seed, self.rng_key, self.first = temperature, common_seed, rng_key, first
        self.referee = referee or Referee()

    def open(self, example: Example, prompt: int, rollout: int = 0) -> Episode:
        """A new dialogue, ready for its first step; ``prompt`` and ``rollout`` name it in the batch."""
        dialogue = Dialogue(example, [], prompt=self.first + prompt, rollout=rollout)
        episode = Episode(dialogue, self._play(example, rollout), rollout)
        self._advance(episode, None)
        return episode

    def fork(self, episode: Episode, rollout: int, steps: int | None = None) -> Episode:
        """A copy of ``episode`` as it was after ``steps`` steps (default: as it is), named ``rollout`` in the batch."""
        steps = len(episode.sent) if steps is None else steps
        dialogue = Dialogue(episode.dialogue.example, [], prompt=episode.dialogue.prompt, rollout=rollout)
        twin = Episode(dialogue, self._play(dialogue.example, episode.seed), episode.seed)
        self._advance(twin, None)
        for said in episode.sent[:steps]:
            twin.turns |= {u.agent: u.turn + 1 for u in said}
            copies = [_shared_copy(u, episode.dialogue.rollout) for u in said]
            dialogue.utterances += copies
            self._advance(twin, copies)
        for agent in {u.agent for u in dialogue.utterances if not u.fresh}:
            twin.transcripts[agent] = episode.transcripts[agent].after(
                [u for u in dialogue.utterances if u.agent == agent and not u.fresh]
            )
        return twin

    def branch(self, episode: Episode, rollouts: list[int]) -> list[Episode]:
        """``episode`` and forks of it, named ``rollouts``; what they say next is said in one and the same state."""
        dialogue = episode.dialogue
        episode.state = f"question {dialogue.prompt}, rollout {dialogue.rollout}, step {len(episode.sent)}"
        twins = [self.fork(episode, rollout) for rollout in rollouts]
        for twin in twins:
            twin.state = episode.state
        return [episode, *twins]

    def step(self, episodes: list[Episode]) -> list[list[Utterance]]:
        """Let each say what it asks for, all in one batch; returns what was said in each."""
        requests = [request for episode in episodes for request in self._requests(episode)]
        pairs = iter(zip(requests, self._replies(requests), strict=True))
        news = []
        for episode in episodes:
            said = [self._utterance(*next(pairs), len(episode.sent)) for _ in episode.asks]
            for u in said:
                if episode.state is not None:
                    u.tags.setdefault("state", episode.state)
            episode.state = None
            episode.dialogue.utterances += said
            news.append(said)
        for episode, said in zip(episodes, news, strict=True):
            self.referee.see(replace(episode.dialogue, utterances=said))
        self.referee.settle()
        for episode, said in zip(episodes, news, strict=True):
            self._advance(episode, said)
        return news

    def put(self, episode: Episode, said: list[tuple[Episode, Utterance]]) -> None:
        """Give ``episode`` as its next step what others said in the same place."""
        copies = [_shared_copy(u, other.dialogue.rollout) for other, u in said]
        episode.dialogue.utterances += copies
        for (other, _), u in zip(said, copies, strict=True):
            episode.turns[u.agent] = u.turn + 1
            if not u.fresh:
                own = [v for v in episode.dialogue.utterances if v.agent == u.agent and not v.fresh]
                episode.transcripts[u.agent] = other.transcripts[u.agent].after(own)
        self._advance(episode, copies)

    def finish(self, episodes: list[Episode]) -> None:
        """Play all of them to their ends."""
        while episodes := [episode for episode in episodes if not episode.over]:
            self.step(episodes)

    def release(self) -> None:
        """Let engines drop what they kept of dialogues in progress."""
        for engine in self.engines.values():
            engine.release()

    def play(self, examples: list[Example], rollouts: int = 1) -> list[Dialogue]:
        """``rollouts`` dialogues on every example, to their ends, in order; those of one example together."""
        episodes = [self.open(e, prompt, r) for prompt, e in enumerate(examples) for r in range(rollouts)]
        self.finish(episodes)
        self.release()
        return [episode.dialogue for episode in episodes]

    # -- one step -----------------------------------------------------------------------------------------------------

    def _play(self, example: Example, rollout: int) -> Play:
        meta = example.meta | {"rollout": 0 if self.common_seed else rollout}
        return self.protocol.play(replace(example, question=self.task.question(example), meta=meta), tuple(self.specs))

    def _advance(self, episode: Episode, said: list[Utterance] | None) -> None:
        """Send the replies in and fetch the next asks, or mark the dialogue as over."""
        try:
            if said is None:
                episode.asks = next(episode.play)
            else:
                episode.sent.append(said)
                episode.asks = episode.play.send(said)
        except StopIteration as end:
            episode.dialogue.outcome, episode.over, episode.asks = end.value, True, []
            return
        for ask in episode.asks:
            if ask.agent not in self.specs:
                raise ValueError(
                    f"the protocol asks agent {ask.agent!r} but agents are {list(self.specs)}; add it to the team or mend the "
                    "protocol"
                )

    def _requests(self, episode: Episode) -> list[Request]:
        requests = []
        dialogue = episode.dialogue
        speaking: set[str] = set()
        for offset, ask in enumerate(episode.asks):
            turn = episode.turns.get(ask.agent, 0)
            episode.turns[ask.agent] = turn + 1
            begins = ask.fresh or ask.agent not in episode.transcripts
            transcript = Transcript() if ask.fresh else episode.transcripts.setdefault(ask.agent, Transcript())
            if not ask.fresh and ask.agent in speaking:
                raise ValueError(
                    f"the protocol asks agent {ask.agent!r} twice in one step, so its conversation would fork; ask it in two "
                    "steps, or with fresh=True"
                )
            speaking |= set() if ask.fresh else {ask.agent}
            spec = self.specs[ask.agent]
            if begins and spec.system:
                ask = replace(ask, messages=[{"role": "system", "content": spec.system}, *ask.messages])
            transcript.messages += ask.messages
            label = f"agent {ask.agent!r}, turn {turn + 1}, dialogue {dialogue.example.id}.{dialogue.rollout}"
            number = len(dialogue.utterances) + offset
            key = None if self.rng_key is None else (*self.rng_key, dialogue.prompt, dialogue.rollout, number)
            requests.append(Request(ask, dialogue.example, turn, number, transcript, label, spec.policy(turn), key))
        return requests

    def _replies(self, requests: list[Request]) -> list[Reply]:
        """The replies in order; the requests of each engine are one call."""
        replies: list[Any] = [None] * len(requests)
        for engine in dict.fromkeys(self.specs[r.ask.agent].engine for r in requests):
            rows = [i for i, r in enumerate(requests) if self.specs[r.ask.agent].engine == engine]
            answered = self.engines[engine].generate([requests[i] for i in rows], self.temperature)
            for row, reply in zip(rows, answered, strict=True):
                replies[row] = reply
        return replies

    def _utterance(self, request: Request, reply: Reply, step: int) -> Utterance:
        ask = request.ask
        spec = self.specs[ask.agent]
        request.transcript.messages.append({"role": "assistant", "content": reply.text})
        return Utterance(
            id=request.utterance,
            agent=ask.agent,
            policy=request.policy,
            turn=request.turn,
            order=step,
            messages=list(ask.messages),
            text=reply.text,
            role=ask.role or spec.role,
            parents=ask.parents,
            caller=ask.caller,
            prompt_ids=reply.prompt_ids,
            response_ids=reply.response_ids,
            logprobs=reply.logprobs,
            stop=reply.stop,
            trainable=request.policy in spec.learning and bool(reply.response_ids),
            answers=ask.answers,
            fresh=ask.fresh,
            tags=dict(ask.tags),
        )


def _shared_copy(utterance: Utterance, rollout: int) -> Utterance:
    """A copy of what was said in the dialogue ``rollout``, under a name that it shares with the original: where it was first said."""
    if utterance.sample is None:
        utterance.sample = f"{rollout}.{utterance.id}"
    return replace(utterance, rewards=dict(utterance.rewards), tags=copy.copy(utterance.tags))
