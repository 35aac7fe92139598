"""Sample from one policy, or from several adapters of one base: token ids in, token ids out.

Prompts are sorted by length and cut into batches. Equal prompts are read once. Rows that have ended leave their batch.
The KV cache of a conversation may be kept (:class:`trl_ext.sampling.kv_cache.KVCache`), so that its next turn reads
only the new tokens. A row's random numbers depend only on its own key. They do not depend on the other rows of the
batch, or on the number of processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from trl_ext.chat.stop_strings import StopStrings
from trl_ext.models.forward import base_of, length_regimes, reading_of
from trl_ext.models.lora_sampling import mixed
from trl_ext.models.randomness import evaluating
from trl_ext.ppo.batch import PADDING
from trl_ext.sampling.batch import Batch, Choose, Row, draw, uniforms
from trl_ext.sampling.kv_cache import KVCache, plain_states
from trl_ext.sampling.options import Sampled, Sampling


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
    prefixes: Sequence[int] | None = None,
    owners: Sequence[str] | None = None,
    samplings: Sequence[Sampling] | None = None,
) -> list[Sampled]:
    """Sample one completion for each prompt, in order.

    Args:
        model: the unwrapped model with the right adapter active, or a ``PeftModel`` with ``adapters``, which
            :func:`trl_ext.models.lora_sampling.mixes` must allow.
        prompts: the token ids of the prompts.
        sampling: how to sample.
        keys: the key of each row's random numbers. By default they come from torch's random state.
        adapters: the adapter of each row.
        states: the KV cache of conversations. It is read for each prompt, and filled with the new conversations.
        prefixes: the number of tokens at the beginning of each prompt whose states may be in ``states``.
        owners: the policy of each row, whose weights computed the states. By default it is the adapter.
        samplings: how to sample each row, where rows differ. The limits of batches are those of ``sampling``.
    """
    if keys is None:
        seed = int(torch.randint(2**62, (1,)))
        keys = [(seed, row) for row in range(len(prompts))]
    base = base_of(model)
    reading = reading_of(base)
    plain = plain_states(base) if reading.cached else "no"
    if states is not None and (plain != "everywhere" or not reading.padding or not reading.gaps):
        states = None  # sliding windows count columns, and kept states have padding between them
    each = [sampling] * len(prompts) if samplings is None else samplings
    rows = [Row(ids, uniforms(key, one), one) for ids, key, one in zip(prompts, keys, each, strict=True)]
    for row, adapter in zip(rows, adapters or (), strict=bool(adapters)):
        row.adapter = row.owner = adapter
    for row, owner in zip(rows, owners or (), strict=bool(owners)):
        row.owner = owner
    for row, length in zip(rows, prefixes or (), strict=bool(prefixes)):
        row.prefix = length
    with _clean_generation(model), mixed(model, adapters) if adapters else nullcontext() as choose:
        if plain == "no":
            for alike in _alike(rows, reading.padding) if reading.rows else [[row] for row in rows]:
                for batch in _batches(alike, sampling):
                    _generate_by_transformers(model, batch, alike[0].sampling, choose)
        else:
            for part in _in_regimes(rows, length_regimes(base)):
                _take_states(part, states)
                for equal in [part] if reading.padding else _equally_long(part):
                    for batch in _batches(equal, sampling):
                        Batch(model, batch, states, choose, plain).run()
    return [Sampled(row.ids, row.logprobs if row.sampling.temperature > 0 else None) for row in rows]


# -- rows and batches ---------------------------------------------------------------------------------------------


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
        names = [row.name(row.read_ids[: row.prefix]) for row in rows]
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
    groups: list[list[Row]] = []
    for row in rows:
        group = next((group for group in groups if group[0].sampling == row.sampling), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def _batches(rows: list[Row], sampling: Sampling) -> Iterator[list[Row]]:
    """Yield batches from long rows to short ones, so that a lack of memory shows in the first batch."""
    batch: list[Row] = []
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


def _generate_by_transformers(model: Any, rows: list[Row], sampling: Sampling, choose: Choose) -> None:
    """Sample with the model's own ``generate``, in one left-padded batch. Recurrent models need this."""
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=None if sampling.stop_ids or sampling.stop_strings else sampling.max_new_tokens,
        do_sample=False,  # _Drawn leaves one token to choose from
        eos_token_id=sorted(sampling.stop_ids) or None,
        pad_token_id=PADDING,
        use_cache=True,
    )
    device = next(base_of(model).parameters()).device
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor([[PADDING] * (width - len(row.prompt)) + row.prompt for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows], device=device)
    drawn = _Drawn(rows, sampling, width)
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([drawn])} if sampling.temperature > 0 else {}
    if choose is not None:
        choose([str(row.adapter) for row in rows])
    if sampling.stop_strings is not None:
        options["stopping_criteria"] = StoppingCriteriaList([_ends_by_string(sampling.stop_strings, width)])
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **options)
    for position, (row, ids_after) in enumerate(zip(rows, output[:, width:].tolist(), strict=True)):
        stop = next((i for i, token in enumerate(ids_after) if token in sampling.stop_ids), len(ids_after) - 1)
        row.ids = ids_after[: stop + 1]
        if sampling.stop_strings is not None:
            row.ids = row.ids[: sampling.stop_strings.length(row.ids)]
        row.logprobs = [step[position] for step in drawn.logprobs[: len(row.ids)]]


class _Drawn(LogitsProcessor):
    """Draws the next token of each row by the row's own random number, and leaves no other one."""

    def __init__(self, rows: list[Row], sampling: Sampling, width: int):
        self.numbers = [row.uniforms for row in rows if row.uniforms is not None]
        self.sampling, self.width = sampling, width
        self.logprobs: list[list[float]] = []
        """The log-probabilities of the drawn tokens, by step and row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        step = input_ids.shape[1] - self.width
        numbers = torch.stack([row[step] for row in self.numbers]).to(scores.device)
        tokens, logprobs = draw(scores, self.sampling.drawn, numbers)
        assert logprobs is not None  # the temperature is above 0
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
