"""What agents are asked, as requests to engines, and engines' replies as utterances. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.transcript import Transcript
from maporl.environments.calls import CallFormat, Written
from maporl.errors import ConfigError
from maporl.rollout.episode import Episode, SpeakerSpec, Step
from maporl.tasks.base import Task
from maporl.types import Ask, Call, Message, Result, Utterance
from trl_ext.ppo.options import Decoding


class RequestBuilder:
    """Makes the requests of a step, and the utterances of their replies.

    Args:
        task: says what stands before a question.
        specs: the agents by name.
        decoding: how answers are sampled.
        rng_key: the key of all random numbers (:class:`maporl.rollout.driver.RolloutDriver`).
        engines: the engines by the names that ``specs`` use.
    """

    def __init__(
        self,
        task: Task,
        specs: Mapping[str, SpeakerSpec],
        decoding: Decoding,
        rng_key: tuple | None,
        engines: Mapping[str, Engine],
    ):
        self.task, self.specs, self.decoding, self.rng_key, self.engines = task, specs, decoding, rng_key, engines

    def requests(self, episode: Episode) -> list[Request]:
        """Return a request for each agent that ``episode`` asks.

        Raises:
            ConfigError: an agent is asked twice in one conversation, for a turn that it has had, or for a greedy answer
                on which it is trained.
        """
        requests = []
        dialogue = episode.dialogue
        speaking: set[str] = set()
        for offset, ask in enumerate(episode.asks):
            spec = self.specs[ask.agent]
            if not ask.fresh and ask.agent in speaking:
                raise ConfigError(f"the protocol asks agent {ask.agent!r} twice in one step; let it use fresh=True")
            speaking |= set() if ask.fresh else {ask.agent}
            form = spec.form_of(ask)
            if ask.continues is None:
                turn = _next_turn(episode, ask)
                episode.turns[ask.agent] = turn + 1
                ask, transcript = self._begun(episode, ask, spec, form)
            else:
                turn = dialogue.utterances[ask.continues].turn
                transcript = episode.apart[ask.continues] if ask.fresh else episode.transcripts[ask.agent]
            messages = spec.heard(ask, form)
            transcript.messages += messages
            label = f"agent {ask.agent!r}, turn {turn + 1}, dialogue {dialogue.example.id}.{dialogue.rollout}"
            number = len(dialogue.utterances) + offset
            place = (*(self.rng_key or ()), dialogue.prompt, dialogue.rollout, *(ask.seed or (number,)))
            key = None if self.rng_key is None and not ask.seed else place
            heard = tuple([dialogue.utterances[parent] for parent in ask.parents])
            policy = spec.policy(turn)
            refusal = spec.refusal_of(ask, turn, self.decoding) if ask.refusable else None
            sampling = spec.sampling_of(ask, turn, self.decoding) if refusal is None else None
            ends = () if form is None else form.stop_strings
            asked = ask.example or dialogue.example
            request = Request(
                ask, asked, turn, number, transcript, label, policy, key, heard, messages, sampling, ends, form, refusal
            )
            requests.append(request)
        return requests

    def _begun(self, episode: Episode, ask: Ask, spec: SpeakerSpec, form: CallFormat | None) -> tuple[Ask, Transcript]:
        """Return what an agent is asked at the beginning of a turn, and the conversation in which it answers."""
        messages, tags = ask.messages, ask.tags
        if episode.rooms.open:
            if news := episode.rooms.news(ask.agent):
                messages = with_news(messages, news)
            if "state" not in tags and (state := episode.rooms.state()) is not None:
                tags = {**tags, "state": state}
        begins = ask.after is None and (ask.fresh or ask.agent not in episode.transcripts)
        if ask.after is not None:
            transcript = episode.apart[ask.after].after(ask.after)
        else:
            transcript = Transcript() if ask.fresh else episode.transcripts.setdefault(ask.agent, Transcript())
        if begins:
            before = [] if ask.fresh else self.task.before_question(episode.dialogue.example)
            system = spec.system
            if form is not None:
                transcript.tools = form.schemas()
                system = "\n\n".join(part for part in (spec.system, form.intro()) if part)
            messages = opening(system, [*before, *messages])
        return replace(ask, messages=messages, tags=tags), transcript

    def utterances(self, step: Step) -> list[Utterance]:
        """Return the utterances of a step whose replies are all there."""
        episode = step.episode
        made = []
        for request, pending in zip(step.requests, step.pending, strict=True):
            u = self._utterance(request, pending.reply(), len(episode.sent))
            if request.ask.continues is not None:
                u.part = episode.dialogue.utterances[request.ask.continues].part + 1
            if u.fresh:
                episode.apart[u.id] = request.transcript
            if episode.state is not None:
                u.tags.setdefault("state", episode.state)
            made.append(u)
        return made

    def _utterance(self, request: Request, reply: Reply, step: int) -> Utterance:
        ask = request.ask
        spec = self.specs[ask.agent]
        request.transcript.add_words(request.utterance, reply.text)
        version = self.engines[spec.engine].version if reply.version is None else reply.version
        told = {name: getattr(reply, name) for name in ("no_text", "refused", "usage")}
        told["too_long"] = reply.too_long or None
        tags = ask.tags | {name: value for name, value in told.items() if value is not None}
        utterance = Utterance(
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
            tags=tags,
            temperature=request.temperature,
            example=ask.example,
            version=version if request.policy in spec.learning else None,
            after=ask.after,
            schemas=ask.schemas if ask.after is None else (),
            grammar=reply.grammar,
            tokens=reply.tokens,
        )
        utterance.calls = read_calls(utterance, ask, request.form)
        return utterance


def read_calls(utterance: Utterance, ask: Ask, form: CallFormat | None) -> list[Call]:
    """Return the calls in an utterance that the protocol carries out, because it has brought the tools."""
    if not ask.schemas or form is None or not utterance.stop.whole:
        return []
    written = form.read(utterance.text, utterance.prompt_ids, utterance.response_ids)
    return [_call(utterance.id, number, one) for number, one in enumerate(written[: 1 if ask.single else None])]


def _call(utterance: int, number: int, written: Written) -> Call:
    """Return a call that the protocol carries out, or one that could not be read."""
    result = None if written.error is None else Result(written.error, error="unread")
    return Call(f"{utterance}.{number}", written.name, written.arguments, result=result)


def opening(system: str | None, before: list[Message]) -> list[Message]:
    """Return how a conversation begins: an agent's ``system`` prompt, and the messages ``before`` the question.

    A chat template takes one system prompt, so an agent's own stands above that of the messages.
    """
    if not system:
        return before
    if before and before[0]["role"] == "system":
        return [{"role": "system", "content": f"{system}\n\n{before[0]['content']}"}, *before[1:]]
    return [{"role": "system", "content": system}, *before]


def with_news(messages: list[Message], news: str) -> list[Message]:
    """Return ``messages`` with ``news`` at the end of the last user message, or as a user message of their own."""
    places = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return [*messages, {"role": "user", "content": news}]
    last = messages[places[-1]]
    return [*messages[: places[-1]], {**last, "content": last["content"] + news}, *messages[places[-1] + 1 :]]


def _next_turn(episode: Episode, ask: Ask) -> int:
    """Return the number of the turn that ``ask`` begins."""
    least = episode.turns.get(ask.agent, 0)
    if ask.turn is None:
        return least
    if ask.turn < least:
        raise ConfigError(f"the protocol asks agent {ask.agent!r} for turn={ask.turn}, below {least}; leave turn out")
    return ask.turn
