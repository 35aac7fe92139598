"""The address of a trained team: each agent is a model, and the team that plays its protocol is one too.

Data flow: a call -> :meth:`TeamAddress.put` (server's thread) -> a thread that plays one dialogue, of which the engines
sample the utterances beside those of all other calls -> the answer. Nothing is kept between calls.
"""

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from maporl.decoding import Sampling, SpeakerSampling
from maporl.engines.base import Engine, Pending, Reply, Request
from maporl.engines.text import TextEngine, token_request
from maporl.protocols.base import Play, Protocol
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.rollout.player import Player
from maporl.run import ResolvedRun
from maporl.serving.continuous import ContinuousWeights
from maporl.serving.routes import TOO_BUSY, Call, internal
from maporl.serving.wire import MORE, ChatRequest, Refused, ask_of, refusal_of
from maporl.tasks.base import Task
from maporl.types import Ask, Dialogue, Example, Utterance
from trl_ext.chat.encoding import ChatError, PromptTooLong
from trl_ext.errors import UserError
from trl_ext.ppo.options import Decoding
from trl_ext.process.waits import Discarded, Threads, dropped_by

EVERY = 0.03
"""The seconds between two parts of a text that is told while it is said."""
TEAM = "team"
"""The model that is the whole team."""
NOT_OF_A_TEAM = {
    "schemas": "tools", "form": "response_format", "n": "n", "logprobs": "logprobs", "role": "x-maporl-role",
    "parents": "x-maporl-parents",
}  # fmt: skip
"""What a request to a team cannot have, with the names of its fields."""


@dataclass(frozen=True)
class OneAnswer(Protocol):
    """The protocol of a request to one agent: it answers a conversation."""

    ask: Ask | None = None

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Ask once."""
        assert self.ask is not None
        yield [self.ask]


class _Counts(Engine):
    """Reads prompts as ``engine`` does, and answers nothing."""

    continuous = tells_tokens = True

    def __init__(self, engine: Engine):
        assert isinstance(engine, TextEngine)  # every agent that is served has one
        self.engine = engine

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return the prompts."""
        replies = []
        for request in requests:
            try:
                voice = self.engine.policies[request.policy].voice
                read = token_request(request, voice, decoding, self.engine.max_new_tokens)
                replies.append(Reply("", prompt_ids=read.prompt_ids))
            except (PromptTooLong, ChatError) as error:
                replies.append(Reply("", refused=str(error), too_long=isinstance(error, PromptTooLong)))
        return replies


class _Streams(Engine):
    """Answers as ``engine`` does, and tells the text of an answer when it is said, as often as is read.

    What may become a stop string or a space at the end is told later, with the answer.
    """

    continuous = tells_tokens = True

    def __init__(self, tell: Callable[[str], None], engine: Engine):
        assert isinstance(engine, TextEngine)
        self.engine, self.tell, self.sent, self.later = engine, tell, "", 0.0

    def submit(self, requests: list[Request], decoding: Decoding) -> list[Pending]:
        """Begin to answer."""
        pending = self.engine.submit(requests, decoding)
        for request, one in zip(requests, pending, strict=True):
            if isinstance(one.future, Future) and isinstance(self.engine.tokens, ContinuousWeights):
                voice = self.engine.policies[request.policy].voice
                ends = voice.draw(request.sampling, decoding, 1).stop
                told = partial(self._told, voice.tokenizer, max(map(len, ends), default=0))
                self.engine.tokens.watch(one.future, told)
        return pending

    def _told(self, tokenizer: Any, held: int, ids: list[int]) -> None:
        if time.monotonic() < self.later:
            return
        self.later = time.monotonic() + EVERY
        text = tokenizer.decode(ids, skip_special_tokens=True).lstrip().removesuffix("\ufffd")
        text = text[: len(text) - held].rstrip()
        if text.startswith(self.sent) and len(text) > len(self.sent):
            self.tell(text[len(self.sent) :])
            self.sent = text


