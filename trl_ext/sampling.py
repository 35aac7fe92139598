"""Sample from one policy, or from several adapters of one base: token ids in, token ids out.

Prompts are sorted by length and cut into batches. Equal prompts are read once. Rows that have ended leave their batch.
The KV cache of a conversation may be kept (:class:`trl_ext.kv_cache.KVCache`), so that its next turn reads only the new
tokens. A row's random numbers depend only on its own key. They do not depend on the other rows of the batch, or on the
number of processes.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from trl_ext.chat import Tokenizer
from trl_ext.devices import forked_rng
from trl_ext.forward import accepts, base_of, tree_limits
from trl_ext.kv_cache import Block, KVCache, assemble, empty_cache, plain_states
from trl_ext.mixed_adapters import mixed
from trl_ext.recomputation import recomputes, set_recomputation
from trl_ext.stop_strings import StopStrings, ended
from trl_ext.token_batch import PADDING

_Choose = Callable[[Sequence[str]], None] | None
"""Takes the adapter of each row of a batch, if rows have adapters of their own."""


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Args:
        max_new_tokens: the most tokens of a completion.
        temperature: the sampling temperature; 0 is greedy.
        stop_ids: the token ids that end a completion.
        batch_size: the most rows of a batch.
        top_p: the share of the probability to sample from (:class:`trl_ext.ppo_options.Decoding`).
        batch_tokens: the most tokens of a batch, padding included. A longer row is alone in its batch.
        top_k: the number of likeliest tokens to sample from; 0: all.
        stop_strings: the strings that end a completion too.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    batch_size: int = 64
    top_p: float = 1.0
    batch_tokens: int | None = None
    top_k: int = 0
    stop_strings: StopStrings | None = None

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether a completion ends with the last token of ``ids``, and not because it is too long."""
        return ended(ids, self.stop_ids, self.stop_strings)

    @property
    def drawn(self) -> tuple[float, float, int]:
        """Return how a token is drawn: the temperature, top-p and top-k, which change nothing if it is greedy."""
        return (self.temperature, self.top_p, self.top_k) if self.temperature > 0 else (0.0, 1.0, 0)


@dataclass
class Sampled:
    """A completion: its token ids, up to and including what ended it, and their log-probabilities.

    The log-probabilities are those of the distribution that the tokens were drawn from, which ``top_p`` and ``top_k``
    make narrower than the model's own.

    ``logprobs`` is None for a greedy completion, and where the model's state is recurrent.
    """

    ids: list[int]
    logprobs: list[float] | None = None


def stop_ids_of(
    model: PreTrainedModel, tokenizer: Tokenizer, stop_token: str | None, stop_id: int | list[int] | None
) -> frozenset[int]:
    """Return the token ids that end a completion.

    ``stop_id`` has precedence. ``stop_token`` "none" means that completions always have their full length, and "eos"
    means the tokenizer's EOS token. By default they are the EOS ids of the tokenizer and of the model's generation
    config.

    Raises:
        ValueError: neither the tokenizer nor the generation config has an EOS id.
    """
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


