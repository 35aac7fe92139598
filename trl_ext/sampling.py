"""Sampling from one policy, or from several adapters of one base: token ids in, token ids out.

Prompts are sorted by length and cut into batches; equal prompts are read once; rows that have ended leave their batch; and
the states of a conversation may be kept (:class:`trl_ext.kv_cache.KVCache`), so that its next turn reads only what is new.
What a row draws depends on its own key alone: not on who is in the batch with it, nor on how many processes there are.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from trl_ext.chat import Tokenizer
from trl_ext.forward import accepts, base_of
from trl_ext.kv_cache import Block, KVCache, assemble, plain_states


@dataclass(frozen=True)
class Sampling:
    """How to sample: ``temperature`` 0 is greedy.

    ``batch_size`` is in rows, ``batch_tokens`` in tokens that a batch may come to hold, padding included (a longer row is
    alone). ``top_p`` below 1 truncates the distribution; PPO leaves it at 1, so that log-probabilities of the training
    forward are those of the sampler.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    batch_size: int = 64
    top_p: float = 1.0
    batch_tokens: int | None = None


@dataclass
class Sampled:
    """An answer: its ids, up to and including the first stop id, and where it was sampled their log-probabilities."""

    ids: list[int]
    logprobs: list[float] | None = None


def stop_ids_of(
    model: PreTrainedModel, tokenizer: Tokenizer, stop_token: str | None, stop_id: int | list[int] | None
) -> frozenset[int]:
    """The ids that end an answer: as asked for, else the EOS list of the model's generation config and tokenizer."""
    if stop_id is not None:
        return frozenset([stop_id] if isinstance(stop_id, int) else stop_id)
    if stop_token == "none":
        return frozenset()
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop_token is None and configured is not None:
        found |= {configured} if isinstance(configured, int) else set(configured)
    if not found:
        raise ValueError(
            "no end-of-sequence id is known: the tokenizer and the model's generation config name none; "
            "set stop_token_id, or stop_token='none' to always generate the full length"
        )
    return frozenset(found)


def generate(model: Any, prompts: list[list[int]], pad_id: int, sampling: Sampling) -> list[list[int]]:
    """The ids alone of :func:`sample`."""
    return [one.ids for one in sample(model, prompts, pad_id, sampling)]


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    pad_id: int,
    sampling: Sampling,
    keys: Sequence[tuple] | None = None,
    adapters: Sequence[str] | None = None,
    states: KVCache | None = None,
    known: Sequence[int] | None = None,
    owners: Sequence[str] | None = None,
) -> list[Sampled]:
    """One answer per prompt, in order.

    ``model`` is the unwrapped model with the right adapter active, or a ``PeftModel`` with ``adapters``, one per prompt.
    ``keys``: what each row's random numbers are drawn from (default: torch's random state). ``states`` keeps the states of
    every conversation and gives back those of the first ``known`` tokens of each prompt, where it has them; ``owners``
    name whose weights made them (default: the adapters).
    """
    if keys is None:
        drawn = int(torch.randint(2**62, (1,)))
        keys = [(drawn, row) for row in range(len(prompts))]
    plain = plain_states(base_of(model))
    if states is not None and plain != "everywhere":
        states = None  # windows count columns, and kept states leave padding among them
    rows = [_Row(ids, _draws(key, sampling)) for ids, key in zip(prompts, keys, strict=True)]
    for row, adapter in zip(rows, adapters or (), strict=bool(adapters)):
        row.adapter = row.owner = adapter
    for row, owner in zip(rows, owners or (), strict=bool(owners)):
        row.owner = owner
    if states is not None:
        names = [(row.owner, *row.prompt[:n]) for row, n in zip(rows, known or [0] * len(rows), strict=True)]
        for row, name in zip(rows, names, strict=True):
            row.past = states.find(name)
        states.drop(names)
    with _clean_generation(model):
        for batch in _batches(rows, sampling):
            if plain == "no":
                _by_the_library(model, batch, pad_id, sampling)
            else:
                _Batch(model, batch, pad_id, sampling, states).run()
    return [Sampled(row.ids, row.logprobs if sampling.temperature > 0 and plain != "no" else None) for row in rows]


# -- rows and batches ---------------------------------------------------------------------------------------------


@dataclass
class _Row:
    prompt: list[int]
    draws: Tensor | None
    adapter: str | None = None
    owner: str | None = None
    past: tuple[Block, int] | None = None

    def __post_init__(self):
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    @property
    def read(self) -> int:
        """How many tokens of the prompt have been read before."""
        return 0 if self.past is None else self.past[0].lengths[self.past[1]]


