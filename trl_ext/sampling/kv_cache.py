"""Keep the KV cache of conversations that may continue, so that the next turn reads only the new tokens.

Keys and values are valid only for the weights that computed them. They are dropped before the weights change.
"""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import pad
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
    kinds = set(map(type, DynamicCache(config=model.config).layers))
    # a layer of another type may hold more, which would be left behind where rows are cut out of a batch
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "no"
    local = "local" in str(
        getattr(model.config, "attention_types", None)
    )  # GPT-Neo's windows, which its cache does not know
    return "windowed" if local or DynamicSlidingWindowLayer in kinds else "everywhere"


HEAD = 2
"""The parts of a conversation's name before its tokens: a policy, and a regime of positions."""


@dataclass(eq=False)
class Block:
    """The keys and values of B conversations: for each layer a pair of tensors [B, heads, T, width].

    The last ``lengths[b]`` positions of row ``b`` are its states. Padding stands to the left of them.
    """

    layers: list[tuple[Tensor, Tensor]]
    lengths: list[int]

    @cached_property
    def bytes(self) -> int:
        """Return the memory of the block."""
        return sum([values.nbytes for pair in self.layers for values in pair])

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


@dataclass(eq=False)
class Place:
    """The states of one conversation: a row of a block."""

    block: Block
    row: int

    @property
    def length(self) -> int:
        """Return the number of tokens whose states they are."""
        return self.block.lengths[self.row]

    def first(self, count: int) -> "Place":
        """Return the states of the first ``count`` tokens, which are not copied."""
        begin = self.block.layers[0][0].shape[2] - self.length

        def cut(values: Tensor) -> Tensor:
            return values[self.row : self.row + 1, :, begin : begin + count]

        return Place(Block([(cut(keys), cut(values)) for keys, values in self.block.layers], [count]), 0)


