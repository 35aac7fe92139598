"""Rows that are sampled together, token by token, with a KV cache, by random numbers of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trl_ext.chat.stop_strings import StopStrings
from trl_ext.models.forward import accepts, base_of, cache_arguments, reading_of, tree_limits
from trl_ext.ppo import maths
from trl_ext.ppo.batch import PADDING
from trl_ext.ppo.options import Decoding
from trl_ext.process.random_states import number_of
from trl_ext.sampling.grammar import next_masks
from trl_ext.sampling.kv_cache import HEAD, KVCache, Place, assemble, empty_cache, join_caches
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.recorded_step import FEWEST_STEPS, RecordedStep, records
from trl_ext.sampling.request import Draw, TokenRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

Choose = Callable[[Sequence[str]], None] | None
"""Takes the adapter of each row of a batch, if rows have adapters of their own."""


@dataclass
class Row:
    """The completion of a request as far as it is sampled, and its place in the KV cache."""

    request: TokenRequest
    uniforms: Tensor | None
    stop_strings: StopStrings | None = None
    adapter: str | None = None
    past: Place | None = None
    longest: int | None = None
    """The most tokens that may precede one that is sampled now, if a longer row needs other angles of positions."""
    regime: int = 0
    matcher: "LLMatcher | None" = None
    """What reads the completion by its grammar."""
    refused: str | None = None
    """Why its grammar cannot be read, or not followed further, as after a step that takes too long."""
    ended: bool = False
    """Whether nothing more is sampled for it, or nothing in its :attr:`regime`."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def read_ids(self) -> list[int]:
        """Return the tokens to read before the next one is sampled: the prompt, and what was sampled already."""
        prompt = self.request.prompt_ids
        return prompt + self.ids if self.ids else prompt

    def stops(self) -> bool:
        """Return whether the completion has ended, or its next token belongs to another regime."""
        count, draw = len(self.ids), self.request.draw
        if self.refused is not None or count >= draw.max_tokens:
            return True
        if self.longest is not None and len(self.request.prompt_ids) + count > self.longest:
            return True
        if not count or self.ids[-1] in draw.stop_ids:
            return count > 0
        return self.stop_strings is not None and self.stop_strings.end(self.ids)

    def add(self, token: int, logprob: float | None) -> None:
        """Add a token that was drawn, and note whether it ends the completion."""
        self.ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.matcher is not None:
            self.matcher.consume_token(token)
            if self.matcher.is_error():
                self.refused = self.matcher.get_error().partition("\n<state>")[0]
        self.ended = self.stops()

    def note_top(self, logits: Tensor) -> None:
        """Note the likeliest tokens by ``logits`` [V] with their log-probabilities, as many as are asked for."""
        whole = torch.log_softmax(logits / self.request.draw.temperature, -1)
        logprobs, ids = (values.tolist() for values in whole.topk(min(self.request.top, len(whole))))
        self.top.append([(token, p) for token, p in zip(ids, logprobs, strict=True) if p > -torch.inf])

    @property
    def sampled(self) -> Sampled:
        """Return the completion so far."""
        logprobs = self.logprobs if self.request.draw.temperature > 0 else None
        return Sampled(self.ids, logprobs, top=self.top or None, refused=self.refused)

    @property
    def left(self) -> int:
        """Return how many tokens it may still have."""
        return self.request.draw.max_tokens - len(self.ids)

    def name(self, tokens: list[int]) -> tuple:
        """Return the name under which the states of a conversation of ``tokens`` are kept."""
        return (self.request.policy, self.regime, *tokens)