def _draws(key: tuple, sampling: Sampling) -> Tensor | None:
    """Uniform random numbers in [0, 1), one for each token, from ``key`` alone."""
    if sampling.temperature <= 0:
        return None
    generator = np.random.Generator(np.random.Philox(key=number_of(key)))
    return torch.from_numpy(generator.random(sampling.max_new_tokens))


def number_of(key: tuple) -> int:
    """128 bits from ``key``."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")


def _batches(rows: list[_Row], sampling: Sampling) -> Iterator[list[_Row]]:
    """From long to short, so that the largest batch shows first whether memory is enough."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: -len(row.prompt)):
        longest = len((batch or [row])[0].prompt) + sampling.max_new_tokens
        full = sampling.batch_tokens is not None and (len(batch) + 1) * longest > sampling.batch_tokens
        if batch and (full or len(batch) == sampling.batch_size):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class _Batch:
    """Rows that are decoded together, token by token. ``rows`` are those still speaking, in the order of the cache."""

    def __init__(self, model: Any, rows: list[_Row], pad_id: int, sampling: Sampling, states: KVCache | None):
        self.model, self.base, self.pad_id, self.sampling, self.states = model, base_of(model), pad_id, sampling, states
        self.device = next(self.base.parameters()).device
        self.rows = rows
        self.cache = DynamicCache(config=self.base.config)
        self.mask = torch.zeros(0)
        self.draws = None if rows[0].draws is None else torch.stack([row.draws for row in rows]).to(self.device)  # type: ignore[misc]
        self.position_ids = accepts(self.base, "position_ids")

    def run(self) -> None:
        logits = self._prefill()
        speaking = list(range(len(self.rows)))  # places in the cache
        ended = [False] * len(self.rows)
        for step in range(self.sampling.max_new_tokens):
            tokens = self._choose(logits, step, ended)
            for place in speaking:
                ended[place] = tokens[place] in self.sampling.stop_ids
            speaking = [place for place in speaking if not ended[place]]
            if not speaking or step + 1 == self.sampling.max_new_tokens:
                break
            if len(speaking) <= 0.75 * len(self.rows):
                self._keep_only(speaking)
                tokens = [tokens[place] for place in speaking]
                speaking, ended = list(range(len(speaking))), [False] * len(speaking)
            logits = self._forward(torch.tensor(tokens, device=self.device).unsqueeze(1))
        self._keep_only([])

    # -- the model ------------------------------------------------------------------------------------------------

    def _prefill(self) -> Tensor:
        """Read what is new of every different prompt; the logits that follow it, for each row."""
        first: dict[tuple, int] = {}
        place = [first.setdefault((row.adapter, *row.prompt), len(first)) for row in self.rows]
        everybody, unique = self.rows, list(dict(zip(place, self.rows, strict=True)).values())
        past = max(row.read for row in unique)
        new = [row.prompt[row.read :] for row in unique]
        width = max(map(len, new))
        ids = torch.full((len(unique), width), self.pad_id)
        self.mask = torch.zeros(len(unique), past, dtype=torch.long)
        fresh = torch.zeros(len(unique), width, dtype=torch.long)
        for number, (row, words) in enumerate(zip(unique, new, strict=True)):
            ids[number, width - len(words) :] = torch.tensor(words)
            fresh[number, width - len(words) :] = 1
            self.mask[number, past - row.read :] = 1
        self.mask = self.mask.to(self.device)
        if past:
            self.cache = assemble([row.past for row in unique], past, self.base.config)
        for row in everybody:
            row.past = None  # the memory is free once the last row has taken its part
        self.rows = unique
        logits = self._forward(ids.to(self.device), fresh.to(self.device))
        self.rows = everybody
        if len(unique) == len(everybody):
            return logits
        index = torch.tensor(place, device=self.device)
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]
        return logits[index]

    def _forward(self, ids: Tensor, fresh: Tensor | None = None) -> Tensor:
        """Append ``ids`` [B, n], of which ``fresh`` marks those that are no padding; the logits after the last, [B, V]."""
        fresh = torch.ones_like(ids) if fresh is None else fresh
        self.mask = torch.cat([self.mask, fresh], 1)
        options: dict[str, Any] = {}
        if self.position_ids:
            options["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if accepts(self.base, "logits_to_keep"):
            options["logits_to_keep"] = 1
        if isinstance(self.model, PeftModel) and self.rows[0].adapter is not None:
            options["adapter_names"] = [row.adapter for row in self.rows]
        output = self.model(
            input_ids=ids, attention_mask=self.mask, past_key_values=self.cache, use_cache=True, **options
        )
        return output.logits[:, -1].float()

    # -- choosing tokens ------------------------------------------------------------------------------------------

    def _choose(self, logits: Tensor, step: int, ended: list[bool]) -> list[int]:
        """The next token of every row; rows that have ended get one too, which nobody reads."""
        if self.sampling.temperature <= 0:
            chosen = logits.argmax(-1).tolist()
            logprobs = None
        else:
            probabilities = torch.softmax(logits / self.sampling.temperature, -1)
            if self.sampling.top_p < 1:
                probabilities = _nucleus(probabilities, self.sampling.top_p)
            assert self.draws is not None  # there is a temperature
            tokens = _inverse(probabilities, self.draws[:, step])
            logprobs = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log().tolist()
            chosen = tokens.tolist()
        for place, row in enumerate(self.rows):
            if not ended[place]:
                row.ids.append(chosen[place])
                if logprobs is not None:
                    row.logprobs.append(logprobs[place])
        return chosen

    def _keep_only(self, places: list[int]) -> None:
        """Let all other rows leave; what was read of them is kept where it may be needed again."""
        if self.states is not None:
            leaving = sorted(set(range(len(self.rows))) - set(places))
            self.states.put(
                [(self.rows[p].owner, *self.rows[p].prompt, *self.rows[p].ids) for p in leaving],
                Block.of(self.cache, self.mask, leaving, [len(self.rows[p].prompt) + len(self.rows[p].ids) - 1 for p in leaving]),
            )  # fmt: skip
        if places:
            index = torch.tensor(places, device=self.device)
            self.cache.batch_select_indices(index)
            self.mask = self.mask[index]
            self.rows = [self.rows[p] for p in places]
            self.draws = None if self.draws is None else self.draws[index]


def _inverse(probabilities: Tensor, draws: Tensor) -> Tensor:
    """The token of each row at which the cumulated ``probabilities`` [B, V] pass ``draws`` [B]."""
    cumulated = probabilities.cumsum(-1)
    wanted = draws.to(cumulated.dtype).unsqueeze(1) * cumulated[:, -1:]
    found = torch.searchsorted(cumulated, wanted, right=True).squeeze(1)
    return found.clamp(max=probabilities.shape[1] - 1)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Without the tail beyond ``top_p``; the likeliest token always stays."""
    ordered, index = probabilities.sort(-1, descending=True)
    ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(1, index, ordered / ordered.sum(-1, keepdim=True))


def _by_the_library(model: Any, rows: list[_Row], pad_id: int, sampling: Sampling) -> None:
    """For models whose states are no keys and values (recurrent ones): ``generate``, in one left-padded batch.

    It draws from torch's random state, which is set from the first row's numbers for its duration.
    """
    greedy = sampling.temperature <= 0
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=None if sampling.stop_ids else sampling.max_new_tokens,
        do_sample=not greedy,
        temperature=None if greedy else sampling.temperature,
        top_k=None if greedy else 0,
        top_p=None if greedy else sampling.top_p,
        eos_token_id=sorted(sampling.stop_ids) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )
    device = next(base_of(model).parameters()).device
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row.prompt)) + row.prompt for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows], device=device)
    options = {} if rows[0].adapter is None else {"adapter_names": [row.adapter for row in rows]}
    with torch.random.fork_rng():
        if rows[0].draws is not None:
            torch.manual_seed(int(float(rows[0].draws[0]) * 2**53))
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)
    for row, answer in zip(rows, output[:, width:].tolist(), strict=True):
        stop = next((i for i, token in enumerate(answer) if token in sampling.stop_ids), len(answer) - 1)
        row.ids = answer[: stop + 1]


def _checkpoints(model: Any) -> bool:
    """Whether activations are recomputed; transformers renames this in version 6."""
    new = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if new is None else new)


@contextmanager
def _clean_generation(model: Any) -> Iterator[None]:
    """Evaluation mode without gradient checkpointing, and none of the model's own sampling defaults (top_k, ...)."""
    base = base_of(model)
    kept_config, was_training = base.generation_config, base.training
    checkpointing = _checkpoints(base)
    base.generation_config = GenerationConfig()
    model.eval()
    if checkpointing:
        base.gradient_checkpointing_disable()
    try:
        yield
    finally:
        base.generation_config = kept_config
        if checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(was_training)
