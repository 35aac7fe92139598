"""Keep the KV cache of conversations that may continue, so that the next turn reads only the new tokens.

Keys and values are valid only for the weights that computed them. They are dropped before the weights change.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def plain_states(model: Any) -> str:
    """Return whether a model's cache consists of keys and values that can be cut and joined.

    ``everywhere`` means that all layers do. ``windowed`` means that some layers have sliding windows. ``no`` means that
    the model has another kind of state, such as a recurrent one.
    """
    if not model._supports_default_dynamic_cache():
        return "no"
    layers: list[Any] = DynamicCache(config=model.config).layers
    if not all(isinstance(layer, DynamicLayer) for layer in layers):
        return "no"
    return "windowed" if any(layer.is_sliding for layer in layers) else "everywhere"


@dataclass
class Block:
    """The keys and values of B conversations: for each layer a pair of tensors [B, heads, T, width].

    The last ``lengths[b]`` positions of row ``b`` are its states. Padding stands to the left of them.
    """

    layers: list[tuple[Tensor, Tensor]]
    lengths: list[int]

    @classmethod
    def of(cls, cache: Any, mask: Tensor, rows: list[int], lengths: list[int]) -> "Block":
        """Return a block with the first ``lengths`` states of ``rows`` of a batch.

        ``mask`` [B, T] is 1 where a column of the batch holds a token, and 0 where it holds padding.
        """
        width = max(lengths, default=0)
        if not rows or not width:
            return cls([], [])
        columns = torch.zeros(len(rows), width, dtype=torch.long)
        for number, (real, length) in enumerate(zip(mask[rows].cpu(), lengths, strict=True)):
            columns[number, width - length :] = real.nonzero().flatten()[:length]
        index = columns.to(mask.device)[:, None, :, None]
        picked = torch.tensor(rows, device=mask.device)  # once, because a list would be copied for every layer

        def cut(values: Tensor) -> Tensor:
            chosen = values[picked]
            return chosen.gather(2, index.expand(-1, chosen.shape[1], -1, chosen.shape[3]))

        return cls([(cut(layer.keys), cut(layer.values)) for layer in cache.layers], lengths)


class KVCache:
    """The kept states of conversations, by their names. A name holds a policy and the tokens of a conversation."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, tuple[Block, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, names: Sequence[Hashable], block: Block) -> None:
        """Keep the rows of ``block`` under ``names``, one name for each row."""
        self._rows.update({name: (block, row) for row, name in enumerate(names) if row < len(block.lengths)})

    def find(self, name: Hashable) -> tuple[Block, int] | None:
        """Return the block that holds ``name`` and its row in the block, or None if ``name`` is not kept."""
        return self._rows.get(name)

    def drop(self, names: Sequence[Hashable]) -> None:
        """Forget ``names``. The caller does this when longer conversations take their place."""
        for name in names:
            self._rows.pop(name, None)

    def clear(self) -> None:
        """Forget everything, because the weights are about to change or the memory is needed."""
        self._rows.clear()


def assemble(rows: Sequence[tuple[Block, int] | None], width: int, config: Any) -> DynamicCache:
    """Return a cache of ``width`` columns with one row for each of ``rows``.

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
    data = []
    for layer, pair in enumerate(first.layers):
        joined = tuple(like.new_zeros(len(rows), like.shape[1], width, like.shape[3]) for like in pair)
        for block, to, at in places:
            for target, values in zip(joined, block.layers[layer], strict=True):
                shared = min(width, values.shape[2])
                target[to, :, width - shared :] = values[at][:, :, values.shape[2] - shared :]
        data.append(joined)
    return DynamicCache(data, config=config)
