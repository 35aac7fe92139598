"""A step of decoding that is recorded once as a CUDA graph, and then replayed.

A step of a model of 28 layers is some 1,900 kernels. The host needs about 15 microseconds to launch one, and the device
a few to run it, so that an H200 waits for its host most of the time. A CUDA graph launches all of them at once. Every
tensor of it has a fixed place in memory, so keys and values are written into room that was made before.
"""

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trl_ext.models.forward import angles_depend_on_length, base_of, cache_arguments

ROOM = 512
"""Most steps that a recording has room for. Attention reads the room too, so a long one costs time in every step."""
FEWEST_STEPS = 8
"""A recording takes as long as about three steps that are not recorded."""
LINED_UP = 8
"""Attention kernels read masks whose rows have a multiple of this many entries."""

_refused: WeakSet = WeakSet()
"""Models whose steps could not be recorded."""


def records(base: Any, steps: int) -> bool:
    """Return whether a batch that is sampled in at most ``steps`` steps is sampled in recorded ones.

    A model with hooks before its modules may be in pieces that the hooks gather, and autocast keeps copies of weights
    that a recording must not hold.

    Args:
        base: the Hugging Face model itself, without a PEFT wrapper, which takes one mask of keys for all layers.
        steps: the most tokens of a completion.
    """
    device = next(base.parameters()).device
    return (
        device.type == "cuda"
        and steps >= FEWEST_STEPS
        and base not in _refused
        and not torch.is_autocast_enabled(device.type)
        and not angles_depend_on_length(base)
        and not any(module._forward_pre_hooks for module in base.modules())
    )


class FixedLayer(DynamicLayer):
    """The keys and values of one layer, with fixed places for those of tokens to come.

    Args:
        keys: [B, heads, T, width].
        values: [B, heads, T, width].
        capacity: how many columns there are room for.
        column: [1], the column of the next token, which the owner moves on.
    """

    def __init__(self, keys: Tensor, values: Tensor, capacity: int, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values = (
            torch.cat([held, held.new_zeros(*held.shape[:2], capacity - held.shape[2], held.shape[3])], 2)
            for held in (keys, values)
        )
        self.column, self.is_initialized = column, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, 1, width] into the next column.

        Return those of all columns, [B, heads, capacity, width].
        """
        assert self.keys is not None and self.values is not None  # since it exists
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values


class RecordedStep:
    """Reads one token of each row, again and again, with fixed places for all tensors.

    Args:
        model: the model that reads.
        cache: what was read so far. Its layers become :class:`FixedLayer` ones.
        mask: [B, T], 1 where one of the first T columns of the cache holds a token.
        steps: how many steps there must be room for; there is room for :data:`ROOM` at most.
        first: the position of a row's first token.
    """

    def __init__(self, model: Any, cache: DynamicCache, mask: Tensor, steps: int, first: int) -> None:
        rows, self.used = mask.shape
        self.capacity = -(-(self.used + min(steps, ROOM)) // LINED_UP) * LINED_UP
        self.model, self.options = model, cache_arguments(base_of(model), cache)
        self.column = torch.tensor([self.used], device=mask.device)
        self.mask = torch.zeros(rows, 1, 1, self.capacity, dtype=torch.bool, device=mask.device)
        self.mask[:, 0, 0, : self.used] = mask.bool()
        self.positions = mask.sum(1, keepdim=True) + first
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=mask.device)
        layers: list[Any] = cache.layers
        for number, layer in enumerate(layers):
            keys, values = layer.keys[:, :, : self.used], layer.values[:, :, : self.used]
            layers[number] = FixedLayer(keys, values, self.capacity, self.column)
        self._replay: Callable[[], Tensor] | None = None

    @property
    def full(self) -> bool:
        """Return whether every column is taken."""
        return self.used == self.capacity

    def mask_of_keys(self) -> Tensor:
        """Return [B, T], 1 where one of the columns that were read holds a token, and 0 where it holds padding."""
        return self.mask[:, 0, 0, : self.used].long()

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read ``tokens`` [B] and return the logits of the next ones, [B, V]. The next call overwrites them."""
        self.ids.copy_(tokens.unsqueeze(1))
        if self._replay is None:
            self._replay = self._record()
        self.used += 1
        return self._replay()

    def _read(self) -> Tensor:
        self.mask.index_fill_(3, self.column, True)
        output = self.model(input_ids=self.ids, attention_mask=self.mask, position_ids=self.positions, **self.options)
        logits = output.logits[:, -1].float()
        self.column += 1
        self.positions += 1
        return logits

    def _record(self) -> Callable[[], Tensor]:
        """Return what runs the step again. Where it cannot be recorded, that is the step itself."""
        if self.mask.device.type != "cuda":
            return self._read
        now, stream = torch.cuda.current_stream(self.mask.device), torch.cuda.Stream(self.mask.device)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            self._read()  # kernels are loaded and chosen when they first run, which cannot be recorded
            self.column -= 1
            self.positions -= 1
            try:
                # other threads may use the device, as one does that trains while this one samples
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    logits = self._read()
                finally:
                    graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                _refused.add(base_of(self.model))
                warnings.warn(
                    f"{type(base_of(self.model)).__name__}: a step of decoding cannot be recorded as a CUDA graph, so "
                    f"that the device waits for its host in every step: {error}",
                    stacklevel=2,
                )
                return self._read
            finally:
                now.wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
