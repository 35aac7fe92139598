"""Forward passes of a causal language model that compute logits at the sampled tokens only."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from trl_ext import maths


def base_of(model: Any) -> Any:
    """Return the Hugging Face model itself, without the PEFT wrapper."""
    # PEFT puts its layers into the base model, so calling the base runs the active adapter
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trunk_of(model: Any) -> nn.Module:
    """Return the transformer below the output head. It returns hidden states."""
    base = base_of(model)
    return getattr(base, base.base_model_prefix)


def accepts(model: Any, name: str) -> bool:
    """Return whether the model's ``forward`` has a parameter ``name``."""
    return name in inspect.signature(model.forward).parameters


def read_actions(
    model: Any,
    input_ids: Tensor,
    index: Tensor,
    targets: Tensor,
    temperature: float,
    autocast: Callable[[], AbstractContextManager],
    chunk: int | None = None,
    entropies: bool = False,
    entropy_gradient: bool = False,
    adapter_names: list[str] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run one forward pass and evaluate it at M sampled tokens.

    Args:
        model: a causal language model, or a ``PeftModel`` if ``adapter_names`` are given.
        input_ids: the rows to read, [P, T].
        index: for each sampled token, the position among the P x T flattened positions that predicts it, [M].
        targets: the ids of the sampled tokens, [M].
        temperature: the sampling temperature, by which logits are divided.
        autocast: makes the context manager of mixed precision.
        chunk: compute logits for at most this many tokens at a time, and recompute them in the backward pass. This
            saves memory. None computes all of them at once.
        entropies: whether to compute entropies.
        entropy_gradient: whether the entropies have a gradient.
        adapter_names: the adapter of every row, [P].

    Returns:
        Hidden states [M, H], log-probabilities [M], and entropies [M] or None.
    """
    base = base_of(model)
    options: Any = {} if adapter_names is None else {"adapter_names": adapter_names}

    def scores(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = maths.token_logprobs(logits, wanted, temperature)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            return logprobs, maths.token_entropies(logits, temperature) if entropies else logprobs.new_zeros(())

    def tail(hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        with _trunk_gives(base, hidden), autocast():
            logits = base(input_ids=input_ids[:1, :1], use_cache=False).logits[0]
        return scores(logits, wanted)

    whole = chunk is None or len(index) <= chunk
    with _head_sees_only(base.get_output_embeddings(), index, compute=whole) as seen, autocast():
        output = model(input_ids=input_ids, use_cache=False, **options).logits
    hidden = seen["hidden"]
    if whole:
        logprobs, entropy = scores(output[0], targets)
        return hidden, logprobs, entropy if entropies else None
    scored = [
        checkpoint(tail, *part, use_reentrant=False) if torch.is_grad_enabled() else tail(*part)
        for part in zip(hidden.split(chunk or 1), targets.split(chunk or 1), strict=True)
    ]
    logprobs = torch.cat([part for part, _ in scored])
    return hidden, logprobs, torch.cat([part for _, part in scored]) if entropies else None


@contextmanager
def _head_sees_only(head: nn.Module, index: Tensor, compute: bool) -> Iterator[dict[str, Tensor]]:
    """Give the output head of a model only the hidden states at ``index`` [M], as one row [1, M, H].

    The model's own ``forward`` still applies whatever it does to logits, such as soft caps and scales. This yields a
    dict that receives ``hidden`` [M, H]. Without ``compute`` the head sees a single position, whose logits the caller
    ignores.
    """
    seen: dict[str, Tensor] = {}

    def select(_module, arguments):
        seen["hidden"] = arguments[0].flatten(0, 1)[index]
        chosen = seen["hidden"] if compute else seen["hidden"][:1].detach()
        return (chosen.unsqueeze(0), *arguments[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _trunk_gives(model: Any, hidden: Tensor) -> Iterator[None]:
    """Let the transformer below the head return ``hidden`` [M, H], so that a forward runs only the head."""
    trunk: Any = trunk_of(model)
    kept = trunk.__dict__.get("forward")
    trunk.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=hidden.unsqueeze(0))  # type: ignore[arg-type]
    try:
        yield
    finally:
        if kept is None:
            del trunk.forward
        else:
            trunk.forward = kept
