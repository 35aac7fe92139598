"""Keep the KV cache of conversations that may continue, so that the next turn reads only the new tokens.

Keys and values are valid only for the weights that computed them. They are dropped before the weights change.
"""

import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trl_ext.process.devices import free_bytes


def plain_states(model: Any) -> str:
    """Return whether a model's cache consists of keys and values that can be cut and joined.

    ``everywhere`` means that all layers do. ``windowed`` means that some layers have sliding windows. ``no`` means that
    the model has another kind of state, such as a recurrent one, or one beside keys and values.
    """
    if not model._supports_default_dynamic_cache():
        return "no"
    layers: list[Any] = DynamicCache(config=model.config).layers
    # a layer of another type may hold more, which would be left behind where rows are cut out of a batch
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return "no"
    local = "local" in str(
        getattr(model.config, "attention_types", None)
    )  # GPT-Neo's windows, which its cache does not know
    return "windowed" if local or any(layer.is_sliding for layer in layers) else "everywhere"


@dataclass
class Block:
    """The keys and values of B conversations: for each layer a pair of tensors [B, heads, T, width].

    The last ``lengths[b]`` positions of row ``b`` are its states. Padding stands to the left of them.
    """

    layers: list[tuple[Tensor, Tensor]]
    lengths: list[int]

    @property
    def bytes(self) -> int:
        """Return the memory of the block."""
        return sum(values.nbytes for pair in self.layers for values in pair)

    @classmethod
    def of(cls, cache: Any, mask: Tensor, rows: list[int], lengths: list[int]) -> "Block":
        """Return a block with the first ``lengths`` states of ``rows`` of a batch.

        ``mask`` [B, T] is 1 where a column of the batch holds a token, and 0 where it holds padding.
        """
        width = max(lengths)
        columns = torch.zeros(len(rows), width, dtype=torch.long)
        for number, (real, length) in enumerate(zip(mask[rows].cpu(), lengths, strict=True)):
            columns[number, width - length :] = real.nonzero().flatten()[:length]
        index = columns.to(mask.device)[:, None, :, None]
        picked = torch.tensor(rows, device=mask.device)  # once, because a list would be copied for every layer

        def cut(values: Tensor) -> Tensor:
            chosen = values[picked]
            return chosen.gather(2, index.expand(-1, chosen.shape[1], -1, chosen.shape[3]))

        return cls([(cut(layer.keys), cut(layer.values)) for layer in cache.layers], lengths)


@dataclass
class _Held:
    """A block in memory. ``names`` are its rows that are kept, and ``lent`` counts the rows that are being read."""

    block: Block
    names: set[Hashable]
    lent: int = 0


