"""Sample tokens from the models in this process: the side of the default engine that holds weights, and sees no
text."""

from collections.abc import Mapping, Sequence
from typing import Literal

from peft import PeftModel

from maporl.team.agents import Policy
from trl_ext.models.lora_merge import merged, merges
from trl_ext.models.mixed_adapters import mixes
from trl_ext.sampling.kv_cache import KVCache
from trl_ext.sampling.options import Sampled, Sampling
from trl_ext.sampling.request import TokenRequest
from trl_ext.sampling.sample import sample

Adapters = Literal["auto", "mixed", "merged", "plain"]


class TokenSampler:
    """Samples from the models of ``policies``, in one batch for all adapters of one base.

    Args:
        policies: the policies by name.
        batch_size: see :class:`trl_ext.sampling.options.Sampling`.
        batch_tokens: see :class:`trl_ext.sampling.options.Sampling`.
        keep_states: whether to keep the KV cache of a conversation between its turns, until :meth:`release`.
        adapters: how LoRA policies of one base answer. ``mixed``: in one batch, with each row through its own adapter.
            A step of decoding then reads the base's weights once for all of them. ``merged``: one after the other, each
            merged into the weights, which must be float32. ``plain``: one after the other. ``auto`` is ``merged`` for
            float32 weights on a CPU, and ``mixed`` otherwise. What does not suit an adapter is ``plain``.
        keep_states_gib: the most GiB of kept KV cache (:class:`trl_ext.sampling.kv_cache.KVCache`).
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        batch_size: int,
        batch_tokens: int | None = None,
        keep_states: bool = True,
        adapters: Adapters = "auto",
        keep_states_gib: float | None = None,
    ):
        self.policies, self.batch_size, self.batch_tokens, self.adapters = policies, batch_size, batch_tokens, adapters
        budget = None if keep_states_gib is None else int(keep_states_gib * 2**30)
        self.kv_cache: KVCache | None = KVCache(budget) if keep_states else None

    def sample(self, requests: Sequence[TokenRequest]) -> list[Sampled]:
        """Return one completion for each request, in order."""
        group_of = {name: self._group(self.policies[name]) for name in {request.policy for request in requests}}
        groups: dict[tuple, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(group_of[request.policy], []).append(number)
        samples: dict[int, Sampled] = {}
        for numbers in groups.values():
            samples |= zip(numbers, self._together([requests[n] for n in numbers]), strict=True)
        return [samples[number] for number in range(len(requests))]

    def release(self) -> None:
        """Drop the KV cache of all conversations. A conversation that continues is read again."""
        if self.kv_cache is not None:
            self.kv_cache.clear()

    def metrics(self) -> dict[str, float]:
        """Return how much KV cache was kept since the last call, and how many conversations found no room in it."""
        if self.kv_cache is None:
            return {}
        size, forgotten = self.kv_cache.take_counts()
        return {"kv_cache/gib": size / 2**30, "kv_cache/forgotten": float(forgotten)}

    def _group(self, policy: Policy) -> tuple:
        """Return the policy's group. Policies of one group answer in one batch."""
        if self._how(policy) == "mixed":
            return (id(policy.model), policy.stop_ids, policy.stop_strings)
        return (policy.name,)

    def _how(self, policy: Policy) -> str:
        fitting = {"merged": merges, "mixed": mixes}
        on_cpu = next(policy.model.parameters()).device.type == "cpu"
        wanted = [self.adapters] if self.adapters != "auto" else ["merged", "mixed"] if on_cpu else ["mixed"]
        return next((how for how in wanted if how in fitting and fitting[how](policy.model, policy.adapter)), "plain")

    def _sampling(self, request: TokenRequest) -> Sampling:
        stops = self.policies[request.policy].voice.stops(request.draw)
        return Sampling.of(request.draw, stops, self.batch_size, self.batch_tokens)

    def _together(self, requests: list[TokenRequest]) -> list[Sampled]:
        """Sample the completions of one group."""
        speaking = [self.policies[request.policy] for request in requests]
        first, each = speaking[0], [self._sampling(request) for request in requests]
        keys = [request.key for request in requests if request.key is not None]
        mixed = len({policy.name for policy in speaking}) > 1
        merge = self._how(first) == "merged" and isinstance(first.model, PeftModel)
        with merged(first.model, str(first.adapter)) if merge else first.active() as model:  # type: ignore[arg-type]
            return sample(
                first.model if mixed else model,
                [request.prompt_ids for request in requests],
                each[0],
                keys if len(keys) == len(requests) else None,
                [str(policy.adapter) for policy in speaking] if mixed else None,
                self.kv_cache,
                [request.read for request in requests],
                owners=[policy.name for policy in speaking],
                own=each,
            )