class Batch:
    """Rows that are decoded together, token by token. ``rows`` has the rows that are in the cache, in its order.

    ``plain`` is what :func:`trl_ext.sampling.kv_cache.plain_states` says of the model.
    """

    def __init__(self, model: Any, rows: list[Row], states: KVCache | None, choose: Choose, plain: str):
        self.model, self.base, self.states = model, base_of(model), states
        self.choose_adapters = choose
        self.device = next(self.base.parameters()).device
        self.rows = rows
        self.logits = self.mask = torch.zeros(0)
        self.draws = Draws(rows, self.device)
        self.reading, self.brief = reading_of(self.base), accepts(self.base, "logits_to_keep")
        limits = tree_limits(self.base)
        # whether every layer takes one mask of keys, [B, 1, 1, T], in a step of decoding
        self.masks = limits is not None and limits.blocks and plain == "everywhere"
        self.records = self.masks and records(self.base, max([row.request.draw.max_tokens for row in rows]))
        self.step: RecordedStep | None = None
        self.unsettled = 0
        """The steps that are not recorded yet, because rows have joined and others may follow."""

    def run(self) -> None:
        """Sample every row to its end, or to where its positions need other angles."""
        self.begin()
        while self.advance():
            pass

    def begin(self) -> None:
        """Read the prompts."""
        self.logits = self._prefill()

    def advance(self) -> bool:
        """Draw a token for every row that has not ended, and read these tokens. Return whether any row goes on.

        A row that has ended stays until enough have, unless it would soon be longer than the others may be.
        """
        tokens = self.draws.next_tokens(self.logits)
        running = self.running
        if len(running) <= self._few():
            self._keep_only(running)
            tokens = tokens[torch.tensor(running, dtype=torch.long, device=self.device)]
        if running:
            self.logits = self._read(tokens)
        return bool(running)

    def join(self, other: "Batch") -> None:
        """Let the rows of ``other``, which has begun, go on beside those of this one that have not ended.

        Every layer of the model must keep plain keys and values, padded or not.
        """
        self._keep_only(self.running)
        self.mask = join_caches(self.cache, self.mask, other.cache, other.mask)
        self.logits = torch.cat([self.logits, other.logits])
        self.rows = self.rows + other.rows
        self.draws = Draws(self.rows, self.device)
        self.unsettled = FEWEST_STEPS

    @property
    def running(self) -> list[int]:
        """Return the positions of the rows that have not ended."""
        return [position for position, row in enumerate(self.rows) if not row.ended]

    def _few(self) -> float:
        """Return how many running rows are so few that the ones that have ended leave the batch."""
        if self.rows[0].longest is not None:
            return len(self.rows) - 1
        return (0.5 if self.records else 0.75) * len(self.rows)  # other rows are another step to record

    # -- the model ------------------------------------------------------------------------------------------------

    def _prefill(self) -> Tensor:
        """Read the new tokens of every different prompt. Return the next token's logits for each row, [B, V]."""
        first: dict[tuple, int] = {}
        # how many tokens of each prompt were read in an earlier turn
        lines = [(row, row.read_ids, 0 if row.past is None else row.past.length) for row in self.rows]
        unique_of = [first.setdefault((row.adapter, *tokens), len(first)) for row, tokens, _ in lines]
        different = dict(zip(unique_of, lines, strict=True)).values()
        all_rows, unique = self.rows, [row for row, _, _ in different]
        past = max([read for _, _, read in different])
        width = max([len(tokens) - read for _, tokens, read in different])
        ids = torch.full((len(unique), width), PADDING)
        self.mask = torch.zeros(len(unique), past, dtype=torch.long)
        fresh = torch.zeros(len(unique), width, dtype=torch.long)
        for number, (_, tokens, read) in enumerate(different):
            ids[number, width - len(tokens) + read :] = torch.tensor(tokens[read:])
            fresh[number, width - len(tokens) + read :] = 1
            self.mask[number, past - read :] = 1
        self.mask = self.mask.to(self.device)
        self.cache = assemble([row.past for row in unique], past, self.base) if past else empty_cache(self.base)
        self.options = cache_arguments(self.base, self.cache)
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

    def _read(self, tokens: Tensor) -> Tensor:
        """Read a token of each row, [B], and return the next one's logits, [B, V]."""
        if not self.records or self.unsettled:
            self.unsettled = max(0, self.unsettled - 1)
            return self._forward(tokens.unsqueeze(1))
        if self.step is not None and self.step.full:
            self._end_recording()
        if self.step is None:
            if self.choose_adapters is not None:
                self.choose_adapters([str(row.adapter) for row in self.rows])
            steps = max([self.rows[position].left for position in self.running])
            self.step = RecordedStep(self.model, self.cache, self.mask, steps, self.reading.first)
        return self.step(tokens)

    def _end_recording(self) -> None:
        if self.step is not None:
            self.mask, self.step = self.step.mask_of_keys(), None

    def _forward(self, ids: Tensor, fresh: Tensor | None = None) -> Tensor:
        """Append ``ids`` [B, n] to the cache and return the next token's logits, [B, V]. ``fresh`` is 0 at padding."""
        fresh = torch.ones_like(ids) if fresh is None else fresh
        self.mask = torch.cat([self.mask, fresh], 1)
        options = dict(self.options)
        if self.reading.positions:
            options["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :] + self.reading.first
        if self.brief:
            # a slice of the hidden states, which the number 1 takes, makes torch copy the output head for every row
            options["logits_to_keep"] = torch.tensor([ids.shape[1] - 1], device=self.device)
        if self.choose_adapters is not None:
            self.choose_adapters([str(row.adapter) for row in self.rows])
        mask = self.mask
        if self.masks and ids.shape[1] == 1:
            # transformers would look for padding, which a device waits for. Without padding it would take a kernel that
            # reads keys and values once for every head that shares them.
            mask = mask.bool()[:, None, None]
        output = self.model(input_ids=ids, attention_mask=mask, **options)
        return output.logits[:, -1].float()

    def _keep_only(self, positions: list[int]) -> None:
        """Remove all rows but those at ``positions``. ``states``, if given, keeps the removed rows' KV cache."""
        self._end_recording()
        if self.states is not None:
            leaving = sorted(set(range(len(self.rows))) - set(positions))
            names = [self.rows[p].name(self.rows[p].read_ids) for p in leaving]
            # the last token has been sampled and not been read
            self.states.keep(names, self.cache, self.mask, leaving, [len(name) - HEAD - 1 for name in names])
        if positions:
            index = torch.tensor(positions, device=self.device)
            self.cache.batch_select_indices(index)
            self.mask = self.mask[index]
            self.logits = self.logits[index]
            self.rows = [self.rows[p] for p in positions]
            self.draws = Draws(self.rows, self.device)


class Draws:
    """How rows draw their next tokens, from where each of them is: those that draw alike are computed as if they were
    alone. A row's random numbers are its own."""

    def __init__(self, rows: Sequence[Row], device: torch.device):
        self.rows = rows
        positions: dict[Decoding, list[int]] = {}
        for position, row in enumerate(rows):
            positions.setdefault(row.request.draw.decoding, []).append(position)
        self.alike = [(one, torch.tensor(places, device=device)) for one, places in positions.items()]
        self.uniforms: Tensor | None = None  # [B, most tokens left], if any row is not greedy
        drawn = [(n, row.uniforms[len(row.ids) :]) for n, row in enumerate(rows) if row.uniforms is not None]
        if drawn:
            numbers = torch.zeros(len(rows), max([row.left for row in rows]), dtype=torch.float64)
            for place, left in drawn:
                numbers[place, : len(left)] = left
            self.uniforms = numbers.to(device)

    def next_tokens(self, logits: Tensor) -> Tensor:
        """Draw the next token of every row by ``logits`` [B, V], and add it to the rows that have not ended. Return the
        tokens [B]; an ended row's says nothing."""
        logits, numbers = allowed_only(logits, self.rows), None
        if self.uniforms is not None:
            numbers, self.uniforms = self.uniforms[:, 0], self.uniforms[:, 1:]
        if len(self.alike) == 1:
            [(decoding, _)] = self.alike
            tokens, logprobs = draw(logits, decoding, numbers)
        else:
            assert numbers is not None  # only rows that are not greedy draw differently
            tokens, logprobs = logits.new_zeros(len(logits), dtype=torch.long), logits.new_zeros(len(logits))
            for decoding, index in self.alike:
                tokens[index], part_logprobs = draw(logits[index], decoding, numbers[index])
                if part_logprobs is not None:
                    logprobs[index] = part_logprobs
        if logprobs is None:
            chosen, known = tokens.tolist(), None
        else:
            # both in one tensor, to wait for the device once; float32 holds every id below 2^24 exactly
            ids, known = torch.stack([tokens.to(logprobs.dtype), logprobs]).tolist()
            chosen = list(map(int, ids))
        for position, row in enumerate(self.rows):
            if not row.ended:
                row.add(chosen[position], None if known is None else known[position])
                if row.request.top and row.request.draw.temperature > 0:
                    row.note_top(logits[position])
        return tokens


def allowed_only(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the logits [B, V] of the next tokens without those that the grammar of a row does not allow, as -inf."""
    matchers = [None if row.ended else row.matcher for row in rows]
    if matchers.count(None) == len(matchers):
        return logits
    masks = next_masks(matchers, logits.shape[1])
    return maths.only_allowed_(logits.clone(), masks.to(logits.device))


def uniforms(key: tuple, drawn: Draw) -> Tensor | None:
    """Return uniform random numbers in [0, 1), one for each token. They depend on ``key`` only."""
    if drawn.temperature <= 0:
        return None
    generator = np.random.Generator(np.random.Philox(key=number_of(key)))
    return torch.from_numpy(generator.random(drawn.max_tokens))


def draw(logits: Tensor, decoding: Decoding, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Draw the next token of rows that draw alike. Return the tokens and, unless greedy, their log-probabilities in the
    whole distribution at the temperature, which is the one that is trained."""
    if decoding.temperature <= 0:
        return logits.argmax(-1), None
    assert uniforms is not None  # the temperature is above 0
    whole = torch.softmax(logits / decoding.temperature, -1)
    tokens = inverse_cdf(truncated(whole, decoding.top_p, decoding.top_k), uniforms)
    return tokens, whole.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token of each row at which the cumulated ``probabilities`` [B, V] pass ``uniforms`` [B].

    The token's probability is never 0.
    """
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    wanted = uniforms.to(cumulated.dtype).unsqueeze(1) * total
    # a number just below 1 rounds to 1 in float32, and no cumulated probability passes the total
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, wanted, right=True)
    tokens = tokens.clamp(max=probabilities.shape[1] - 1)  # NaN passes nothing; its log-probability is reported later
    # an accelerator adds up in parallel, so that rounding may make a sum grow at a token of probability 0
    impossible = probabilities.gather(1, tokens) == 0
    return torch.where(impossible, probabilities.argmax(-1, keepdim=True), tokens).squeeze(1)


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