class KVCache:
    """The kept states of conversations, by their names. A name holds a policy and the tokens of a conversation.

    If the states do not fit into the budget, those that were kept first are forgotten first, and what still does not
    fit is not kept. A conversation that is forgotten is read again, so results do not change.

    Args:
        budget: the most bytes of states. By default it is half of the memory that is free when the first states are
            kept.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget, self._limit = budget, budget
        self._rows: dict[Hashable, tuple[Block, int]] = {}
        self._held: dict[int, _Held] = {}  # by the block's id, in the order in which they were kept
        self.bytes = 0
        """The bytes of all blocks in memory."""
        self.largest = 0
        """The largest :attr:`bytes` so far."""
        self.forgotten = 0
        """The number of conversations that did not fit."""

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, names: Sequence[Hashable], cache: Any, mask: Tensor, rows: list[int], lengths: list[int]) -> None:
        """Keep the first ``lengths`` states of ``rows`` of a batch under ``names``, as far as there is room.

        ``cache`` and ``mask`` are those of the batch (:meth:`Block.of`).
        """
        width = max(lengths, default=0)
        if not width:
            return
        if self._limit is None:
            free = free_bytes(mask.device)
            self._limit = sys.maxsize if free is None else free // 2
        each = width * sum(
            values.shape[1] * values.shape[3] * values.element_size()
            for layer in cache.layers
            for values in (layer.keys, layer.values)
        )
        fitting = min(len(rows), self._limit // each)
        self._make_room(fitting * each)
        fitting = min(fitting, max(0, self._limit - self.bytes) // each)
        self.forgotten += len(rows) - fitting
        if fitting:
            self._put(names[:fitting], Block.of(cache, mask, rows[:fitting], lengths[:fitting]))

    def _put(self, names: Sequence[Hashable], block: Block) -> None:
        rows = {name: row for row, name in enumerate(names)}  # equal conversations have equal states
        for name in rows:
            self._forget(name)
        self._rows.update({name: (block, row) for name, row in rows.items()})
        self._held[id(block)] = _Held(block, set(rows))
        self.bytes += block.bytes
        self.largest = max(self.largest, self.bytes)

    def _make_room(self, wanted: int) -> None:
        """Forget the blocks that were kept first, until ``wanted`` bytes fit. Blocks that are being read stay."""
        assert self._limit is not None  # set by the caller
        for held in list(self._held.values()):
            if self.bytes + wanted <= self._limit:
                return
            if not held.lent:
                self.forgotten += len(held.names)
                for name in list(held.names):
                    self._forget(name)

    def take(self, names: Sequence[Hashable]) -> list[tuple[Block, int] | None]:
        """Return the block that holds each of ``names`` and its row in the block, or None if a name is not kept.

        The names are forgotten, because longer conversations will take their place. The blocks stay in memory until
        :meth:`give_back`.
        """
        places = [self._rows.get(name) for name in names]
        for place in filter(None, places):
            self._held[id(place[0])].lent += 1
        for name in names:
            self._forget(name)
        return places

    def give_back(self, places: Iterable[tuple[Block, int] | None]) -> None:
        """Say that what :meth:`take` returned was copied."""
        for place in filter(None, places):
            held = self._held[id(place[0])]
            held.lent -= 1
            self._release(held)

    def _forget(self, name: Hashable) -> None:
        place = self._rows.pop(name, None)
        if place is not None:
            held = self._held[id(place[0])]
            held.names.discard(name)
            self._release(held)

    def _release(self, held: _Held) -> None:
        if not held.names and not held.lent:
            del self._held[id(held.block)]
            self.bytes -= held.block.bytes

    def take_counts(self) -> tuple[int, int]:
        """Return :attr:`largest` and :attr:`forgotten` since the last call."""
        counts = self.largest, self.forgotten
        self.largest, self.forgotten = self.bytes, 0
        return counts

    def clear(self) -> None:
        """Forget everything, because the weights are about to change or the memory is needed."""
        self._rows.clear()
        self._held.clear()
        self.bytes, self._limit = 0, self.budget


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer, in memory with room for tokens to come.

    The layer of transformers copies all keys and values in every step of decoding. This one copies the new ones only,
    and moves all of them once in ``ROOM`` steps.
    """

    ROOM = 64

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._memory: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, n, width], and return all of them, [B, heads, T + n, width]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append(0, self.keys, key_states)
        self.values = self._append(1, self.values, value_states)
        return self.keys, self.values

    def _append(self, which: int, held: Any, new: Tensor) -> Tensor:
        before = held.shape[2] if held.numel() else 0
        after = before + new.shape[2]
        memory = self._memory[which]
        if memory is None or memory.shape[2] < after:
            memory = new.new_empty(*new.shape[:2], after + self.ROOM, new.shape[3])
            if before:
                memory[:, :, :before] = held
            self._memory[which] = memory
        memory[:, :, before:after] = new
        return memory[:, :, :after]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` only. Their states move into memory of their own."""
        super().batch_select_indices(indices)
        self._memory = [None, None]


def empty_cache(model: Any) -> DynamicCache:
    """Return the cache in which ``model`` decodes a batch. Layers with sliding windows are those of transformers."""
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def assemble(rows: Sequence[tuple[Block, int] | None], width: int, model: Any) -> DynamicCache:
    """Return a cache of ``width`` columns with one row for each of ``rows``, in which ``model`` decodes them.

    Each entry of ``rows`` is a block and a row of it, or None for an empty row. States stand at the right end.
    """
    sources: dict[int, tuple[Block, list[int], list[int]]] = {}
    for place, row in enumerate(rows):
        if row is not None:
            _, here, there = sources.setdefault(id(row[0]), (row[0], [], []))
            here.append(place)
            there.append(row[1])
    first = next(iter(sources.values()))[0]
    device = first.layers[0][0].device
    # on the device once, because lists would be copied for every layer
    places = [(b, torch.tensor(to, device=device), torch.tensor(at, device=device)) for b, to, at in sources.values()]
    cache = empty_cache(model)
    for layer, pair in enumerate(first.layers):
        keys, values = (like.new_zeros(len(rows), like.shape[1], width, like.shape[3]) for like in pair)
        for block, to, at in places:
            for target, states in zip((keys, values), block.layers[layer], strict=True):
                shared = min(width, states.shape[2])
                target[to, :, width - shared :] = states[at][:, :, states.shape[2] - shared :]
        cache.update(keys, values, layer)
    return cache
