"""The default engine. It samples from the team's own models, with one batch for all agents of one base."""

from collections.abc import Mapping
from typing import Literal

from peft import PeftModel

from maporl.decoding import RowSampling
from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.team.team import Policy
from maporl.types import Stop
from trl_ext.kv_cache import KVCache
from trl_ext.lora_merge import merged, merges
from trl_ext.mixed_adapters import mixes
from trl_ext.ppo_options import Decoding
from trl_ext.sampling import sample
from trl_ext.sampling_options import Sampled, Sampling
from trl_ext.stop_strings import StopStrings, ended


class TransformersEngine(Engine):
    """Samples from the team's own models, with token-exact transcripts.

    Args:
        policies: the team's policies by name.
        max_new_tokens: see :class:`trl_ext.sampling_options.Sampling`.
        batch_size: see :class:`trl_ext.sampling_options.Sampling`.
        batch_tokens: see :class:`trl_ext.sampling_options.Sampling`.
        keep_states: whether to keep the KV cache of a conversation between its turns, until :meth:`sync` or
            :meth:`release`.
        keep_states_gib: the most GiB of kept KV cache (:class:`trl_ext.kv_cache.KVCache`).
        adapters: how LoRA policies of one base answer. ``mixed``: in one batch, with each row through its own adapter.
            A step of decoding then reads the base's weights once for all of them. ``merged``: one after the other, each
            merged into the weights, which must be float32. ``plain``: one after the other. ``auto`` is ``merged`` for
            float32 weights on a CPU, and ``mixed`` otherwise. What does not suit an adapter is ``plain``.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        max_new_tokens: int,
        batch_size: int,
        batch_tokens: int | None = None,
        keep_states: bool = True,
        adapters: Literal["auto", "mixed", "merged", "plain"] = "auto",
        keep_states_gib: float | None = None,
    ):
        self.policies, self.max_new_tokens = policies, max_new_tokens
        self.batch_size, self.batch_tokens, self.adapters = batch_size, batch_tokens, adapters
        budget = None if keep_states_gib is None else int(keep_states_gib * 2**30)
        self.kv_cache: KVCache | None = KVCache(budget) if keep_states else None

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context.
        """
        replies: list[Reply | None] = [None] * len(requests)
        group_of = {name: self._group(self.policies[name]) for name in {r.policy for r in requests}}
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(group_of[request.policy], []).append(i)
        for rows in groups.values():
            for row, reply in zip(rows, self._speak([requests[i] for i in rows], decoding), strict=True):
                replies[row] = reply
        return replies  # type: ignore[return-value]  # every request names a policy

    def sync(self, policy: str) -> None:
        """Drop the KV cache, which earlier weights computed. The engine already samples from the trained weights."""
        self.release()

    def release(self) -> None:
        """Drop the KV cache of all conversations. A conversation that continues is read again."""
        if self.kv_cache is not None:
            self.kv_cache.clear()

    def metrics(self) -> dict[str, float]:
        """Return how much KV cache was kept in this update, and how many conversations found no room in it."""
        if self.kv_cache is None:
            return {}
        kept, forgotten = self.kv_cache.take_counts()
        return {"kv_cache/gib": kept / 2**30, "kv_cache/forgotten": float(forgotten)}

    def _group(self, policy: Policy) -> tuple:
        """Return the policy's group. Policies of one group answer in one batch."""
        if self._how(policy) == "mixed":
            return (id(policy.model), policy.stop_ids, policy.stop_strings)
        return (policy.name,)

    def _sampling(self, request: Request, policy: Policy, decoding: Decoding) -> Sampling:
        """Return how the answer to ``request`` is sampled."""
        drawn = request.drawn(decoding)
        return Sampling(
            request.longest(self.max_new_tokens),
            drawn.temperature,
            policy.stop_ids,
            self.batch_size,
            drawn.top_p,
            self.batch_tokens,
            drawn.top_k,
            stop_strings_of(request.sampling, policy),
        )

    def _how(self, policy: Policy) -> str:
        fitting = {"merged": merges, "mixed": mixes}
        on_cpu = next(policy.model.parameters()).device.type == "cpu"
        wanted = [self.adapters] if self.adapters != "auto" else ["merged", "mixed"] if on_cpu else ["mixed"]
        return next((how for how in wanted if how in fitting and fitting[how](policy.model, policy.adapter)), "plain")

    def _speak(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        speaking = [self.policies[r.policy] for r in requests]
        known = [len(r.transcript.ids) for r in requests]
        prompts = [
            r.transcript.add_messages(r.messages, p.tokenizer, p.stop_ids)
            for r, p in zip(requests, speaking, strict=True)
        ]
        for request, policy, ids in zip(requests, speaking, prompts, strict=True):
            policy.voice.check_length(len(ids), request.longest(self.max_new_tokens), request.label)
        first = speaking[0]
        each = [self._sampling(*parts, decoding) for parts in zip(requests, speaking, strict=True)]
        given = [r.rng_key for r in requests]
        keys = None if None in given else [key for key in given if key is not None]
        mixed = len({p.name for p in speaking}) > 1
        merge = self._how(first) == "merged" and isinstance(first.model, PeftModel)
        with merged(first.model, str(first.adapter)) if merge else first.active() as model:  # type: ignore[arg-type]
            completions = sample(
                first.model if mixed else model,
                prompts,
                each[0],
                keys,
                [str(p.adapter) for p in speaking] if mixed else None,
                self.kv_cache,
                known,
                owners=[p.name for p in speaking],
                own=each,
            )
        return [reply_of(*parts) for parts in zip(requests, speaking, prompts, completions, strict=True)]


def stop_strings_of(sampling: RowSampling | None, policy: Policy) -> StopStrings | None:
    """Return the strings that end an answer: those of its own ``sampling``, or else those of its policy."""
    stop = None if sampling is None else sampling.stop
    return policy.stop_strings if stop is None else policy.voice.own_stop_strings(stop)


def reply_of(request: Request, policy: Policy, prompt: list[int], completion: Sampled) -> Reply:
    """Add a completion to the request's transcript, and return it as the engine's reply."""
    # after a stop string the message is still open, and the transcript adds the template's closing
    request.transcript.add_completion(request.utterance, completion.ids, completion.ids[-1] in policy.stop_ids)
    text = policy.tokenizer.decode(completion.ids, skip_special_tokens=True).strip()
    stop = Stop.EOS if completion.ids[-1] in policy.stop_ids else Stop.LENGTH
    if stop is Stop.LENGTH and ended(completion.ids, policy.stop_ids, stop_strings_of(request.sampling, policy)):
        stop = Stop.STOP
    return Reply(text, stop, prompt, completion.ids, completion.logprobs)


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
