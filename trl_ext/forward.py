"""Forward passes of a causal language model that compute logits at the sampled tokens only."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from trl_ext import maths
from trl_ext.prefix_tree import TreeLimits
from trl_ext.token_batch import TokenBatch, ToRead
from trl_ext.tree_attention import TreeMask

ATTENTION_PER_PRODUCT = 3
"""How many times as long a multiplication takes in attention over a mask as in a linear layer (measured on a CPU)."""


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
    return name in _parameters(type(model).forward)


@cache
def _parameters(function: Callable) -> frozenset[str]:
    """Return the names of a function's parameters. They are asked for in every step of decoding."""
    return frozenset(inspect.signature(function).parameters)


def tree_limits(model: Any) -> TreeLimits | None:
    """Return how far ``model`` can read trees, or None if it must read rows.

    A tree needs a model that sees other tokens by attention alone, takes their positions, and takes a mask of every
    query and key. Recurrent layers, layers with chunks, and kernels that build their own masks read rows. A sliding
    window does not matter to rows that are not longer than the window.

    Args:
        model: the Hugging Face model itself, without a PEFT wrapper.
    """
    config = model.config.get_text_config()
    # to_dict() would copy the whole configuration, and this is asked for each micro-batch
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    declared = (
        model._supports_attention_backend
        and not model._is_stateful
        and accepts(model, "position_ids")
        and accepts(model, "attention_mask")
        and kinds <= {"full_attention", "sliding_attention"}
        and config._attn_implementation in ("sdpa", "eager")
    )
    if not declared:
        return None
    window = getattr(config, "sliding_window", None)
    # per layer, linear layers take about 12 H^2 multiplications a token, and attention takes 2 H of them a key
    free = 6 * config.hidden_size / ATTENTION_PER_PRODUCT
    return TreeLimits(float("inf") if window is None else window, free, config._attn_implementation == "sdpa")


def _arguments(model: Any, read: ToRead) -> dict[str, Any]:
    """Return what the forward of a Hugging Face model takes to read ``read``."""
    given: dict[str, Any] = {"input_ids": read.input_ids, "use_cache": False}
    if read.layout is None:
        return given
    device = read.input_ids.device
    if model.config.get_text_config()._attn_implementation == "sdpa":
        mask = TreeMask.of(read.layout, device)
    else:  # eager attention adds the mask to the scores
        seen, lowest = read.layout.seen(device), torch.finfo(model.dtype).min
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=device).masked_fill_(~seen, lowest)
    return {**given, "position_ids": read.position_ids, "attention_mask": mask}


def read_actions(
    model: Any,
    read: ToRead,
    targets: Tensor,
    temperature: float | Tensor,
    autocast: Callable[[], AbstractContextManager],
    chunk: int | None = None,
    entropies: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run one forward pass and evaluate it at M sampled tokens.

    Args:
        model: a causal language model.
        read: what to read, and where the M sampled tokens are predicted.
        targets: the ids of the sampled tokens, [M].
        temperature: the sampling temperature, by which logits are divided, or that of each token, [M].
        autocast: makes the context manager of mixed precision.
        chunk: compute logits for at most this many tokens at a time, and recompute them in the backward pass. This
            saves memory. None computes all of them at once.
        entropies: whether to compute entropies.
        entropy_gradient: whether the entropies have a gradient.

    Returns:
        Hidden states [M, H], log-probabilities [M], and entropies [M] or None.
    """
    base = base_of(model)

    def scores(logits: Tensor, wanted: Tensor, at: float | Tensor) -> tuple[Tensor, Tensor]:
        logprobs = maths.token_logprobs(logits, wanted, at)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            return logprobs, maths.token_entropies(logits, at) if entropies else logprobs.new_zeros(())

    def tail(hidden: Tensor, wanted: Tensor, at: float | Tensor) -> tuple[Tensor, Tensor]:
        with _trunk_gives(base, hidden), autocast():
            logits = base(input_ids=read.input_ids[:1, :1], use_cache=False).logits[0]
        return scores(logits, wanted, at)

    whole = chunk is None or len(read.index) <= chunk
    with _head_sees_only(base.get_output_embeddings(), read.index, compute=whole) as seen, autocast():
        output = model(**_arguments(base, read)).logits
    hidden = seen["hidden"]
    if whole:
        logprobs, entropy = scores(output[0], targets, temperature)
        return hidden, logprobs, entropy if entropies else None
    size = chunk or 1
    parts = [hidden.split(size), targets.split(size)]
    each = temperature.split(size) if isinstance(temperature, Tensor) else [temperature] * len(parts[0])
    scored = [
        checkpoint(tail, *part, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else tail(*part)
        for part in zip(*parts, each, strict=True)
    ]
    logprobs = torch.cat([part for part, _ in scored])
    return hidden, logprobs, torch.cat([part for _, part in scored]) if entropies else None


@torch.no_grad()
def completion_logprobs(model: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """Return the log-probability of each completion after its prompt, in nats, summed over its tokens.

    ``rows`` are (prompt ids, completion ids). They are computed one at a time, so none is padded. Logits of the prompt are not
    computed, if the model can leave them out. The mode of ``model`` is restored.
    """
    found = []
    training, device, brief = model.training, base_of(model).device, accepts(base_of(model), "logits_to_keep")
    model.eval()
    for prompt, completion in rows:
        ids = torch.tensor([[*prompt, *completion]], device=device)
        kept = {"logits_to_keep": len(completion) + 1} if brief else {}
        logits = model(input_ids=ids, **kept).logits[:, -len(completion) - 1 : -1].float()
        found.append(float(maths.token_logprobs(logits, ids[:, len(prompt) :]).sum()))
    model.train(training)
    return found


def read_states(model: Any, rows: TokenBatch) -> Tensor:
    """Return the hidden states [M, H] below the head at the sampled tokens of ``rows``, after the critic's prompts."""
    base = base_of(model)
    read = (rows.critic or rows).to_read(tree_limits(base))
    return trunk_of(model)(**_arguments(base, read)).last_hidden_state.flatten(0, 1)[read.index]


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
