"""Sample from one policy, or from several adapters of one base: token ids in, token ids out.

Prompts are sorted by length and cut into batches. Equal prompts are read once. Rows that have ended leave their batch.
The KV cache of a conversation may be kept (:class:`trl_ext.sampling.kv_cache.KVCache`), so that its next turn reads
only the new tokens. A row's random numbers depend only on its own key. They do not depend on the other rows of the
batch, or on the number of processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from trl_ext.chat.encoding import Tokenizer
from trl_ext.chat.stop_strings import StopStrings
from trl_ext.models.forward import base_of, length_regimes, logits_of, reading_of
from trl_ext.models.lora_sampling import mixed
from trl_ext.models.randomness import evaluating
from trl_ext.ppo.batch import PADDING
from trl_ext.ppo.options import BATCH_ROWS
from trl_ext.sampling.batch import Batch, Choose, Draws, Row, uniforms
from trl_ext.sampling.grammar import GrammarError, grammars_of
from trl_ext.sampling.kv_cache import KVCache, plain_states
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.packed_weights import FEWEST_STEPS, packed
from trl_ext.sampling.request import Draw, TokenRequest


def generate(
    model: Any, prompts: list[list[int]], draw: Draw, tokenizer: Tokenizer | None = None, batch_size: int = BATCH_ROWS
) -> list[list[int]]:
    """Return the token ids of :func:`sample`, without log-probabilities. ``tokenizer`` is for stop strings."""
    requests = [TokenRequest("", prompt, draw) for prompt in prompts]
    return [completion.ids for completion in sample(model, requests, {"": tokenizer}, batch_size)]


@torch.no_grad()
def sample(
    model: Any,
    requests: Sequence[TokenRequest],
    tokenizers: Mapping[str, Tokenizer | None] | None = None,
    batch_size: int = BATCH_ROWS,
    batch_tokens: int | None = None,
    adapters: Mapping[str, str] | None = None,
    states: KVCache | None = None,
) -> list[Sampled]:
    """Sample one completion for each request, in order.

    Args:
        model: the unwrapped model with the right adapter active, or a ``PeftModel`` with ``adapters``, which
            :func:`trl_ext.models.lora_sampling.mixes` must allow.
        requests: what is asked. The random numbers of those without a key come from torch's random state.
        tokenizers: the tokenizer of each policy, which finds stop strings and reads grammars.
        batch_size: the most rows of a batch.
        batch_tokens: the most tokens of a batch, padding included. A longer row is alone in its batch.
        adapters: the adapter of each policy.
        states: the KV cache of conversations. It is read for each prompt, and filled with the new conversations.

    A request whose grammar cannot be compiled, or not with the policy's tokenizer, is :attr:`Sampled.refused`.
    """
    base = base_of(model)
    reading = reading_of(base)
    plain = plain_states(base) if reading.cached else "no"
    if states is not None and (plain != "everywhere" or not reading.padding or not reading.gaps):
        states = None  # sliding windows count columns, and kept states have padding between them
    rows = rows_of(requests, base, tokenizers, adapters)
    steps = max([request.draw.max_tokens for request in requests], default=0)
    choosing = mixed(model, adapters.values()) if adapters else nullcontext()
    packing = packed(base) if steps >= FEWEST_STEPS else nullcontext()
    with _clean_generation(model), choosing as choose, packing:
        if plain == "no":
            left = [row for row in rows if not row.ended]
            for equal in [left] if reading.padding else _equally_long(left):
                for batch in _batches(equal, batch_size if reading.rows else 1, batch_tokens):
                    _generate_by_transformers(model, batch, choose)
        else:
            for part in _in_regimes(rows, length_regimes(base)):
                _take_states(part, states)
                for equal in [part] if reading.padding else _equally_long(part):
                    for batch in _batches(equal, batch_size, batch_tokens):
                        Batch(model, batch, states, choose, plain).run()
    return [row.sampled for row in rows]


# -- rows and batches ---------------------------------------------------------------------------------------------


def rows_of(
    requests: Sequence[TokenRequest],
    base: Any,
    tokenizers: Mapping[str, Tokenizer | None] | None,
    adapters: Mapping[str, str] | None,
) -> list[Row]:
    """Return a row for each request, before anything is sampled. ``base`` is the model, and the others are those of
    :func:`sample`."""
    seed = int(torch.randint(2**62, (1,))) if any(request.key is None for request in requests) else 0
    keys = [(seed, row) if request.key is None else request.key for row, request in enumerate(requests)]
    rows = [Row(request, uniforms(key, request.draw)) for request, key in zip(requests, keys, strict=True)]
    for row in rows:
        policy, strings = row.request.policy, row.request.draw.stop
        row.stop_strings = StopStrings.of((tokenizers or {})[policy], strings) if strings else None
        row.adapter = adapters[policy] if adapters else None
        if row.request.draw.grammar is not None:
            grammars = grammars_of((tokenizers or {})[policy], logits_of(base))
            try:
                row.matcher = grammars.matcher(row.request.draw.grammar)
            except GrammarError as error:
                row.refused = str(error)
        row.ended = row.stops()
    return rows


def rows_may_join(base: Any) -> bool:
    """Return whether rows can join others of a model that are being sampled (:meth:`Batch.join`): it keeps plain keys
    and values, padded or not, and its angles of positions do not depend on lengths."""
    reading = reading_of(base)
    plain = reading.cached and reading.padding and reading.gaps and plain_states(base) == "everywhere"
    return plain and not length_regimes(base)


def _in_regimes(rows: list[Row], regimes: Sequence[int]) -> Iterator[list[Row]]:
    """Yield the rows that are sampled by the same angles of positions, for as long as they are (``length_regimes``)."""
    # a row that grows beyond a regime goes on in the next one, without its cache, as in the generation of transformers
    for number, longest in enumerate([*regimes, None]):
        here = []
        for row in rows:
            row.longest, row.regime = longest, number
            row.ended = row.stops()
            if not row.ended:
                here.append(row)
        if here:
            yield here


def _take_states(rows: list[Row], states: KVCache | None) -> None:
    """Give rows the states of their conversations' earlier turns, as far as these are kept."""
    if states is not None:
        names = [row.name(row.read_ids[: row.request.read]) for row in rows]
        for row, past in zip(rows, states.take(names), strict=True):
            row.past = past