@dataclass
class Served:
    """The models of an address.

    Args:
        player: plays the agents. Its engines take requests as they come.
        task: puts questions to the team, and reads its answers.
        protocol: what the team plays.
        decoding: how answers are sampled.
        agents: the agents that can be asked.
        without: why a name cannot be asked, by name.
    """

    player: Player
    task: Task
    protocol: Protocol
    decoding: Decoding
    agents: tuple[str, ...]
    without: Mapping[str, str]


class TeamAddress:
    """The owner of an address. Requests beyond ``most`` wait, and beyond ``queue`` of these are refused.

    Args:
        served: what is served.
        most: how many requests are answered at a time.
        queue: how many others may wait.
        ignored: fields of requests that are left out.
        longest: the most tokens that a request may ask for. None: those of an answer in the run, which it may shorten.
    """

    ignored_by = "--ignore"

    def __init__(
        self, served: Served, most: int, queue: int, ignored: tuple[str, ...] = (), longest: int | None = None
    ):
        self.name = secrets.token_hex(6)  # so that ids of replies differ between servers
        self.served, self.ignored, self.most, self.queue, self.longest = served, ignored, most, queue, longest
        self.told: Callable[[str, int, float], None] = lambda model, tokens, seconds: None
        """Is told of each answer: its model, its tokens and its seconds."""
        self.agents = served.agents if TEAM in served.without else (*served.agents, TEAM)
        self.inside = 0
        """How many requests are answered or wait."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._threads = Threads(most, "answers a request", for_all=True)
        self._specs = served.player.specs()
        served.player.inform_engines()

    def put(self, call: Call) -> None:
        """Take a call, in the server's thread.

        Raises:
            Refused: too many wait.
        """
        self._begin(self._answer, call)

    def _begin(self, work: Callable[[Any], Any], asked: Any) -> "Future[Any]":
        """Begin to do ``work`` for what is ``asked``, in a thread, unless too many wait."""
        with self._lock:
            if self.inside >= self.most + self.queue:
                what = f"{self.most} requests are being answered and {self.queue} wait; ask again later"
                raise Refused(what, status=429, code=TOO_BUSY)
            self.inside += 1
        return self._threads.submit(self._inside, work, asked)

    def _inside(self, work: Callable[[Any], Any], asked: Any) -> Any:
        try:
            return work(asked)
        finally:
            with self._lock:
                self.inside -= 1

    def count(self, code: str, why: str) -> None:
        """A request that is refused is in the log of the server alone."""

    def _answer(self, call: Call) -> None:
        began = time.monotonic()
        try:
            with dropped_by(call.gone), self.served.player.interleaving.running():
                samples = self._of_team(call) if call.request.agent == TEAM else self._said(call)
            self.told(call.request.agent, sum(_tokens(one)[1] for one in samples), time.monotonic() - began)
            call.answer(*[replace(one, id=next(self._numbers)) for one in samples])
        except Discarded:  # the client has gone
            call.refuse(Refused("nobody waits for the answer", status=408, code="client_gone"))
        except Refused as error:
            call.refuse(error)
        except PromptTooLong as error:
            call.refuse(Refused(str(error), "messages", code="context_length_exceeded"))
        except UserError as error:
            call.refuse(Refused(str(error), status=502, code="failed"))
        except Exception:
            call.refuse(internal())

    # -- an agent -----------------------------------------------------------------------------------------------------

    def count_tokens(self, request: ChatRequest) -> "Future[int]":
        """Count the tokens of a request to an agent, without an answer.

        Raises:
            Refused: it is one to the team, or too many wait.
        """
        if request.agent == TEAM:
            raise Refused("count_tokens: a team reads several prompts; count those of an agent", "model")

        return self._begin(self._counted, request)

    def _counted(self, request: ChatRequest) -> int:
        with self.served.player.interleaving.running():
            return len(self._of_agent(request, _Counts)[0].prompt_ids)

    def _said(self, call: Call) -> list[Utterance]:
        """Return the answers of one agent, and tell a plain text while it is said."""
        request = call.request
        plain = request.n == 1 and not request.schemas and not request.logprobs
        if call.live and plain and self._specs[request.agent].tools is None:
            return self._of_agent(request, partial(_Streams, call.tell))
        return self._of_agent(request)

    def _of_agent(
        self, request: ChatRequest, engine: Callable[[Engine], Engine] = lambda engine: engine
    ) -> list[Utterance]:
        """Return the answers of one agent to a conversation, whose ``engine`` may be another one.

        The agent's turn is the number of its earlier messages.
        """
        turn = sum(message["role"] == "assistant" for message in request.messages)
        ask = ask_of(request, request.messages, turn=turn)
        specs = {request.agent: self._spec(request.agent, request.sampling)}
        driver = self._driver(OneAnswer(ask=ask), specs, request)
        driver.engines = {name: engine(one) for name, one in driver.engines.items()}
        dialogues = driver.play([Example("request", "", "")], request.n)
        said = [dialogue.utterances[-1] for dialogue in dialogues]
        for utterance in said:
            if (why := refusal_of(utterance)) is not None:
                raise why
        return said

    # -- the team -----------------------------------------------------------------------------------------------------

    def _of_team(self, call: Call) -> list[Utterance]:
        """Return the final answer of the team to the last message of a user."""
        request, began = call.request, time.monotonic()
        default = ChatRequest("", ())
        if asked := [name for key, name in NOT_OF_A_TEAM.items() if getattr(request, key) != getattr(default, key)]:
            raise Refused(f"{asked[0]}: a team plays its protocol, and has none of its own; ask one agent", asked[0])
        question = next((m["content"] for m in reversed(request.messages) if m["role"] == "user"), None)
        if question is None:
            raise Refused("messages: expected a message of a user, which is the question", "messages")
        values = {} if request.sampling is None else request.sampling.at(0)
        stop = values.pop("stop", ())
        specs = {name: self._spec(name, Sampling(**values) if values else None) for name in self._specs}
        driver = self._driver(self.served.protocol, specs, request)
        [episode] = driver.opened([Example("request", question, "")])
        while not episode.over:
            for utterance in driver.step([episode])[0]:
                call.tell(utterance)
        driver.release()
        self.served.player.world.drop_scored([episode.dialogue])
        return [self._final(episode.dialogue, stop, time.monotonic() - began)]

    def _final(self, dialogue: Dialogue, stop: tuple[str, ...], seconds: float) -> Utterance:
        """Return the answer in which a dialogue ends: what its program returned, or that of most of those who answered
        last."""
        last = dialogue.at(dialogue.turns() - 1)
        if dialogue.lost or not last:
            raise Refused(
                f"the team gave no answer: {dialogue.lost or dialogue.outcome!r:.200}", status=502, code="lost"
            )
        read = [self._read(utterance, dialogue) for utterance in last]
        votes = Counter(answer for answer in read if answer is not None)
        text = last[read.index(votes.most_common(1)[0][0]) if votes else -1].text
        if isinstance(dialogue.outcome, dict) and isinstance(dialogue.outcome.get("answer"), str):
            text = dialogue.outcome["answer"]
        text = min((text.split(end, 1)[0] for end in stop), key=len, default=text)
        counts = [_tokens(utterance) for utterance in dialogue.utterances]
        usage = [sum(prompt for prompt, _ in counts), sum(new for _, new in counts)]
        told = {
            "dialogue": [_told(utterance) for utterance in dialogue.utterances],
            "votes": dict(votes),
            "tokens": {"prompt": usage[0], "completion": usage[1]},
            "seconds": round(seconds, 3),
        }
        return Utterance(0, TEAM, "", 0, 0, [], text, tags={"usage": usage, MORE: told})

    def _read(self, utterance: Utterance, dialogue: Dialogue) -> str | None:
        """Return the final answer in an utterance, or None if the task reads none."""
        try:
            return self.served.task.grade(dialogue.asked(utterance), utterance.text).answer
        except (UserError, LookupError, TypeError, ValueError):  # it grades by what only its own examples have
            return None

    # -- both ---------------------------------------------------------------------------------------------------------

    def _spec(self, agent: str, asked: Sampling | None) -> SpeakerSpec:
        """Return an agent that samples as in evaluations, where a request does not say otherwise."""
        spec = self._specs[agent]
        spec = replace(spec, longest=self.longest or spec.longest)
        if asked is None:
            return spec
        own = spec.sampling or SpeakerSampling()
        values = {name: value for name, value in vars(asked).items() if value is not None}
        if "max_tokens" in values and spec.longest is not None:
            values["max_tokens"] = min(spec.longest, values["max_tokens"])
        held_out = replace(own.held_out or Sampling(), **values)
        return replace(spec, sampling=replace(own, held_out=held_out))

    def _driver(self, protocol: Protocol, specs: Mapping[str, SpeakerSpec], request: ChatRequest) -> RolloutDriver:
        player, seed = self.served.player, secrets.randbits(62) if request.seed is None else request.seed
        return RolloutDriver(
            self.served.task,
            protocol,
            specs,
            player.engines,
            self.served.decoding,
            rng_key=("served", seed),
            world=player.world,
            interleaving=player.interleaving,
        )


def why_no_team(run: ResolvedRun, task: Task) -> str | None:
    """Return why the team of a run cannot be asked a question that nobody has labelled, or None if it can."""
    protocol = run.protocol
    if protocol.own_questions or not task.has_questions:
        return f"the protocol {protocol.label} brings what is asked itself, as a game does, and takes no question"
    if protocol.grade_between_turns or protocol.score_between_turns or protocol.between_turns():
        return f"the protocol {protocol.label} shows scores between turns, for which the right answer must be known"
    if run.config.restate != "off":
        return "restate: base_model asks the untrained weights between turns, which are not served"
    example = Example("request", "1 + 1 = ?", "")
    try:
        protocol.check_example(example)
        task.question(example), task.before_question(example), task.show_meta(example)
    except Exception as error:
        return f"its questions have more than a text, which a message does not have ({type(error).__name__}: {error})"
    return None


def _tokens(utterance: Utterance) -> tuple[int, int]:
    """Return the numbers of tokens of a prompt and of its answer."""
    prompt, new = utterance.tags.get("usage") or (len(utterance.prompt_ids), len(utterance.response_ids))
    return prompt, new


def _told(utterance: Utterance) -> dict[str, Any]:
    """Return an utterance as a reply of the team tells it. Turns count from 1."""
    told = {"agent": utterance.agent, "role": utterance.role, "turn": utterance.turn + 1, "text": utterance.text}
    calls = [
        {"name": call.name, "arguments": call.arguments, "result": call.result and call.result.text}
        for call in utterance.calls
    ]
    return told | ({"calls": calls} if calls else {})


def left_out(run: ResolvedRun, task: Task) -> Iterator[tuple[str, str]]:
    """Yield what an address does not serve of a run, and why: agents without weights here, and perhaps the team."""
    apart = [name for name in run.speakers if not run.config.agents[name].weights]
    for name in apart:
        engine = run.config.agents[name].engine
        yield name, f"its engine is {engine!r}, not a model of the run; ask it where it is served"
    if TEAM in run.speakers:
        yield TEAM, "an agent has this name"
    elif apart:
        yield TEAM, f"{', '.join(apart)} has no weights in the run, and an address would ask, and pay, for strangers"
    elif why := why_no_team(run, task):
        yield TEAM, why
