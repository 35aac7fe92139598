"""The default engine. It samples from the team's own models, with one batch for all agents of one base."""

from collections.abc import Mapping, Sequence

from maporl.decoding import RowSampling
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.engines.token_sampler import Adapters, TokenRow, TokenSampler
from maporl.team.agents import Policy
from maporl.types import Stop
from trl_ext.chat.stop_strings import StopStrings, ended
from trl_ext.chat.thoughts import end_of_begun_thought
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.options import Sampled


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
        rows = [token_row(r, self.policies[r.policy], decoding, self.max_new_tokens) for r in requests]
        return replies_of(requests, self.policies, rows, self.sampler.sample(rows))

    def sync(self, policy: str) -> None:
        """Drop the KV cache, which earlier weights computed. The engine already samples from the trained weights."""
        self.release()

    def release(self) -> None:
        """Drop the KV cache of all conversations. A conversation that continues is read again."""
        self.sampler.release()

    def metrics(self) -> dict[str, float]:
        """Return how much KV cache was kept in this update, and how many conversations found no room in it."""
        return self.sampler.metrics()


def token_row(request: Request, policy: Policy, decoding: Decoding, max_new_tokens: int) -> TokenRow:
    """Add the new messages of a request to its transcript, and return what is sampled for it.

    Only the text side of ``policy`` is used. ``decoding`` and ``max_new_tokens`` are those of the run.

    Raises:
        PromptTooLong: the prompt and its completion do not fit the model's context.
    """
    earlier = len(request.transcript.ids)
    prompt = request.transcript.add_messages(request.messages, policy.tokenizer, policy.stop_ids)
    longest = request.longest(max_new_tokens)
    policy.voice.check_length(len(prompt), longest, request.label)
    stop = None if request.sampling is None else request.sampling.stop
    return TokenRow(policy.name, prompt, earlier, request.rng_key, request.drawn(decoding), longest, stop)


def replies_of(
    requests: Sequence[Request], policies: Mapping[str, Policy], rows: Sequence[TokenRow], sampled: Sequence[Sampled]
) -> list[Reply]:
    """Return the replies that ``sampled`` gives to ``requests``, after :func:`token_row`."""
    parts = zip(requests, rows, sampled, strict=True)
    return [reply_of(request, policies[row.policy], row.prompt, completion) for request, row, completion in parts]


def stop_strings_of(sampling: RowSampling | None, policy: Policy) -> StopStrings | None:
    """Return the strings that end an answer: those of its own ``sampling``, or else those of its policy."""
    stop = None if sampling is None else sampling.stop
    return policy.stop_strings if stop is None else policy.voice.own_stop_strings(stop)


def reply_of(request: Request, policy: Policy, prompt: list[int], completion: Sampled) -> Reply:
    """Add a completion to the request's transcript, and return it as the engine's reply."""
    end = end_of_begun_thought(policy.tokenizer.decode(prompt[-16:]))
    # after a stop string the message is still open, and the transcript adds the template's closing
    request.transcript.add_completion(request.utterance, completion.ids, completion.ids[-1] in policy.stop_ids)
    text = policy.tokenizer.decode(completion.ids, skip_special_tokens=True).strip()
    stop = Stop.EOS if completion.ids[-1] in policy.stop_ids else Stop.LENGTH
    if stop is Stop.LENGTH and ended(completion.ids, policy.stop_ids, stop_strings_of(request.sampling, policy)):
        stop = Stop.STOP
    no_text = "thinking" if end and end not in text else None  # it was cut off before it said anything
    return Reply(text, stop, prompt, completion.ids, completion.logprobs, no_text=no_text)


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