def generate(model: Any, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    """Return the token ids of :func:`sample`, without log-probabilities."""
    return [completion.ids for completion in sample(model, prompts, sampling)]


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    keys: Sequence[tuple] | None = None,
    adapters: Sequence[str] | None = None,
    states: KVCache | None = None,
    known: Sequence[int] | None = None,
    owners: Sequence[str] | None = None,
    own: Sequence[Sampling] | None = None,
) -> list[Sampled]:
    """Sample one completion for each prompt, in order.

    Args:
        model: the unwrapped model with the right adapter active, or a ``PeftModel`` with ``adapters``, which
            :func:`trl_ext.mixed_adapters.mixes` must allow.
        prompts: the token ids of the prompts.
        sampling: how to sample.
        keys: the key of each row's random numbers. By default they come from torch's random state.
        adapters: the adapter of each row.
        states: the KV cache of conversations. It is read for each prompt, and filled with the new conversations.
        known: the number of tokens at the beginning of each prompt whose states may be in ``states``.
        owners: the policy of each row, whose weights computed the states. By default it is the adapter.
        own: how to sample each row, where rows differ. The limits of batches are those of ``sampling``.
    """
    if keys is None:
        seed = int(torch.randint(2**62, (1,)))
        keys = [(seed, row) for row in range(len(prompts))]
    plain = plain_states(base_of(model))
    if states is not None and plain != "everywhere":
        states = None  # sliding windows count columns, and kept states have padding between them
    each = [sampling] * len(prompts) if own is None else own
    rows = [_Row(ids, _uniforms(key, one), one) for ids, key, one in zip(prompts, keys, each, strict=True)]
    for row, adapter in zip(rows, adapters or (), strict=bool(adapters)):
        row.adapter = row.owner = adapter
    for row, owner in zip(rows, owners or (), strict=bool(owners)):
        row.owner = owner
    if states is not None:
        names = [(row.owner, *row.prompt[:n]) for row, n in zip(rows, known or [0] * len(rows), strict=True)]
        for row, past in zip(rows, states.take(names), strict=True):
            row.past = past
    with _clean_generation(model), mixed(model, adapters) if adapters else nullcontext() as choose:
        if plain == "no":
            for alike in _alike(rows):
                for batch in _batches(alike, sampling):
                    _generate_by_transformers(model, batch, alike[0].sampling, choose)
        else:
            for batch in _batches(rows, sampling):
                _Batch(model, batch, states, choose).run()
    return [Sampled(row.ids, row.logprobs if row.sampling.temperature > 0 and plain != "no" else None) for row in rows]


# -- rows and batches ---------------------------------------------------------------------------------------------


@dataclass
class _Row:
    prompt: list[int]
    uniforms: Tensor | None
    sampling: Sampling
    adapter: str | None = None
    owner: str | None = None
    past: tuple[Block, int] | None = None

    def __post_init__(self):
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    @property
    def read(self) -> int:
        """Return how many tokens of the prompt were read in an earlier turn."""
        return 0 if self.past is None else self.past[0].lengths[self.past[1]]


def _uniforms(key: tuple, sampling: Sampling) -> Tensor | None:
    """Return uniform random numbers in [0, 1), one for each token. They depend on ``key`` only."""
    if sampling.temperature <= 0:
        return None
    generator = np.random.Generator(np.random.Philox(key=number_of(key)))
    return torch.from_numpy(generator.random(sampling.max_new_tokens))


