"""The default engine. It samples from the team's own models, with one batch for all agents of one base."""

from collections.abc import Mapping

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.engines.token_sampler import Adapters, TokenSampler
from maporl.team.agents import Policy, Voice
from maporl.types import Stop
from trl_ext.chat.stop_strings import ended
from trl_ext.chat.thoughts import end_of_begun_thought
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest


class TransformersEngine(Engine):
    """Samples from the team's own models, with token-exact transcripts.

    Args:
        policies: the team's policies by name.
        max_new_tokens: see :class:`trl_ext.sampling.options.Sampling`.
        batch_size: see :class:`maporl.engines.token_sampler.TokenSampler`.
        batch_tokens: see :class:`maporl.engines.token_sampler.TokenSampler`.
        keep_states: see :class:`maporl.engines.token_sampler.TokenSampler`.
        adapters: see :class:`maporl.engines.token_sampler.TokenSampler`.
        keep_states_gib: see :class:`maporl.engines.token_sampler.TokenSampler`.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        max_new_tokens: int,
        batch_size: int,
        batch_tokens: int | None = None,
        keep_states: bool = True,
        adapters: Adapters = "auto",
        keep_states_gib: float | None = None,
    ):
        self.policies, self.max_new_tokens = policies, max_new_tokens
        self.sampler = TokenSampler(policies, batch_size, batch_tokens, keep_states, adapters, keep_states_gib)

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context.
        """
        asked = [token_request(r, self.policies[r.policy].voice, decoding, self.max_new_tokens) for r in requests]
        read = zip(requests, asked, self.sampler.sample(asked), strict=True)
        return [reply_of(r, self.policies[r.policy].voice, tokens, completion) for r, tokens, completion in read]

    def sync(self, policy: str) -> None:
        """Drop the KV cache, which earlier weights computed. The engine already samples from the trained weights."""
        self.release()

    def release(self) -> None:
        """Drop the KV cache of all conversations. A conversation that continues is read again."""
        self.sampler.release()

    def metrics(self) -> dict[str, float]:
        """Return how much KV cache was kept in this update, and how many conversations found no room in it."""
        return self.sampler.metrics()


def token_request(request: Request, voice: Voice, decoding: Decoding, max_new_tokens: int) -> TokenRequest:
    """Add the new messages of a request to its transcript, and return the request in tokens.

    ``voice`` is that of the policy which answers. ``decoding`` and ``max_new_tokens`` are those of the run.

    Raises:
        PromptTooLong: the prompt and its completion do not fit the model's context.
    """
    earlier = len(request.transcript.ids)
    prompt = request.transcript.add_messages(request.messages, voice.tokenizer, voice.stop_ids)
    draw = voice.draw(request.sampling, decoding, max_new_tokens)
    voice.check_length(len(prompt), draw.max_tokens, request.label)
    return TokenRequest(voice.name, prompt, draw, request.rng_key, earlier, request.label)


def reply_of(request: Request, voice: Voice, asked: TokenRequest, completion: Sampled) -> Reply:
    """Add a completion to the request's transcript, and return it as the engine's reply."""
    end = end_of_begun_thought(voice.tokenizer.decode(asked.prompt_ids[-16:]))
    # after a stop string the message is still open, and the transcript adds the template's closing
    request.transcript.add_completion(request.utterance, completion.ids, completion.ids[-1] in voice.stop_ids)
    text = voice.tokenizer.decode(completion.ids, skip_special_tokens=True).strip()
    stop = Stop.EOS if completion.ids[-1] in voice.stop_ids else Stop.LENGTH
    if stop is Stop.LENGTH and ended(completion.ids, voice.stop_ids, voice.stops(asked.draw)):
        stop = Stop.STOP
    no_text = "thinking" if end and end not in text else None  # it was cut off before it said anything
    return Reply(text, stop, asked.prompt_ids, completion.ids, completion.logprobs, no_text=no_text)


def build(setup: EngineSetup) -> TransformersEngine:
    """Build the engine that :data:`maporl.engines.ENGINES` names."""
    sampling = setup.sampling
    return TransformersEngine(
        setup.policies,
        sampling.response_length,
        sampling.local_rollout_forward_batch_size,
        sampling.max_tokens_per_generate,
        sampling.keep_states,
        keep_states_gib=sampling.keep_states_gib,
    )
