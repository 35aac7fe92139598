"""Play many dialogues at once, and fork them.

Each policy answers one batch at each step. Engines that take requests as they come let each dialogue go on by itself.
"""

import copy
import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from maporl.config.imports import told
from maporl.engines.base import Engine, Pending, Reply
from maporl.environments.rooms import Rooms
from maporl.environments.turns import play_step
from maporl.environments.world import World, fork_rooms
from maporl.errors import ConfigError, UserError, one_line
from maporl.protocols.base import Dropped, Play, Protocol, must_be_moves, must_be_play
from maporl.rollout.episode import Episode, Referee, Sent, SpeakerSpec, Step, record_call, recorded_results
from maporl.rollout.interleaving import Interleaving
from maporl.rollout.requests import RequestBuilder, read_calls
from maporl.tasks.base import Task
from maporl.types import Act, Ask, Dialogue, Example, Message, Result, Utterance, Wait
from trl_ext.ppo.options import Decoding
from trl_ext.process.waits import FIRST_COMPLETED, finished
from trl_ext.sampling.engine import Ready, wait_for

GATHER = 0.02
"""The seconds for which a step that a batch engine answers waits for dialogues that may soon ask too."""
GATHER_SHARE = 0.1
"""It waits for this share of what the last step took, if that is longer: a fuller batch is worth it then."""
FIRST_STEP = 2.0
"""The seconds that the first step is taken for, because programs need a moment to start."""