def number_of(key: tuple) -> int:
    """Return a number of 128 bits that depends on ``key`` only, for seeding a random generator."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")


def _alike(rows: list[_Row]) -> list[list[_Row]]:
    """Return the rows in groups that are sampled alike, because the generation of transformers samples a batch alike."""
    groups: list[list[_Row]] = []
    for row in rows:
        group = next((group for group in groups if group[0].sampling == row.sampling), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _batches(rows: list[_Row], sampling: Sampling) -> Iterator[list[_Row]]:
    """Yield batches from long rows to short ones, so that a lack of memory shows in the first batch."""
    batch: list[_Row] = []
    new = 0  # the most new tokens of a row of the batch
    for row in sorted(rows, key=lambda row: -len(row.prompt)):
        new = max(new if batch else 0, row.sampling.max_new_tokens)
        longest = len((batch or [row])[0].prompt) + new
        full = sampling.batch_tokens is not None and (len(batch) + 1) * longest > sampling.batch_tokens
        if batch and (full or len(batch) == sampling.batch_size):
            yield batch
            batch, new = [], row.sampling.max_new_tokens
        batch.append(row)
    if batch:
        yield batch


class _Batch:
    """Rows that are decoded together, token by token. ``rows`` has the rows that are in the cache, in its order."""

    def __init__(self, model: Any, rows: list[_Row], states: KVCache | None, choose: _Choose):
        self.model, self.base, self.states = model, base_of(model), states
        self.choose_adapters = choose
        self.device = next(self.base.parameters()).device
        self.rows = rows
        self.cache = empty_cache(self.base)
        self.mask = torch.zeros(0)
        self.longest = max(row.sampling.max_new_tokens for row in rows)
        self.uniforms: Tensor | None = None  # if all rows are greedy
        if any(row.uniforms is not None for row in rows):
            self.uniforms = torch.zeros(len(rows), self.longest, dtype=torch.float64)
            for numbers, row in zip(self.uniforms, rows, strict=True):
                if row.uniforms is not None:
                    numbers[: len(row.uniforms)] = row.uniforms
            self.uniforms = self.uniforms.to(self.device)
        self._find_draws()
        self.position_ids = accepts(self.base, "position_ids")
        self.masks = _takes_masks(self.base)

    def run(self) -> None:
        logits = self._prefill()
        running = list(range(len(self.rows)))  # the positions in the batch that have not ended
        ended = [False] * len(self.rows)
        for step in range(self.longest):
            tokens = self._choose(logits, step, ended)
            for position in running:
                own = self.rows[position]
                ended[position] = step + 1 >= own.sampling.max_new_tokens or own.sampling.ends(own.ids)
            running = [position for position in running if not ended[position]]
            if not running:
                break
            if len(running) <= 0.75 * len(self.rows):
                self._keep_only(running)
                tokens = tokens[torch.tensor(running, device=self.device)]
                running, ended = list(range(len(running))), [False] * len(running)
            logits = self._forward(tokens.unsqueeze(1))
        self._keep_only([])

    # -- the model ------------------------------------------------------------------------------------------------

    def _prefill(self) -> Tensor:
        """Read the new tokens of every different prompt. Return the next token's logits for each row, [B, V]."""
        first: dict[tuple, int] = {}
        unique_of = [first.setdefault((row.adapter, *row.prompt), len(first)) for row in self.rows]
        all_rows, unique = self.rows, list(dict(zip(unique_of, self.rows, strict=True)).values())
        past = max(row.read for row in unique)
        new = [row.prompt[row.read :] for row in unique]
        width = max(map(len, new))
        ids = torch.full((len(unique), width), PADDING)
        self.mask = torch.zeros(len(unique), past, dtype=torch.long)
        fresh = torch.zeros(len(unique), width, dtype=torch.long)
        for number, (row, tokens) in enumerate(zip(unique, new, strict=True)):
            ids[number, width - len(tokens) :] = torch.tensor(tokens)
            fresh[number, width - len(tokens) :] = 1
            self.mask[number, past - row.read :] = 1
        self.mask = self.mask.to(self.device)
        if past:
            self.cache = assemble([row.past for row in unique], past, self.base)
        if self.states is not None:
            self.states.give_back(row.past for row in all_rows)
        for row in all_rows:
            row.past = None  # a block's memory is freed once its last row is copied
        self.rows = unique
        logits = self._forward(ids.to(self.device), fresh.to(self.device))
        self.rows = all_rows
        if len(unique) == len(all_rows):
            return logits
        index = torch.tensor(unique_of, device=self.device)
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]
        return logits[index]

    def _forward(self, ids: Tensor, fresh: Tensor | None = None) -> Tensor:
        """Append ``ids`` [B, n] to the cache and return the logits of the next token, [B, V].

        ``fresh`` [B, n] is 1 at tokens and 0 at padding. By default all are tokens.
        """
        fresh = torch.ones_like(ids) if fresh is None else fresh
        self.mask = torch.cat([self.mask, fresh], 1)
        options: dict[str, Any] = {}
        if self.position_ids:
            options["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if accepts(self.base, "logits_to_keep"):
            # a slice of the hidden states, which the number 1 takes, makes torch copy the output head for every row
            options["logits_to_keep"] = torch.tensor([ids.shape[1] - 1], device=self.device)
        if self.choose_adapters is not None:
            self.choose_adapters([str(row.adapter) for row in self.rows])
        mask = self.mask
        if self.masks and ids.shape[1] == 1:
            # transformers would look for padding, which a device waits for. Without padding it would take a kernel that reads
            # keys and values once for every head that shares them.
            mask = mask.bool()[:, None, None]
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **options)
        return output.logits[:, -1].float()

    # -- choosing tokens ------------------------------------------------------------------------------------------

    def _choose(self, logits: Tensor, step: int, ended: list[bool]) -> Tensor:
        """Choose the next token of every row, [B]. Rows that have ended get a token too, which is ignored."""
        if len(self.draws) == 1:
            [(drawn, _)] = self.draws
            tokens, found = self._draw(logits, drawn, None if self.uniforms is None else self.uniforms[:, step])
        else:
            assert self.uniforms is not None  # only rows that are not greedy draw differently
            tokens, found = logits.new_zeros(len(logits), dtype=torch.long), logits.new_zeros(len(logits))
            for drawn, index in self.draws:
                tokens[index], own = self._draw(logits[index], drawn, self.uniforms[index, step])
                if own is not None:
                    found[index] = own
        if found is None:
            chosen, logprobs = tokens.tolist(), None
        else:
            # both in one tensor, to wait for the device once; float32 holds every id below 2^24 exactly
            numbers, logprobs = torch.stack([tokens.to(found.dtype), found]).tolist()
            chosen = [int(number) for number in numbers]
        for position, row in enumerate(self.rows):
            if not ended[position]:
                row.ids.append(chosen[position])
                if logprobs is not None:
                    row.logprobs.append(logprobs[position])
        return tokens

    @staticmethod
    def _draw(logits: Tensor, drawn: tuple[float, float, int], uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Draw the next token of rows that draw alike. Return the tokens, and their log-probabilities unless greedy."""
        temperature, top_p, top_k = drawn
        if temperature <= 0:
            return logits.argmax(-1), None
        assert uniforms is not None  # the temperature is above 0
        probabilities = truncated(torch.softmax(logits / temperature, -1), top_p, top_k)
        tokens = _inverse_cdf(probabilities, uniforms)
        return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()

    def _find_draws(self) -> None:
        """Find the rows that draw their tokens alike. They are computed together, as if they were alone in the batch."""
        positions: dict[tuple[float, float, int], list[int]] = {}
        for position, row in enumerate(self.rows):
            positions.setdefault(row.sampling.drawn, []).append(position)
        self.draws = [(drawn, torch.tensor(own, device=self.device)) for drawn, own in positions.items()]

    def _keep_only(self, positions: list[int]) -> None:
        """Remove all rows but those at ``positions``. ``states``, if given, keeps the removed rows' KV cache."""
        if self.states is not None:
            leaving = sorted(set(range(len(self.rows))) - set(positions))
            self.states.keep(
                [(self.rows[p].owner, *self.rows[p].prompt, *self.rows[p].ids) for p in leaving],
                self.cache,
                self.mask,
                leaving,
                [len(self.rows[p].prompt) + len(self.rows[p].ids) - 1 for p in leaving],
            )
        if positions:
            index = torch.tensor(positions, device=self.device)
            self.cache.batch_select_indices(index)
            self.mask = self.mask[index]
            self.rows = [self.rows[p] for p in positions]
            self.uniforms = None if self.uniforms is None else self.uniforms[index]
            self._find_draws()


def _takes_masks(model: Any) -> bool:
    """Return whether every layer of ``model`` takes one mask of keys, [B, 1, 1, T], in a step of decoding."""
    limits = tree_limits(model)
    return limits is not None and limits.blocks and plain_states(model) == "everywhere"


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token of each row at which the cumulated ``probabilities`` [B, V] pass ``uniforms`` [B].

    The token's probability is never 0.
    """
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    wanted = uniforms.to(cumulated.dtype).unsqueeze(1) * total
    # a number just below 1 rounds to 1 in float32, and no cumulated probability passes the total
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulated, wanted, right=True)
    found = found.clamp(max=probabilities.shape[1] - 1)  # NaN passes nothing; its log-probability is reported later
    # an accelerator adds up in parallel, so that rounding may make a sum grow at a token of probability 0
    impossible = probabilities.gather(1, found) == 0
    return torch.where(impossible, probabilities.argmax(-1, keepdim=True), found).squeeze(1)


def truncated(probabilities: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Return ``probabilities`` [B, V] of the ``top_k`` likeliest tokens, without the tail beyond ``top_p`` of these.

    The rest is 0, and each row has the sum 1. The likeliest token always stays. ``top_k`` cuts first, as it does in
    transformers and in vLLM.
    """
    size = probabilities.shape[-1]
    if top_p >= 1 and not 0 < top_k < size:
        return probabilities
    ordered, index = probabilities.topk(min(top_k or size, size), -1)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    if top_p < 1:
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(1, index, ordered / ordered.sum(-1, keepdim=True))


def _generate_by_transformers(model: Any, rows: list[_Row], sampling: Sampling, choose: _Choose) -> None:
    """Sample with the model's own ``generate``, in one left-padded batch. Recurrent models need this.

    ``generate`` uses torch's random state, which is seeded from the first row's random numbers during the call.
    """
    greedy = sampling.temperature <= 0
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=None if sampling.stop_ids or sampling.stop_strings else sampling.max_new_tokens,
        do_sample=not greedy,
        temperature=None if greedy else sampling.temperature,
        top_k=None if greedy else sampling.top_k,
        top_p=None if greedy else sampling.top_p,
        eos_token_id=sorted(sampling.stop_ids) or None,
        pad_token_id=PADDING,
        use_cache=True,
    )
    device = next(base_of(model).parameters()).device
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor([[PADDING] * (width - len(row.prompt)) + row.prompt for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows], device=device)
    options: dict[str, Any] = {}
    if choose is not None:
        choose([str(row.adapter) for row in rows])
    if sampling.stop_strings is not None:
        options["stopping_criteria"] = StoppingCriteriaList([_ends_by_string(sampling.stop_strings, width)])
    with forked_rng():
        if rows[0].uniforms is not None:
            torch.manual_seed(int(float(rows[0].uniforms[0]) * 2**53))
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)
    for row, ids_after in zip(rows, output[:, width:].tolist(), strict=True):
        stop = next((i for i, token in enumerate(ids_after) if token in sampling.stop_ids), len(ids_after) - 1)
        row.ids = ids_after[: stop + 1]
        if sampling.stop_strings is not None:
            row.ids = row.ids[: sampling.stop_strings.length(row.ids)]


def _ends_by_string(stop_strings: StopStrings, width: int) -> Any:
    """Return a stopping criterion of ``generate`` for completions that begin at column ``width``."""

    def ends(ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return torch.tensor([stop_strings.end(row) for row in ids[:, width:].tolist()], device=ids.device)

    return ends


@contextmanager
def _clean_generation(model: Any) -> Iterator[None]:
    """Switch off training mode, gradient checkpointing and the model's own sampling defaults, such as top_k."""
    base = base_of(model)
    kept_config, was_training = base.generation_config, base.training
    checkpointing = recomputes(base)
    base.generation_config = GenerationConfig()
    model.eval()
    if checkpointing:
        set_recomputation(base, None)
    try:
        yield
    finally:
        base.generation_config = kept_config
        if checkpointing:
            set_recomputation(base, {"use_reentrant": False})
        model.train(was_training)
