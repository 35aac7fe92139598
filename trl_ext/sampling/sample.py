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
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from trl_ext.chat.encoding import Tokenizer
from trl_ext.chat.stop_strings import StopStrings
from trl_ext.models.forward import base_of, length_regimes, logits_of, reading_of
from trl_ext.models.lora_sampling import mixed
from trl_ext.models.randomness import evaluating
from trl_ext.ppo.batch import PADDING
from trl_ext.ppo.options import BATCH_ROWS, Decoding
from trl_ext.sampling.batch import Batch, Choose, Row, allowed_only, draw, uniforms
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
            left = [row for row in rows if not row.stops()]
            for alike in _alike(left, reading.padding) if reading.rows else [[row] for row in left]:
                for batch in _batches(alike, batch_size, batch_tokens):
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
                row.fault = str(error)
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
            if not row.stops():
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


def _alike(rows: list[Row], padding: bool) -> list[list[Row]]:
    """Return the rows in groups that are sampled alike, because transformers' generation samples a batch alike."""
    # padding: whether the model hides it, so that prompts of one group may have different lengths
    if not padding:
        return [alike for equal in _equally_long(rows) for alike in _alike(equal, True)]
    groups: dict[tuple[Draw, StopStrings | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.request.draw, row.stop_strings), []).append(row)
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
    drawn, stop_strings = rows[0].request.draw, rows[0].stop_strings  # of all rows
    config = GenerationConfig(
        max_new_tokens=drawn.max_tokens,
        min_new_tokens=None if drawn.stop_ids or stop_strings else drawn.max_tokens,
        do_sample=False,  # _Choice leaves one token to choose from
        eos_token_id=sorted(drawn.stop_ids) or None,
        pad_token_id=PADDING,
        use_cache=True,
    )
    device = next(base_of(model).parameters()).device
    prompts = [row.request.prompt_ids for row in rows]
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    choice = _Choice(rows, drawn.decoding, width)
    chooses = drawn.temperature > 0 or drawn.grammar is not None
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([choice])} if chooses else {}
    if choose is not None:
        choose([str(row.adapter) for row in rows])
    if stop_strings is not None:
        options["stopping_criteria"] = StoppingCriteriaList([_ends_by_string(stop_strings, width)])
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)
    for position, (row, ids_after) in enumerate(zip(rows, output[:, width:].tolist(), strict=True)):
        stop = next((i for i, token in enumerate(ids_after) if token in drawn.stop_ids), len(ids_after) - 1)
        row.ids = ids_after[: stop + 1]
        if stop_strings is not None:
            row.ids = row.ids[: stop_strings.length(row.ids)]
        row.logprobs = [step[position] for step in choice.logprobs[: len(row.ids)]]


class _Choice(LogitsProcessor):
    """Draws the next token of each row by the row's own random number, among those that its grammar allows, and leaves
    no other one."""

    def __init__(self, rows: list[Row], decoding: Decoding, width: int):
        self.rows, self.numbers = rows, [row.uniforms for row in rows if row.uniforms is not None]
        self.decoding, self.width = decoding, width
        self.logprobs: list[list[float]] = []
        """The log-probabilities of the drawn tokens, by step and row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        step = input_ids.shape[1] - self.width
        ended = [row.matcher is None or row.matcher.is_stopped() for row in self.rows]
        if step:
            for row, token, over in zip(self.rows, input_ids[:, -1].tolist(), ended, strict=True):
                if row.matcher is not None and not over:
                    row.matcher.consume_token(token)
        scores = allowed_only(scores, self.rows, ended)
        numbers = torch.stack([row[step] for row in self.numbers]).to(scores.device) if self.numbers else None
        tokens, logprobs = draw(scores, self.decoding, numbers)
        if logprobs is not None:
            self.logprobs.append(logprobs.tolist())
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)


def _ends_by_string(stop_strings: StopStrings, width: int) -> Any:
    """Return a stopping criterion of ``generate`` for completions that begin at column ``width``."""

    def ends(ids: Tensor, scores: Any, **options: Any) -> Tensor:
        return torch.tensor([stop_strings.end(row) for row in ids[:, width:].tolist()], device=ids.device)

    return ends


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
