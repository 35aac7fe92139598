"""Recomputing activations in the backward pass, by the names of every version of transformers.

Transformers 5.23 calls it activation checkpointing and warns at each use of the old names, gradient checkpointing.
"""

from typing import Any


def recomputes(model: Any) -> bool:
    """Return whether a Hugging Face model recomputes activations."""
    new = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if new is None else new)


def set_recomputation(model: Any, options: dict[str, Any] | None) -> None:
    """Let a Hugging Face model recompute activations with the ``options`` of ``torch.utils.checkpoint``, or not
    (None)."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if options is None:
        getattr(model, f"{name}_checkpointing_disable")()
    else:
        getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": options})
