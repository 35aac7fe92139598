"""Attention states of conversations that may go on, so that a next turn reads only what is new.

States hold for the weights that made them: they are dropped before weights change.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def plain_states(model: Any) -> str:
    """Whether a model's states are keys and values that can be cut and joined: ``everywhere``, ``windowed`` or ``no``."""
    if not model._supports_default_dynamic_cache():
        return "no"
    layers: list[Any] = DynamicCache(config=model.config).layers
    if not all(isinstance(layer, DynamicLayer) for layer in layers):
        return "no"
    return "windowed" if any(layer.is_sliding for layer in layers) else "everywhere"


@dataclass
class Block:
    """Keys and values of some conversations, layer by layer, each [B, heads, T, width], without padding among them: a row's
    ``lengths`` states stand at the right end."""

    layers: list[tuple[Tensor, Tensor]]
    lengths: list[int]

    @classmethod
    def of(cls, cache: Any, mask: Tensor, rows: list[int], lengths: list[int]) -> "Block":
        """The first ``lengths`` real states of ``rows`` of a batch; ``mask`` [B, T] says which of its columns are real."""
        width = max(lengths, default=0)
        if not rows or not width:
            return cls([], [])
        columns = torch.zeros(len(rows), width, dtype=torch.long)
        for number, (real, length) in enumerate(zip(mask[rows].cpu(), lengths, strict=True)):
            columns[number, width - length :] = real.nonzero().flatten()[:length]
        index = columns.to(mask.device)[:, None, :, None]

        def cut(values: Tensor) -> Tensor:
            chosen = values[rows]
            return chosen.gather(2, index.expand(-1, chosen.shape[1], -1, chosen.shape[3]))

        return cls([(cut(layer.keys), cut(layer.values)) for layer in cache.layers], lengths)


class KVCache:
    """Blocks by the tokens that were said; :meth:`take` gives a conversation's states away, :meth:`clear` drops all."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, tuple[Block, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, names: Sequence[Hashable], block: Block) -> None:
        """Keep the rows of ``block`` under ``names``."""
        self._rows.update({name: (block, row) for row, name in enumerate(names) if row < len(block.lengths)})

    def find(self, name: Hashable) -> tuple[Block, int] | None:
        """The block that holds ``name``, and its row there."""
        return self._rows.get(name)

    def drop(self, names: Sequence[Hashable]) -> None:
        """Forget ``names``: a longer conversation takes their place."""
        for name in names:
            self._rows.pop(name, None)

    def clear(self) -> None:
        """Drop everything: weights are about to change, or memory is wanted."""
        self._rows.clear()


def assemble(rows: Sequence[tuple[Block, int] | None], width: int, config: Any) -> DynamicCache:
    """A cache of ``rows`` whose states stand at the right end of ``width`` columns; None is a row without any."""
    places: dict[int, tuple[Block, list[int], list[int]]] = {}
    for place, row in enumerate(rows):
        if row is not None:
            _, here, there = places.setdefault(id(row[0]), (row[0], [], []))
            here.append(place)
            there.append(row[1])
    some = next(iter(places.values()))[0]
    data = []
    for layer, pair in enumerate(some.layers):
        joined = tuple(like.new_zeros(len(rows), like.shape[1], width, like.shape[3]) for like in pair)
        for block, here, there in places.values():
            for whole, values in zip(joined, block.layers[layer], strict=True):
                shared = min(width, values.shape[2])
                whole[here, :, width - shared :] = values[there][:, :, values.shape[2] - shared :]
        data.append(joined)
    return DynamicCache(data, config=config)