def _equally_long(rows: list[Row]) -> list[list[Row]]:
    """Return the rows in groups that need no padding, for models that would count it."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(len(row.read_ids), []).append(row)
    return list(groups.values())


def _batches(rows: list[Row], batch_size: int, batch_tokens: int | None) -> Iterator[list[Row]]:
    """Yield batches from long rows to short ones, so that a lack of memory shows in the first batch."""
    batch: list[Row] = []
    new = 0  # the most new tokens of a row of the batch
    for row in sorted(rows, key=lambda row: -len(row.request.prompt_ids)):
        new = max(new if batch else 0, row.request.draw.max_tokens)
        longest = len((batch or [row])[0].request.prompt_ids) + new
        full = batch_tokens is not None and (len(batch) + 1) * longest > batch_tokens
        if batch and (full or len(batch) == batch_size):
            yield batch
            batch, new = [], row.request.draw.max_tokens
        batch.append(row)
    if batch:
        yield batch


def _generate_by_transformers(model: Any, rows: list[Row], choose: Choose) -> None:
    """Sample with the model's own ``generate``, in one left-padded batch. Recurrent models need this."""
    device = next(base_of(model).parameters()).device
    prompts = [row.request.prompt_ids for row in rows]
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    if choose is not None:
        choose([str(row.adapter) for row in rows])
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=GenerationConfig(max_new_tokens=max([row.left for row in rows]), do_sample=False),
        logits_processor=LogitsProcessorList([_Choice(rows, device)]),
        stopping_criteria=StoppingCriteriaList([_Ended(rows)]),
    )


class _Choice(LogitsProcessor):
    """Draws the next token of each row as :class:`Batch` does, and leaves no other one to choose from."""

    def __init__(self, rows: list[Row], device: torch.device):
        self.draws = Draws(rows, device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        tokens = self.draws.next_tokens(scores)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)


class _Ended(StoppingCriteria):
    """Ends rows where they know that they have ended."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor([row.ended for row in self.rows], device=input_ids.device)


@contextmanager
def _clean_generation(model: Any) -> Iterator[None]:
    """Switch off training mode, in which activations are recomputed, and the model's own defaults, such as top_k."""
    base = base_of(model)
    kept_config = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        with evaluating(model):
            yield
    finally:
        base.generation_config = kept_config
