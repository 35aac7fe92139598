"""One forward of a causal language model that scores action tokens, and makes logits for nothing else."""

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
    """The Hugging Face model itself: PEFT injects its layers in place, so calling the base runs the active adapter."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trunk_of(model: Any) -> nn.Module:
    """The transformer below the head, which returns hidden states."""
    base = base_of(model)
    return getattr(base, base.base_model_prefix)


def accepts(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
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
    """Hidden states [M, H], log-probabilities [M] and entropies [M] (or None) of the M action tokens.

    ``input_ids`` [P, T] are read; ``index`` [M] says at which of the P x T positions, flattened, each of ``targets`` [M] is
    chosen. With ``chunk``, logits exist for so many tokens at a time and are made again in the backward pass.
    ``adapter_names``: of a ``PeftModel``, the adapter of every row that is read.
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
    pieces = [
        checkpoint(tail, *part, use_reentrant=False) if torch.is_grad_enabled() else tail(*part)
        for part in zip(hidden.split(chunk or 1), targets.split(chunk or 1), strict=True)
    ]
    logprobs = torch.cat([one for one, _ in pieces])
    return hidden, logprobs, torch.cat([one for _, one in pieces]) if entropies else None


@contextmanager
def _head_sees_only(head: nn.Module, index: Tensor, compute: bool) -> Iterator[dict[str, Tensor]]:
    """Let the output head of a model see only the hidden states at ``index`` [M], as one row [1, M, H].

    The model's own forward then does whatever else it does to logits (soft caps, scales). Yields a dict that receives
    ``hidden`` [M, H]. Without ``compute`` the head makes a single logit, for the caller to ignore.
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
    """Let the transformer below the head return ``hidden`` [M, H], so that only the head and what follows it run."""
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
