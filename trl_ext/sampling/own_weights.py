"""The engine of tokens that samples from the models of this process."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from trl_ext.chat.encoding import Tokenizer
from trl_ext.models.forward import base_of
from trl_ext.models.lora_sampling import mixes
from trl_ext.models.shape import Shape
from trl_ext.ppo.options import BATCH_ROWS
from trl_ext.process.devices import free_bytes
from trl_ext.sampling.engine import Ready, TokenEngine
from trl_ext.sampling.kv_cache import KVCache
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest
from trl_ext.sampling.sample import sample

MOST_ROWS = 256
"""The most rows that are sampled at a time because memory is free."""


def fitting_rows(row_bytes: float, free: int) -> int:
    """Return how many rows of ``row_bytes`` bytes are sampled at a time on a device with ``free`` bytes.

    They are 64, 128 or 256, so that small differences in free memory make the same batches. More than 64 take at most a
    quarter of what is free, because kept states take half, and training allocates moments later.
    """
    rows = BATCH_ROWS
    while rows < MOST_ROWS and 2 * rows * row_bytes <= free / 4:
        rows *= 2
    return rows


class Weights(Protocol):
    """A policy: a model, or one adapter of a shared base."""

    model: Any
    adapter: str | None

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """Return what opens the Hugging Face model with its adapter switched on."""
        ...


class OwnWeights(TokenEngine):
    """Samples from the models of ``policies``, in one batch for all adapters of one base.

    Args:
        policies: the policies by name.
        batch_size: the most rows of a batch. If it is None, an accelerator samples as many as :func:`fitting_rows`
            says for the longest conversation, and a CPU 64. The free memory of a device is asked once, when the engine
            first samples on it, so that a run repeats on the same machine. In half precision the rows of a batch can
            change each other's rounding, and so their tokens: give a number where other programs share the device.
        batch_tokens: the most tokens of a batch, padding included (:func:`trl_ext.sampling.sample.sample`).
        keep_states: whether to keep the KV cache of a conversation between its turns, until :meth:`release`.
        mix: whether LoRA policies of one base answer in one batch, with each row through its own adapter, where
            :func:`trl_ext.models.lora_sampling.mixes` allows it. A step of decoding then reads the base's weights once
            for all of them. Otherwise they answer one after the other.
        keep_states_gib: the most GiB of kept KV cache (:class:`trl_ext.sampling.kv_cache.KVCache`).
    """

    def __init__(
        self,
        policies: Mapping[str, Weights],
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        keep_states: bool = True,
        mix: bool = True,
        keep_states_gib: float | None = None,
    ):
        self.policies, self.batch_size, self.batch_tokens, self.mix = policies, batch_size, batch_tokens, mix
        budget = None if keep_states_gib is None else int(keep_states_gib * 2**30)
        self.kv_cache: KVCache | None = KVCache(budget) if keep_states else None
        self._free: dict[torch.device, int | None] = {}  # bytes, when this first sampled there

    def submit(self, requests: Sequence[TokenRequest]) -> list[Ready[Sampled]]:
        """Sample one completion for each request. They are there at once."""
        group_of = {name: self.group(self.policies[name]) for name in {request.policy for request in requests}}
        groups: dict[tuple[str, Any], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(group_of[request.policy], []).append(number)
        samples: dict[int, Sampled] = {}
        for (how, _), numbers in groups.items():
            samples |= zip(numbers, self.together([requests[n] for n in numbers], how), strict=True)
        return [Ready(samples[number]) for number in range(len(requests))]

    def sync(self, policy: str, version: int) -> None:
        """Drop the KV cache, which earlier weights computed. This samples from the trained weights already."""
        self.release()

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

    def group(self, policy: Weights) -> tuple[str, Any]:
        """Return how the policy answers, and with which others: policies of one group answer in one batch."""
        # a single adapter on an accelerator was not measured
        pays = len(self.policies) > 1 or next(policy.model.parameters()).device.type == "cpu"
        if self.mix and pays and mixes(policy.model, policy.adapter):
            return "mixed", id(policy.model)
        return "plain", policy.name

    def rows(self, model: Any, requests: Sequence[TokenRequest]) -> int:
        """Return the most rows of a batch of ``requests``."""
        device = next(model.parameters()).device
        if self.batch_size is not None or device.type == "cpu":
            return self.batch_size or BATCH_ROWS
        if device not in self._free:
            self._free[device] = free_bytes(device)
        free, shape = self._free[device], Shape.of(base_of(model), base_of(model).dtype)
        prompt = max(len(request.prompt_ids) for request in requests)
        most = prompt + max(request.draw.max_tokens for request in requests)
        return BATCH_ROWS if free is None else fitting_rows(shape.kv_cache(most) + prompt * shape.layer, free)

    def together(self, requests: list[TokenRequest], how: str) -> list[Sampled]:
        """Sample the completions of one group, which answers ``how``."""
        names = {request.policy for request in requests}
        first = self.policies[requests[0].policy]
        with self.opened(first, how) as model:
            return sample(
                model,
                requests,
                {name: self.policies[name].tokenizer for name in names},
                self.rows(first.model, requests),
                self.batch_tokens,
                {name: str(self.policies[name].adapter) for name in names} if how == "mixed" else None,
                self.kv_cache,
            )

    def opened(self, policy: Weights, how: str) -> AbstractContextManager[Any]:
        """Return what opens the model in which ``policy`` answers ``how``."""
        return nullcontext(policy.model) if how == "mixed" else policy.active()