class RolloutDriver:
    """Opens dialogues, advances many of them by one step, and forks a dialogue at any of its steps.

    A fork replays the protocol on the same utterances. A protocol must therefore ask the same when it is sent the same.
    It takes its random numbers from ``example.id``, ``example.meta["rollout"]`` and ``example.meta["draw"]``.

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
        numbers: the number of each question that is played, in the batch over all processes. By default 0, 1, 2 and so
            on.
        world: the tools and environments of the run.
        interleaving: lets several threads play with these tools, environments and engines.
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
        numbers: Sequence[int] | None = None,
        world: World | None = None,
        interleaving: Interleaving | None = None,
    ):
        self.task, self.protocol, self.specs, self.engines = task, protocol, specs, engines
        self.decoding, self.common_seed, self.rng_key, self.numbers = decoding, common_seed, rng_key, numbers
        self.builder = RequestBuilder(task, specs, decoding, rng_key, engines)
        self.referee = referee or Referee()
        self.world = world or World()
        self.interleaving = interleaving or Interleaving()
        self._rooms: list[Rooms] = []
        self._plays: list[Play] = []
        self._last_step = FIRST_STEP
        """The seconds that engines took for the last step."""
        self.tools = {name: spec.tools for name, spec in specs.items() if spec.tools is not None}
        self.where = f"protocol {protocol.label}"

    def open(self, example: Example, prompt: int, rollout: int = 0) -> Episode:
        """Open a dialogue on ``example``, ready for its first step.

        ``prompt`` and ``rollout`` are its numbers in the batch over all processes.

        Raises:
            ConfigError: the protocol asks an agent that is not among the speakers, or names parents that nobody has
                said.
        """
        dialogue = Dialogue(example, [], prompt=prompt, rollout=rollout)
        key = (*(self.rng_key or ()), dialogue.prompt, 0 if self.common_seed else rollout)
        prompt_messages: list[Message] = []
        if self.world.environments:  # which are told the prompt
            question = {"role": "user", "content": self.task.question(example)}
            prompt_messages = [*self.task.before_question(example), question]
        rooms = Rooms(example, key, prompt_messages)
        self._rooms.append(rooms)
        dialogue.environments = rooms.open
        episode = Episode(dialogue, self._play(example, prompt, rollout), rooms, rollout)
        self._advance(episode, None)
        return episode

    def opened(self, examples: Sequence[Example], rollouts: int = 1) -> list[Episode]:
        """Open ``rollouts`` dialogues on every example. Those of one example stand together."""
        numbers = range(len(examples)) if self.numbers is None else self.numbers
        return [self.open(e, prompt, r) for prompt, e in zip(numbers, examples, strict=True) for r in range(rollouts)]

    def draws(self, prompt: int, step: int = 0) -> random.Random:
        """Return the random numbers of a choice about question ``prompt`` before its step ``step``.

        They depend on the run's seed, the update, the question's number in the batch and the step, and not on what else
        this process plays.
        """
        return random.Random(self._key(prompt, step))

    def _key(self, *place: int) -> str:
        return repr((self.rng_key, *place))

    def fork(self, episode: Episode, rollout: int, steps: int | None = None) -> Episode:
        """Return a copy of ``episode`` as it was after ``steps`` steps, by default as it is now.

        ``rollout`` is the copy's number in the batch.

        Raises:
            ConfigError: the protocol does not ask the same again, so that its dialogues cannot be replayed.
        """
        if not self.protocol.replayable:
            raise ConfigError(
                f"{self.where}: its dialogues cannot be forked, because it may ask something else "
                "when it is played again; set branching.how: independent, or protocol.replays: true if it asks the "
                "same in the same order when it is told the same"
            )
        now = steps is None or steps == len(episode.sent)
        steps = len(episode.sent) if steps is None else steps
        dialogue = Dialogue(episode.dialogue.example, [], prompt=episode.dialogue.prompt, rollout=rollout)
        heard = {u.agent for utterances in episode.sent[:steps] for u in utterances}
        rooms = fork_rooms(self.world, episode.rooms, steps, now, heard)
        self._rooms.append(rooms)
        dialogue.environments = rooms.open
        fork = Episode(dialogue, self._play(dialogue.example, dialogue.prompt, episode.seed), rooms, episode.seed)
        self._advance(fork, None)
        for asked, utterances in zip(episode.asked, episode.sent[:steps], strict=False):
            self._ask_again(fork, asked)
            fork.turns |= {u.agent: u.turn + 1 for u in utterances}
            copies = [
                self._shared_copy(u, ask, episode.dialogue.rollout) for ask, u in zip(asked, utterances, strict=True)
            ]
            dialogue.utterances += copies
            fork.sent.append(copies)
            self._go_on([(fork, copies)], partial(recorded_results, episode.dialogue), judged=True)
        for agent in {u.agent for u in dialogue.utterances if not u.fresh}:
            last = max(u.id for u in dialogue.utterances if u.agent == agent and not u.fresh)
            fork.transcripts[agent] = episode.transcripts[agent].after(last)
        fork.apart = {u.id: episode.apart[u.id] for u in dialogue.utterances if u.id in episode.apart}
        for ask in fork.asks:
            if ask.continues is not None and ask.fresh:  # this one grows
                fork.apart[ask.continues] = episode.apart[ask.continues].after(ask.continues)
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

    def address(self, episode: Episode, agent: str) -> None:
        """Let ``agent`` say the next utterance of ``episode``, whoever the protocol asks
        (:attr:`maporl.Protocol.any_agent`).

        Raises:
            ConfigError: the protocol asks several agents at once, or one in its conversation, which another one does
                not know; or ``agent`` is not among the speakers.
        """
        if len(episode.asks) != 1 or not episode.asks[0].fresh:
            raise ConfigError(
                f"{self.where}: any_agent lets another agent say what it asks for, so it must ask "
                f"one agent at a time, with fresh=True; it asks {', '.join(ask.agent for ask in episode.asks)}; change "
                "its asks, or set any_agent = False"
            )
        asks = [replace(ask, agent=agent) for ask in episode.asks]
        self._check(asks[0], episode.dialogue.utterances)
        episode.step = play_step(asks, self.tools, episode.open_turns)
        episode.take(next(episode.step))

    def step(self, episodes: list[Episode]) -> list[list[Utterance]]:
        """Answer what each episode asks for, all in one batch. Return the new utterances of each episode.

        Raises:
            ConfigError: a protocol asks an agent twice in one step, asks an agent that is not among the speakers, or
                names parents that nobody has said.
        """
        with self._released_if_it_fails():
            self._wait_for(episodes)
            steps = self._ask([episode for episode in episodes if not episode.over])
            self._answered(steps, every=True)
        new = {id(step.episode): said for step, said in zip(steps, self._take(steps), strict=True)}
        with self._released_if_it_fails():
            self._wait_for(episodes)  # what was said may be the answer, which shows in what follows it
        return [new.get(id(episode), []) for episode in episodes]

    def give_up(self, episodes: list[Episode]) -> None:
        """End the plays of ``episodes``, with which nobody goes on."""
        for episode in episodes:
            episode.play.close()

    def put(self, episode: Episode, said: list[tuple[Episode, Utterance]]) -> None:
        """Give ``episode`` copies of other episodes' utterances as its next step.

        ``said`` has those episodes and their utterances, which were said in the same state.
        """
        self._ask_again(episode, said[0][0].asked[len(episode.sent)])
        asks = episode.asked[-1]
        copies = [self._shared_copy(u, ask, other.dialogue.rollout) for ask, (other, u) in zip(asks, said, strict=True)]
        episode.dialogue.utterances += copies
        episode.sent.append(copies)
        for (other, _), u in zip(said, copies, strict=True):
            episode.turns[u.agent] = u.turn + 1
            if not u.fresh:
                episode.transcripts[u.agent] = other.transcripts[u.agent].after(u.id)
            elif u.id in other.apart:
                episode.apart[u.id] = other.apart[u.id].after(u.id)
        self._go_on([(episode, copies)], self._act, judged=True)
        with self._released_if_it_fails():
            self._wait_for([episode])

    def finish(self, episodes: list[Episode]) -> None:
        """Play all ``episodes`` to their ends.

        An episode takes its next step as soon as its own answers are there, if all engines answer continuously. If an
        engine answers in batches, or the referee works on them, all episodes take their steps together. A step then
        waits a moment (:data:`GATHER`) for protocols that wait for something else (:class:`maporl.types.Wait`).
        """
        every = self.referee.batches or not all(self.engines[s.engine].continuous for s in self.specs.values())
        steps: list[Step] = []
        waiting: list[Episode] = []
        ready = [episode for episode in episodes if not episode.over]
        while ready or steps or waiting:
            with self._released_if_it_fails():
                waiting += [episode for episode in ready if episode.wait is not None]
                ready = [episode for episode in ready if episode.wait is None]
                if every:
                    ready += self._gather(waiting, bool(ready))
                begun = time.monotonic()
                steps += self._ask(ready)
                done = set(self._answered(steps, every, [] if every else waiting))
                self._last_step = time.monotonic() - begun
            taken = [step for number, step in enumerate(steps) if number in done]
            awake = [episode for number, episode in enumerate(waiting, len(steps)) if number in done]
            steps = [step for number, step in enumerate(steps) if number not in done]
            waiting = [episode for episode in waiting if episode not in awake]
            self._take(taken)
            self._wake(awake)
            ready = [episode for episode in [step.episode for step in taken] + awake if not episode.over]

    def release(self) -> None:
        """Close the environments of all dialogues, and let engines drop what they keep, unless others play too."""
        if not self.interleaving.others:
            for engine in self.engines.values():
                engine.release()
        self.world.drop_these(self._rooms)
        self._rooms = []
        for play in self._plays:
            play.close()
        self._plays = []

    def play(self, examples: list[Example], rollouts: int = 1) -> list[Dialogue]:
        """Play ``rollouts`` dialogues on every example to their ends. Dialogues of one example stand together."""
        episodes = self.opened(examples, rollouts)
        self.finish(episodes)
        self.release()
        return [episode.dialogue for episode in episodes]

    # -- one step -----------------------------------------------------------------------------------------------------

    def _play(self, example: Example, prompt: int, rollout: int) -> Play:
        meta = example.meta | {
            "rollout": 0 if self.common_seed else rollout,
            "draw": self._key(prompt),
            "bare_question": example.question,
            "shown_meta": self.task.show_meta(example),
        }
        play = self.protocol.play(replace(example, question=self.task.question(example), meta=meta), tuple(self.specs))
        self._plays.append(must_be_play(play, self.where))
        return self._plays[-1]

    def _advance(self, episode: Episode, values: list[Utterance] | list[Result] | list[Ask] | None) -> None:
        """Send the protocol utterances or results (None starts it), and take what it wants next, or end the play.

        What has waited is sent what it asked next when it was first played, or nothing.
        """
        episode.step, episode.asks, episode.acts, episode.wait = None, [], [], None
        try:
            moves = next(episode.play) if values is None else episode.play.send(values)
        except StopIteration as end:
            episode.dialogue.outcome, episode.over = end.value, True
            return
        except Dropped as dropped:
            episode.dialogue.lost, episode.dialogue.outcome, episode.over = dropped.args, dropped.outcome, True
            return
        except UserError:
            raise
        except Exception as error:
            folder = Path(inspect.getfile(type(self.protocol))).parent
            raise ConfigError(f"{self.where}: its play failed: {told(error, [folder])}") from error
        must_be_moves(moves, self.where)
        if isinstance(moves[0], Wait):
            episode.wait = moves[0].until
            return
        for move in moves:
            self._check(move, episode.dialogue.utterances)
        if isinstance(moves[0], Act):
            episode.acts = list(moves)
        else:
            episode.step = play_step(list(moves), self.tools, episode.open_turns)
            episode.take(next(episode.step))

    def _check(self, move: Ask | Act, utterances: Sequence[Utterance]) -> None:
        """Check that ``move`` names a speaker, and some of the ``utterances`` that were said."""
        said = len(utterances)
        if move.agent not in self.specs:
            raise ConfigError(f"the protocol asks agent {move.agent!r} but agents are {list(self.specs)}; mend it")
        if isinstance(move, Act):
            if move.of not in range(said):
                raise ConfigError(
                    f"the protocol calls {move.name!r} for utterance {move.of!r}, but {said} were said; give the id of "
                    "the utterance that the act carries out, as of=said.id"
                )
            self.world.offers.must_have(move)
        elif move.parents and any(parent not in range(said) for parent in move.parents):
            raise ConfigError(
                f"the protocol asks agent {move.agent!r} with parents={tuple(move.parents)!r:.80}, but only utterances "
                f"0 to {said - 1} were said; give the ids of utterances that it received, such as parents=(said.id,)"
                if said
                else (
                    f"the protocol asks agent {move.agent!r} with parents={tuple(move.parents)!r:.80}, but nothing was "
                    "said yet"
                )
            )
        elif move.after is not None and not any(u.id == move.after and u.agent == move.agent for u in utterances):
            raise ConfigError(
                f"the protocol asks agent {move.agent!r} with after={move.after!r:.80}, which is not an utterance of "
                "this agent; give the id of the one whose conversation goes on, as after=said.id"
            )

    def _go_on(self, sent: list[Sent], act: Callable[[list[Episode]], list[Sent]], judged: bool = False) -> None:
        """Give episodes what was said or returned by ``act``, until each asks for an utterance or is over."""
        # the referee sees the last segment of each turn before the protocol does, unless these were ``judged`` before
        while sent:
            ended: list[tuple[Episode, list[Utterance]]] = []
            for episode, values in sent:
                if episode.step is None:  # the protocol's own acts
                    self._advance(episode, values)
                    continue
                try:
                    moves = episode.step.send(values)
                except StopIteration as end:
                    self.protocol.mark_passes(end.value)
                    ended.append((episode, end.value))
                    continue
                episode.take(moves)
            if not judged:
                for episode, last in ended:
                    self.referee.see(replace(episode.dialogue, utterances=last))
                self.referee.settle()
            for episode, last in ended:
                if episode.rooms.lost:
                    self._lose(episode)
                else:
                    self._advance(episode, last)
            sent = act([episode for episode, _ in sent if episode.acts])

    def _act(self, episodes: list[Episode]) -> list[Sent]:
        """Carry out the acts of episodes, all at once. Return their results."""
        if not episodes:
            return []
        acts = [(e.rooms, len(e.sent) - 1, act) for e in episodes for act in e.acts]
        seconds = {name: tools.limits.seconds for name, tools in self.tools.items()}
        results = iter(self.world.act(acts, seconds))
        sent: list[Sent] = []
        for episode in episodes:
            episode_results = [next(results) for _ in episode.acts]
            for act, result in zip(episode.acts, episode_results, strict=True):
                record_call(episode.dialogue, act, result)
            sent.append((episode, episode_results))
        for episode in episodes:
            if episode.step is None and episode.rooms.lost:
                self._lose(episode)
        return [(episode, episode_results) for episode, episode_results in sent if not episode.over]

    def _lose(self, episode: Episode) -> None:
        """End a dialogue whose environment did not answer in time."""
        episode.dialogue.lost = tuple(episode.rooms.lost)
        episode.over, episode.step, episode.asks, episode.acts = True, None, [], []

    def _close(self, episode: Episode) -> None:
        """Pay what the environments of a dialogue pay at its end, and close them."""
        for name, payments in self.world.finish(episode.rooms).items():
            for agent, amount in payments.items():
                last = next((u for u in reversed(episode.dialogue.utterances) if u.agent == agent), None)
                if last is not None:
                    last.rewards[name] = last.rewards.get(name, 0.0) + amount
        episode.dialogue.lost = tuple(dict.fromkeys([*episode.dialogue.lost, *episode.rooms.lost]))

    def _ask(self, episodes: list[Episode]) -> list[Step]:
        """Submit what the episodes ask for. Each engine is called once."""
        self.world.begin([episode.rooms for episode in episodes])
        steps: list[Step] = []
        asked: dict[str, list[tuple[Step, int]]] = {}  # by engine: a step, and the place of a request in it
        for episode in episodes:
            requests = self.builder.requests(episode)
            episode.asked.append(episode.asks)
            pending: list[Any] = [None] * len(requests)
            step = Step(episode, requests, pending)
            steps.append(step)
            for place, request in enumerate(requests):
                if request.refusal is not None:
                    pending[place] = Pending(Ready(Reply("", refused=request.refusal)))
                elif episode.replay is not None and (reply := episode.replay(request)) is not None:
                    pending[place] = Pending(Ready(reply))
                else:
                    asked.setdefault(self.specs[request.ask.agent].engine, []).append((step, place))
        # an engine that answers at once keeps this thread, while the servers of others can work already
        for engine in sorted(asked, key=lambda name: not self.engines[name].continuous):
            submitted = self.engines[engine].submit([step.requests[n] for step, n in asked[engine]], self.decoding)
            for (step, place), answer in zip(asked[engine], submitted, strict=True):
                step.pending[place] = answer
        return steps

    def _ask_again(self, episode: Episode, asked: list[Ask]) -> None:
        """Let a dialogue that is played again go on until it asks what was ``asked`` in this step.

        Raises:
            ConfigError: it asks something else, or nothing.
        """
        with self._released_if_it_fails():
            while episode.wait is not None:
                self._awake([episode], None)
                self._advance(episode, asked)
            for before, now in zip_longest(asked, episode.asks):
                if before is None or now is None or not self._same(before, now):
                    raise ConfigError(
                        f"{self.where}: played again, it asks something else. A dialogue is forked by playing it again "
                        f"on what was said. In step {len(episode.sent) + 1} on question "
                        f"{episode.dialogue.example.id!r:.40}, {_difference(before, now)}. Let it ask the same in the "
                        "same order when it is told the same, without random numbers, times or counters of its own, "
                        "or set branching.how: independent"
                    )
            episode.asked.append(episode.asks)

    def _same(self, before: Ask, now: Ask) -> bool:
        """Return whether an ask of a dialogue that is played again is the one that was answered."""
        same_agent = self.protocol.any_agent or before.agent == now.agent  # a branching may choose who speaks
        return same_agent and all(
            getattr(before, name) == getattr(now, name) for name in ("after", "continues", "messages", "schemas")
        )

    def _wait_for(self, episodes: Sequence[Episode]) -> None:
        """Wait until each of ``episodes`` asks for an utterance, or is over."""
        while waiting := [episode for episode in episodes if episode.wait is not None]:
            self._wake(self._awake(waiting, None))

    def _awake(self, waiting: list[Episode], seconds: float | None) -> list[Episode]:
        """Return those of the ``waiting`` whose wait is over, after at most ``seconds`` if none is."""
        futures = [episode.wait for episode in waiting if episode.wait is not None]
        with self.interleaving.waiting():
            finished(futures, seconds, FIRST_COMPLETED)
        return [episode for episode in waiting if episode.wait is not None and episode.wait.done()]

    def _wake(self, episodes: list[Episode]) -> None:
        """Let episodes whose wait is over go on."""
        self._go_on([(episode, []) for episode in episodes], self._act)
        for episode in episodes:
            if episode.over:
                self._close(episode)

    def _gather(self, waiting: list[Episode], asking: bool) -> list[Episode]:
        """Wake episodes until none waits, or until others have been ``asking`` for a moment.

        Return those that ask then. ``waiting`` keeps the others.
        """
        ready: list[Episode] = []
        moment = max(GATHER, GATHER_SHARE * self._last_step)
        end = time.monotonic() + moment if asking else None
        while waiting:
            awake = self._awake(waiting, None if end is None else max(0.0, end - time.monotonic()))
            if not awake:
                break
            self._wake(awake)
            ready += [episode for episode in awake if not episode.over and episode.wait is None]
            waiting[:] = [episode for episode in waiting if not episode.over and episode.wait is not None]
            if ready and end is None:
                end = time.monotonic() + moment
        return ready

    def _answered(self, steps: list[Step], every: bool, waiting: Sequence[Episode] = ()) -> list[int]:
        """Wait for a step that is answered or an episode that wakes, or for every one.

        Return their numbers; the ``waiting`` episodes are counted after the steps.
        """

        def advance() -> bool:
            busy = [engine.advance() for engine in self.engines.values()]
            return any(busy)

        with self.interleaving.waiting():
            groups: list[list[Any]] = [[one.future for one in step.pending] for step in steps]
            groups += [[episode.wait] for episode in waiting]
            return wait_for(groups, advance, every)

    @contextmanager
    def _released_if_it_fails(self) -> Iterator[None]:
        """Let engines give up what is left if an answer fails, because nobody will read it."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _take(self, steps: list[Step]) -> list[list[Utterance]]:
        """Give answered steps to their episodes. Return the new utterances of each."""
        new = []
        for step in steps:
            episode = step.episode
            utterances = self.builder.utterances(step)
            episode.state = None
            episode.dialogue.utterances += utterances
            episode.sent.append(utterances)
            new.append(utterances)
        self._go_on([(step.episode, utterances) for step, utterances in zip(steps, new, strict=True)], self._act)
        for step in steps:
            if step.episode.over:
                self._close(step.episode)
        return new

    def _shared_copy(self, utterance: Utterance, ask: Ask, rollout: int) -> Utterance:
        """Return a copy of an utterance, which was asked with ``ask`` in the dialogue ``rollout``. Both get the same
        ``sample`` name."""
        # it has no results of calls, and nothing that these and environments have paid: replaying brings both
        if utterance.sample is None:
            utterance.sample = f"{rollout}.{utterance.id}"
        paid = self.world.offers.rewards()
        rewards = {name: value for name, value in utterance.rewards.items() if name not in paid}
        calls = read_calls(utterance, ask, self.specs[ask.agent].form_of(ask))
        return replace(utterance, rewards=rewards, tags=copy.copy(utterance.tags), calls=calls, turn_end=None)


def _difference(before: Ask | None, now: Ask | None) -> str:
    """Return in words how what is asked differs from what was asked before."""
    if before is None or now is None:
        one, how = (now, "it asks more: ") if before is None else (before, "it no longer asks ")
        assert one is not None
        return f"{how}agent {one.agent!r} with {one_line(one.messages, 160)}"
    was: Any = before.messages
    got: Any = now.messages
    if before.agent == now.agent:
        parts = [
            (*ask.messages, *ask.schemas, {"after": ask.after, "continues": ask.continues}) for ask in (before, now)
        ]
        was, got = next((b, n) for b, n in zip_longest(*parts) if b != n)
    return f"agent {before.agent!r} was asked {one_line(was, 160)}, and agent {now.agent!r} now {one_line(got, 160)}"
