"""The engine that answers with what an engine of tokens samples: text becomes tokens here, and tokens become text."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from maporl.engines.base import Engine, Pending, Reply, Request
from maporl.team.agents import Policy, Voice
from maporl.types import Stop
from trl_ext.chat.encoding import ChatError, PromptTooLong, token_pieces
from trl_ext.chat.stop_strings import StopStrings, ended
from trl_ext.chat.thoughts import end_of_begun_thought
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.engine import Ready, TokenEngine, wait_for
from trl_ext.sampling.grammar import GrammarError
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest


class TextEngine(Engine):
    """Answers for agents with token-exact transcripts.

    Args:
        policies: the policies by name, of which only the text sides are used.
        tokens: samples the completions.
        max_new_tokens: the most tokens of a completion of the run.
    """

    tells_tokens = True

    def __init__(self, policies: Mapping[str, Policy], tokens: TokenEngine, max_new_tokens: int):
        self.policies, self.tokens, self.max_new_tokens = policies, tokens, max_new_tokens
        self.remote, self.between, self.continuous = tokens.remote, tokens.between, tokens.continuous

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context.
        """
        pending = self.submit(requests, decoding)
        wait_for([[one.future for one in pending]], self.advance)
        return [one.reply() for one in pending]

    def submit(self, requests: list[Request], decoding: Decoding) -> list[Pending]:
        """Begin to answer, and return one pending answer for each request, in order.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context, and its ask is not refusable.
            ChatError: a chat template cannot render the messages, and their ask is not refusable.
        """
        pending: dict[int, Pending] = {}
        asked: list[tuple[int, TokenRequest, Callable[[Sampled], Reply]]] = []
        for place, request in enumerate(requests):
            voice = self.policies[request.policy].voice
            try:
                tokens = token_request(request, voice, decoding, self.max_new_tokens)
                if self.tokens.ends_with_eos and (grammar := tokens.draw.grammar) is not None:
                    eos = voice.tokenizer.eos_token_id
                    held = replace(grammar, stop_ids=(eos,))
                    draw = replace(tokens.draw, grammar=held, stop_ids=tokens.draw.stop_ids | {eos})
                    tokens = replace(tokens, draw=draw)
                asked.append((place, tokens, partial(reply_of, request, voice, tokens)))
            except (PromptTooLong, ChatError) as error:
                if not request.ask.refusable:
                    raise
                refused = Reply("", refused=str(error), too_long=isinstance(error, PromptTooLong))
                pending[place] = Pending(Ready(refused))
        futures = self.tokens.submit([tokens for _, tokens, _ in asked])
        for (place, _, read), future in zip(asked, futures, strict=True):
            pending[place] = Pending(future, read)
        return [pending[place] for place in range(len(requests))]

    def advance(self) -> bool:
        """Work for a moment on what was submitted. Return whether there is more to do."""
        return self.tokens.advance()

    def sync(self, policy: str) -> None:
        """Take over the weights of ``policy``, which are new or have changed."""
        self.tokens.sync(policy, self.version)

    def release(self) -> None:
        """Drop what was kept of dialogues, and what is left of submitted requests."""
        self.tokens.release()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the engine of tokens."""
        return self.tokens.metrics()


def token_request(request: Request, voice: Voice, decoding: Decoding, max_new_tokens: int) -> TokenRequest:
    """Add the new messages of a request to its transcript, and return the request in tokens.

    ``voice`` is that of the policy which answers. ``decoding`` and ``max_new_tokens`` are those of the run.

    Raises:
        PromptTooLong: the prompt and its completion do not fit the model's context.
        ChatError: the chat template cannot render the messages, or makes no token of those of a refusable ask.
    """
    earlier = len(request.transcript.ids)
    prompt = request.transcript.add_messages(request.messages, voice.tokenizer, voice.stop_ids)
    if not prompt and request.ask.refusable:  # nobody could be trained on the answer
        raise ChatError(f"{request.label}: its prompt has no tokens; let the protocol or the program say something")
    draw = voice.draw(request.sampling, decoding, max_new_tokens)
    if request.call_ends:
        words = voice.tokenizer.get_added_vocab()  # a mark that is a special token shows in no text
        ids = draw.stop_ids.union(words[end] for end in request.call_ends if end in words)
        draw = replace(draw, stop=tuple(dict.fromkeys([*draw.stop, *request.call_ends])), stop_ids=ids)
    voice.check_length(len(prompt), draw.max_tokens, request.label)
    return TokenRequest(voice.name, prompt, draw, request.rng_key, earlier, request.label, request.ask.alternatives)


def reply_of(request: Request, voice: Voice, asked: TokenRequest, sampled: Sampled) -> Reply:
    """Add a completion to the request's transcript, and return it as the engine's reply.

    Raises:
        GrammarError: its grammar cannot be followed, and its ask is not refusable.
    """
    stops = StopStrings.of(voice.tokenizer, asked.draw.stop)
    completion = sampled.up_to(stops)
    if completion.refused is not None:
        why = f"structured_output: the answer cannot be held to it any further: {completion.refused}"
        if not request.ask.refusable:
            raise GrammarError(f"{request.label}: {why}")
        return Reply("", refused=why)
    lacks = "logprobs" if completion.logprobs is None else "top_logprobs" if asked.top and not completion.top else ""
    if request.ask.tokens and lacks and asked.draw.temperature > 0:
        why = "this agent's sampler does not know them for a model of this kind"
        return Reply("", refused=f"{lacks}: {why}; leave it out, or add it to protocol.ignore")
    end = end_of_begun_thought(voice.tokenizer.decode(asked.prompt_ids[-16:]))
    # after a stop string the message is still open, and the transcript adds the template's closing
    request.transcript.add_completion(request.utterance, completion.ids, completion.ids[-1] in voice.stop_ids)
    text = voice.tokenizer.decode(completion.ids, skip_special_tokens=True).strip()
    stop = Stop.STOP if ended(completion.ids, asked.draw.stop_ids, stops) else Stop.LENGTH
    stop = Stop.EOS if completion.ids[-1] in voice.stop_ids else stop
    no_text = "thinking" if end and end not in text else None  # it was cut off before it said anything
    reply = Reply(text, stop, asked.prompt_ids, completion.ids, completion.logprobs, completion.version, no_text)
    reply.grammar = asked.draw.grammar
    if request.ask.tokens:
        pieces = partial(token_pieces, voice.tokenizer)
        said = completion.ids[:-1] if stop is Stop.EOS else completion.ids
        logprobs = completion.logprobs or [0.0] * len(completion.ids)  # a greedy token is drawn for sure
        tops = completion.top or [[(token, 0.0)][: request.ask.alternatives] for token in said]
        # the few tokens before an alternative say how it is joined to them
        others = [[(pieces([*said[:n][-4:], one])[-1], logprob) for one, logprob in top] for n, top in enumerate(tops)]
        reply.tokens = list(zip(pieces(said), logprobs, others, strict=False))
    return reply