class KVCache:
    """The kept states of conversations, by their names: :data:`HEAD` parts, and the tokens, of which the last one has
    no state.

    If the states do not fit into the budget, those that were kept first are forgotten first, and what still does not
    fit is not kept. A conversation that is forgotten is read again, so results do not change. Python frees a block once
    none of its places is kept or taken.

    Args:
        budget: the most bytes of states. By default it is half of the memory that is free when the first states are
            kept.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget, self._limit = budget, budget
        self._kept: dict[Any, Place] = {}  # in the order in which they were kept
        self._taken: WeakSet[Place] = WeakSet()  # as long as a row that is to read them has them
        self._blocks: WeakSet[Block] = WeakSet()  # as long as one of their places is kept or taken
        self.largest = 0
        """The largest :attr:`bytes` so far."""
        self.forgotten = 0
        """The number of conversations that did not fit."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Return the bytes of all blocks in memory."""
        return sum([block.bytes for block in self._blocks])

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
        states = [values for layer in cache.layers for values in (layer.keys, layer.values)]
        each = width * sum([values.shape[1] * values.shape[3] * values.element_size() for values in states])
        fitting = min(len(rows), self._limit // each)
        fitting = self._room(fitting * each) // each
        self.forgotten += len(rows) - fitting
        if fitting:
            self._put(names[:fitting], Block.of(cache, mask, rows[:fitting], lengths[:fitting]))

    def _put(self, names: Sequence[Hashable], block: Block) -> None:
        places = {name: Place(block, row) for row, name in enumerate(names)}  # equal conversations have equal states
        for name in places:
            self._kept.pop(name, None)
        self._kept.update(places)
        self._blocks.add(block)
        self.largest = max(self.largest, self.bytes)

    def _room(self, wanted: int) -> int:
        """Return how many of ``wanted`` bytes fit, once what was kept first is forgotten. What is being read stays."""
        assert self._limit is not None  # set by the caller
        excess = self.bytes + wanted - self._limit
        names_of: dict[Block, list[Hashable]] = {}
        for name, place in self._kept.items():
            names_of.setdefault(place.block, []).append(name)
        taken = {place.block for place in self._taken}
        for block, names in names_of.items():
            if excess > 0 and block not in taken:
                self.forgotten += len(names)
                for name in names:
                    del self._kept[name]
                excess -= block.bytes
        return max(0, wanted - max(0, excess))

    def take(self, names: Sequence[Hashable]) -> list[Place | None]:
        """Return the place of each of ``names``, or None if a name is not kept.

        The names are forgotten, because longer conversations will take their place.
        """
        places = [self._kept.get(name) for name in names]
        self._taken.update(filter(None, places))
        for name in names:
            self._kept.pop(name, None)
        return places

    def beginning(self, name: Sequence[Hashable], fewest: int) -> Place | None:
        """Return the states of the longest beginning, of ``fewest`` tokens or more, that a kept conversation shares
        with ``name``. At least the last token of ``name`` is not in it. Nothing is forgotten."""
        found, most = None, fewest - 1
        for kept, place in self._kept.items():
            pairs = enumerate(zip(kept, name, strict=False))
            shared = next((number for number, (one, other) in pairs if one != other), min(len(kept), len(name)))
            tokens = min(shared - HEAD, place.length, len(name) - HEAD - 1)
            if tokens > most:
                found, most = place, tokens
        return None if found is None else found.first(most)

    def take_counts(self) -> tuple[int, int]:
        """Return :attr:`largest` and :attr:`forgotten` since the last call."""
        counts = self.largest, self.forgotten
        self.largest, self.forgotten = self.bytes, 0
        return counts

    def clear(self) -> None:
        """Forget everything, because the weights are about to change or the memory is needed."""
        self._kept.clear()
        self._taken.clear()
        self._blocks.clear()
        self._limit = self.budget


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer, in memory with room for tokens to come.

    The layer of transformers copies all keys and values in every step of decoding. This one copies the new ones only,
    and moves all of them once in ``ROOM`` steps.
    """

    ROOM = 64

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._memory: list[Tensor] = []  # of the keys and of the values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, n, width], and return all of them, [B, heads, T + n, width]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        earlier: list[Any] = [self.keys, self.values]
        before = earlier[0].shape[2] if earlier[0].numel() else 0
        after = before + key_states.shape[2]
        if not self._memory or self._memory[0].shape[2] < after:
            larger = []
            for held, new in zip(earlier, (key_states, value_states), strict=True):
                larger.append(new.new_empty(*new.shape[:2], after + self.ROOM, new.shape[3]))
                if before:
                    larger[-1][:, :, :before] = held
            self._memory = larger
        keys, values = self._memory
        keys[:, :, before:after] = key_states
        values[:, :, before:after] = value_states
        self.keys, self.values = keys[:, :, :after], values[:, :, :after]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` only. Their states move into memory of their own."""
        super().batch_select_indices(indices)
        self._memory = []


def join_caches(cache: DynamicCache, mask: Tensor, other: DynamicCache, other_mask: Tensor) -> Tensor:
    """Append the rows of ``other`` to those of ``cache``, and return the mask of all. Both caches are plain.

    The masks [B, T] are 1 where one of the first T columns of a cache holds a token. What lies before the first token
    of every row is dropped.
    """
    masks = [each[:, int(each.argmax(1).min()) :] for each in (mask, other_mask)]
    width = max([each.shape[1] for each in masks])

    def joined(pair: Sequence[Any]) -> Tensor:
        """Return the keys or values [B, heads, T, width] of both, with padding on the left."""
        held = [
            values[:, :, each.shape[1] - own.shape[1] : each.shape[1]]
            for values, each, own in zip(pair, (mask, other_mask), masks, strict=True)
        ]
        return torch.cat([pad(values, (0, 0, width - values.shape[2], 0)) for values in held])

    layers: list[Any] = cache.layers
    others: list[Any] = other.layers
    for number, (mine, theirs) in enumerate(zip(layers, others, strict=True)):
        layers[number] = RoomyLayer()
        layers[number].update(joined((mine.keys, theirs.keys)), joined((mine.values, theirs.values)))
    return torch.cat([pad(each, (width - each.shape[1], 0)) for each in masks])


def empty_cache(model: Any) -> DynamicCache:
    """Return the cache in which ``model`` decodes a batch. Layers with sliding windows are those of transformers."""
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def assemble(places: Sequence[Place | None], width: int, model: Any) -> DynamicCache:
    """Return a cache of ``width`` columns with one row for each of ``places``, in which ``model`` decodes them.

    The row of None is empty. States stand at the right end.
    """
    rows_of: dict[Block, tuple[list[int], list[int]]] = {}
    for row, place in enumerate(places):
        if place is not None:
            targets, sources = rows_of.setdefault(place.block, ([], []))
            targets.append(row)
            sources.append(place.row)
    first = next(iter(rows_of))
    device = first.layers[0][0].device
    # on the device once, because lists would be copied for every layer
    copies = [(b, torch.tensor(to, device=device), torch.tensor(at, device=device)) for b, (to, at) in rows_of.items()]
    cache = empty_cache(model)
    for layer, pair in enumerate(first.layers):
        keys, values = [like.new_zeros(len(places), like.shape[1], width, like.shape[3]) for like in pair]
        for block, to, at in copies:
            for target, states in zip((keys, values), block.layers[layer], strict=True):
                shared = min(width, states.shape[2])
                target[to, :, width - shared :] = states[at][:, :, states.shape[2] - shared :]
        cache.update(keys, values, layer)
    return cache
