"""Play many dialogues at once, and fork them.

Each policy answers one batch at each step. Engines that take requests as they come let each dialogue go on by itself.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from maporl.config.imports import told
from maporl.engines.base import Engine, Reply, Request, wait_for
from maporl.engines.transcript import Transcript
from maporl.errors import ConfigError, UserError
from maporl.protocols.base import Play, Protocol, must_be_asks, must_be_play
from maporl.rollout.episode import Episode, SpeakerSpec, Step
from maporl.rollout.referee import Referee
from maporl.tasks.base import Task
from maporl.types import Dialogue, Example, Message, Utterance
from trl_ext.ppo_options import Decoding


class RolloutDriver:
    """Opens dialogues, advances many of them by one step, and forks a dialogue at any of its steps.

    A fork replays the protocol on the same utterances. A protocol must therefore ask the same when it is sent the same.
    It takes its random numbers from ``example.id`` and ``example.meta["rollout"]``.

    Names consist of places (question, rollout, utterance, step) and not of counters. They do not depend on the order in
    which dialogues are played.

    Args:
        task: turns examples into questions.
        protocol: decides who speaks when.
        specs: the agents that play, in order.
        engines: the engines by the names that ``specs`` use.
        decoding: how answers are sampled.
        referee: sees the new utterances of each step before the next step begins.
        common_seed: whether a protocol has the same random numbers in all dialogues of a question.
        rng_key: the key of all random numbers. Those of an utterance depend on this key and on the utterance's place in
            its dialogue. They do not depend on batches or processes. None uses torch's random state.
        first: the number of the first question, if other processes play other questions.
    """

    def __init__(
        self,
        task: Task,
        protocol: Protocol,
        specs: Mapping[str, SpeakerSpec],
        engines: Mapping[str, Engine],
        decoding: Decoding,
        referee: Referee | None = None,
        common_seed: bool = True,
        rng_key: tuple | None = None,
        first: int = 0,
    ):
        self.task, self.protocol, self.specs, self.engines = task, protocol, specs, engines
        self.decoding, self.common_seed, self.rng_key, self.first = decoding, common_seed, rng_key, first
        self.referee = referee or Referee()

    def open(self, example: Example, prompt: int, rollout: int = 0) -> Episode:
        """Open a dialogue on ``example``, ready for its first step.

        ``prompt`` and ``rollout`` are its numbers in the batch.

        Raises:
            ConfigError: the protocol asks an agent that is not among the speakers, or names parents that nobody has said.
        """
        dialogue = Dialogue(example, [], prompt=self.first + prompt, rollout=rollout)
        episode = Episode(dialogue, self._play(example, rollout), rollout)
        self._advance(episode, None)
        return episode

    def fork(self, episode: Episode, rollout: int, steps: int | None = None) -> Episode:
        """Return a copy of ``episode`` as it was after ``steps`` steps, by default as it is now.

        ``rollout`` is the copy's number in the batch.
        """
        steps = len(episode.sent) if steps is None else steps
        dialogue = Dialogue(episode.dialogue.example, [], prompt=episode.dialogue.prompt, rollout=rollout)
        fork = Episode(dialogue, self._play(dialogue.example, episode.seed), episode.seed)
        self._advance(fork, None)
        for utterances in episode.sent[:steps]:
            fork.turns |= {u.agent: u.turn + 1 for u in utterances}
            copies = [_shared_copy(u, episode.dialogue.rollout) for u in utterances]
            dialogue.utterances += copies
            self._advance(fork, copies)
        for agent in {u.agent for u in dialogue.utterances if not u.fresh}:
            fork.transcripts[agent] = episode.transcripts[agent].after(
                [u for u in dialogue.utterances if u.agent == agent and not u.fresh]
            )
        return fork

    def branch(self, episode: Episode, rollouts: list[int]) -> list[Episode]:
        """Return ``episode`` and one fork of it for each number in ``rollouts``.

        The next utterances of all of them record that they were said in the same state.
        """
        dialogue = episode.dialogue
        episode.state = f"question {dialogue.prompt}, rollout {dialogue.rollout}, step {len(episode.sent)}"
        forks = [self.fork(episode, rollout) for rollout in rollouts]
        for fork in forks:
            fork.state = episode.state
        return [episode, *forks]

    def step(self, episodes: list[Episode]) -> list[list[Utterance]]:
        """Answer what each episode asks for, all in one batch. Return the new utterances of each episode.

        Raises:
            ConfigError: a protocol asks an agent twice in one step, asks an agent that is not among the speakers, or names
                parents that nobody has said.
        """
        with self._released_if_it_fails():
            steps = self._ask(episodes)
            self._answered(steps, every=True)
        return self._take(steps)

    def put(self, episode: Episode, said: list[tuple[Episode, Utterance]]) -> None:
        """Give ``episode`` copies of other episodes' utterances as its next step.

        ``said`` has those episodes and their utterances, which were said in the same state.
        """
        copies = [_shared_copy(u, other.dialogue.rollout) for other, u in said]
        episode.dialogue.utterances += copies
        for (other, _), u in zip(said, copies, strict=True):
            episode.turns[u.agent] = u.turn + 1
            if not u.fresh:
                spoken = [v for v in episode.dialogue.utterances if v.agent == u.agent and not v.fresh]
                episode.transcripts[u.agent] = other.transcripts[u.agent].after(spoken)
        self._advance(episode, copies)

    def finish(self, episodes: list[Episode]) -> None:
        """Play all ``episodes`` to their ends.

        An episode takes its next step as soon as its own answers are there, if all engines answer continuously. If an
        engine answers in batches, or the referee works on them, all episodes take their steps together.
        """
        every = self.referee.batches or not all(self.engines[s.engine].continuous for s in self.specs.values())
        steps: list[Step] = []
        ready = [episode for episode in episodes if not episode.over]
        while ready or steps:
            with self._released_if_it_fails():
                steps += self._ask(ready)
                done = self._answered(steps, every)
            taken = [steps[number] for number in done]
            steps = [step for number, step in enumerate(steps) if number not in set(done)]
            self._take(taken)
            ready = [step.episode for step in taken if not step.episode.over]

    def release(self) -> None:
        """Let engines drop what they keep of dialogues in progress."""
        for engine in self.engines.values():
            engine.release()

    def play(self, examples: list[Example], rollouts: int = 1) -> list[Dialogue]:
        """Play ``rollouts`` dialogues on every example to their ends. Dialogues of one example stand together."""
        episodes = [self.open(e, prompt, r) for prompt, e in enumerate(examples) for r in range(rollouts)]
        self.finish(episodes)
        self.release()
        return [episode.dialogue for episode in episodes]

    # -- one step -----------------------------------------------------------------------------------------------------

    def _play(self, example: Example, rollout: int) -> Play:
        meta = example.meta | {"rollout": 0 if self.common_seed else rollout}
        play = self.protocol.play(replace(example, question=self.task.question(example), meta=meta), tuple(self.specs))
        return must_be_play(play, f"protocol {self.protocol.label}")

    def _advance(self, episode: Episode, utterances: list[Utterance] | None) -> None:
        """Send the protocol its utterances and take its next asks, or mark the dialogue as over.

        None starts the protocol.
        """
        if utterances is not None:
            episode.sent.append(utterances)
        try:
            asks = next(episode.play) if utterances is None else episode.play.send(utterances)
        except StopIteration as end:
            episode.dialogue.outcome, episode.over, episode.asks = end.value, True, []
            return
        except UserError:
            raise
        except Exception as error:
            folder = Path(inspect.getfile(type(self.protocol))).parent
            raise ConfigError(f"protocol {self.protocol.label}: its play failed: {told(error, [folder])}") from error
        episode.asks = must_be_asks(asks, f"protocol {self.protocol.label}")
        for ask in episode.asks:
            if ask.agent not in self.specs:
                raise ConfigError(
                    f"the protocol asks agent {ask.agent!r} but agents are {list(self.specs)}; add it to the team or mend the "
                    "protocol"
                )
            said = range(len(episode.dialogue.utterances))
            if ask.parents and any(parent not in said for parent in ask.parents):
                raise ConfigError(
                    f"the protocol asks agent {ask.agent!r} with parents={tuple(ask.parents)!r:.80}, but only utterances 0 to "
                    f"{len(said) - 1} were said; give the ids of utterances that it received, such as parents=(said.id,)"
                    if said
                    else f"the protocol asks agent {ask.agent!r} with parents={tuple(ask.parents)!r:.80}, but nothing was said yet"
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
                raise ConfigError(
                    f"the protocol asks agent {ask.agent!r} twice in one step, so its conversation would fork; ask it in two "
                    "steps, or with fresh=True"
                )
            speaking |= set() if ask.fresh else {ask.agent}
            spec = self.specs[ask.agent]
            if begins:
                before = [] if ask.fresh else self.task.before_question(dialogue.example)
                if first := opening(spec.system, before):
                    ask = replace(ask, messages=[*first, *ask.messages])
            transcript.messages += ask.messages
            label = f"agent {ask.agent!r}, turn {turn + 1}, dialogue {dialogue.example.id}.{dialogue.rollout}"
            number = len(dialogue.utterances) + offset
            key = None if self.rng_key is None else (*self.rng_key, dialogue.prompt, dialogue.rollout, number)
            heard = tuple(dialogue.utterances[parent] for parent in ask.parents)
            requests.append(
                Request(ask, dialogue.example, turn, number, transcript, label, spec.policy(turn), key, heard)
            )
        return requests

    def _ask(self, episodes: list[Episode]) -> list[Step]:
        """Submit what the episodes ask for. Each engine is called once."""
        steps = [Step(episode, self._requests(episode), []) for episode in episodes]
        requests = [request for step in steps for request in step.requests]
        pending: list[Any] = [None] * len(requests)
        names = dict.fromkeys(self.specs[r.ask.agent].engine for r in requests)
        # an engine that answers at once keeps this thread, while the servers of others can work already
        for engine in sorted(names, key=lambda name: not self.engines[name].continuous):
            rows = [i for i, r in enumerate(requests) if self.specs[r.ask.agent].engine == engine]
            submitted = self.engines[engine].submit([requests[i] for i in rows], self.decoding)
            for row, one in zip(rows, submitted, strict=True):
                pending[row] = one
        left = iter(pending)
        for step in steps:
            step.pending.extend(next(left) for _ in step.requests)
        return steps

    def _answered(self, steps: list[Step], every: bool) -> list[int]:
        """Wait for a step that is answered, or for every one. Return the numbers of the answered ones."""

        def advance() -> bool:
            busy = [engine.advance() for engine in self.engines.values()]
            return any(busy)

        return wait_for([[one.future for one in step.pending] for step in steps], advance, every)

    @contextmanager
    def _released_if_it_fails(self) -> Iterator[None]:
        """Let engines give up what is left if an answer fails, because nobody will read it."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _take(self, steps: list[Step]) -> list[list[Utterance]]:
        """Give answered steps to their episodes and to the referee. Return the new utterances of each."""
        new = []
        for step in steps:
            episode = step.episode
            replies = [one.reply() for one in step.pending]
            utterances = [
                self._utterance(request, reply, len(episode.sent))
                for request, reply in zip(step.requests, replies, strict=True)
            ]
            for u in utterances:
                if episode.state is not None:
                    u.tags.setdefault("state", episode.state)
            episode.state = None
            episode.dialogue.utterances += utterances
            new.append(utterances)
        for step, utterances in zip(steps, new, strict=True):
            self.referee.see(replace(step.episode.dialogue, utterances=utterances))
        self.referee.settle()
        for step, utterances in zip(steps, new, strict=True):
            self._advance(step.episode, utterances)
        return new

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


def opening(system: str | None, before: list[Message]) -> list[Message]:
    """Return how a conversation begins: an agent's ``system`` prompt, and the messages ``before`` the question.

    A chat template takes one system prompt, so an agent's own stands above that of the messages.
    """
    if not system:
        return before
    if before and before[0]["role"] == "system":
        return [{"role": "system", "content": f"{system}\n\n{before[0]['content']}"}, *before[1:]]
    return [{"role": "system", "content": system}, *before]


def _shared_copy(utterance: Utterance, rollout: int) -> Utterance:
    """Return a copy of an utterance of the dialogue ``rollout``. Both get the same ``sample`` name."""
    if utterance.sample is None:
        utterance.sample = f"{rollout}.{utterance.id}"
    return replace(utterance, rewards=dict(utterance.rewards), tags=copy.copy(utterance.tags))
