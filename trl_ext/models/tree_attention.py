"""Attention over trees of tokens, by blocks of queries."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from trl_ext.ppo.prefix_tree import BLOCK, Layout


class TreeMask(Tensor):
    """The mask [P, 1, L, L] of a :class:`Layout`, true where a query attends to a key.

    It is an ordinary mask, and ``scaled_dot_product_attention`` makes use of what is known of it, as with torch's own
    ``torch.nn.attention.bias``. Most entries are false: a block of queries attends to the tokens on the path to its
    first query, and to the block. So keys and values are gathered for each block, and attention takes L x (T + block)
    products instead of L x L. Whatever else is done with the mask gives an ordinary tensor, which is still right.
    """

    keys: Tensor
    """The flattened places of the keys of all blocks, [S x K]."""
    seen: Tensor
    """Which of its keys each query of a block attends to, [S, 1, B, K]."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Tensor:
        """Return the mask of ``layout``. It is an ordinary tensor if blocks would save little."""
        dense = layout.seen(device)
        keys = _keys_of_blocks(layout)
        if keys is None:
            return dense
        lines, blocks, _ = keys.shape
        width = dense.shape[2]
        key = torch.from_numpy(keys).to(device)
        line = torch.arange(lines, device=device).reshape(-1, 1, 1)
        query = torch.arange(width, device=device).reshape(blocks, -1, 1)
        end = torch.nn.functional.pad(torch.from_numpy(layout.end).to(device), (0, 1))[line, key].unsqueeze(2)
        mask = dense.as_subclass(cls)
        mask.keys = (key.clamp(max=width - 1) + line * width).flatten()
        mask.seen = ((key.unsqueeze(2) <= query) & (query < end)).flatten(0, 1).unsqueeze(1)
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attend by blocks, or do any other operation on an ordinary tensor."""
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask")
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention and type(mask) is cls and "keys" in vars(mask) and len(args) == 3:
                query, key, value = args
                return _attend(query, key, value, **kwargs)
            return func(*args, **kwargs)


def _keys_of_blocks(layout: Layout) -> np.ndarray | None:
    """Return the places of each block's keys, [P, blocks, K], or None if a block needs most of the line."""
    # blocks with fewer keys than K have the place behind the line, to which nothing attends
    lines, width = layout.end.shape
    count = round(width / BLOCK)
    if count < 2 or width % count:
        return None
    size = width // count
    keys = [
        np.concatenate([np.flatnonzero(end[:start] > start), np.arange(start, start + size)])
        for end in layout.end
        for start in range(0, width, size)
    ]
    longest = max(map(len, keys))
    if longest > 0.8 * width:
        return None
    places = np.full((lines, count, longest), width, dtype=np.int64)
    for number, block in enumerate(keys):
        places[number // count, number % count, : len(block)] = block
    return places


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: TreeMask, **options: Any) -> Tensor:
    """Return the attention of [P, H, L, D] queries, where every block of queries has its own keys and values."""
    lines, heads, width, _ = query.shape
    blocks, _, size, longest = attn_mask.seen.shape
    places = attn_mask.keys

    def gathered(states: Tensor) -> Tensor:
        tokens = states.transpose(1, 2).flatten(2).flatten(0, 1)
        # many blocks read a token; of the two ways, each sums bfloat16 gradients in float32 on its own kind of device
        rows = tokens.index_select(0, places) if tokens.device.type == "cpu" else embedding(places, tokens)
        return rows.view(blocks, longest, heads, -1).transpose(1, 2)

    queries = query.transpose(1, 2).reshape(blocks, size, heads, -1).transpose(1, 2)
    output = scaled_dot_product_attention(queries, gathered(key), gathered(value), attn_mask=attn_mask.seen, **options)
    return output.transpose(1, 2).reshape(lines, width, heads, -1).transpose(1, 2)
