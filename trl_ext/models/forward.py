"""Forward passes of a causal language model that compute logits at the sampled tokens only."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from trl_ext.chat.encoding import context_of
from trl_ext.models.randomness import evaluating
from trl_ext.models.tree_attention import TreeMask
from trl_ext.ppo import maths
from trl_ext.ppo.batch import PADDING, TokenBatch, ToRead
from trl_ext.ppo.prefix_tree import TreeLimits
from trl_ext.process import distributed

ATTENTION_PER_PRODUCT = 3
"""How many times as long a multiplication takes in attention over a mask as in a linear layer (measured on a CPU)."""


def base_of(model: Any) -> Any:
    """Return the Hugging Face model itself, without the PEFT wrapper."""
    # PEFT puts its layers into the base model, so calling the base runs the active adapter
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trunk_of(model: Any) -> nn.Module:
    """Return the transformer below the output head. It returns hidden states.

    Raises:
        ValueError: the model has no part that is a transformer of its own.
    """
    base = base_of(model)
    trunk = getattr(base, base.base_model_prefix, None)
    if not isinstance(trunk, nn.Module):  # the prefix of Llama 4 is that of its vision-language model
        trunk = next((child for child in base.children() if isinstance(child, PreTrainedModel)), None)
    if trunk is None:
        raise ValueError(f"{type(base).__name__}: the transformer below its head is not known; use another model")
    return trunk


def trunks_of(base: Any) -> list[nn.Module]:
    """Return the modules of a Hugging Face model one of which its own forward calls before the head, the inner one
    first."""
    trunk = trunk_of(base)
    inner = getattr(trunk, "decoder", None)  # some models call the decoder inside of their transformer, and not this
    return [*([inner] if isinstance(inner, nn.Module) else []), trunk]


def head_width(model: Any) -> int:
    """Return the width of the hidden states that the output head of ``model`` reads.

    In some models it is not ``hidden_size``, because they project the hidden states before the head.
    """
    head = base_of(model).get_output_embeddings()
    weight = getattr(head, "weight", None)
    return base_of(model).config.get_text_config().hidden_size if weight is None else int(weight.shape[-1])


def accepts(model: Any, name: str) -> bool:
    """Return whether the model's ``forward`` has a parameter ``name``."""
    return name in _parameters(type(model).forward)


@cache
def _parameters(function: Callable) -> frozenset[str]:
    """Return the names of a function's parameters. They are asked for in every step of decoding."""
    return frozenset(inspect.signature(function).parameters)


def cache_arguments(model: Any, cache: Any) -> dict[str, Any]:
    """Return the arguments with which ``model`` reads and fills a cache of keys and values.

    transformers 5.24 calls it ``cache``, and also what models with recurrent states keep. Older versions call it
    ``past_key_values``.
    """
    name = "cache" if accepts(model, "cache") and not model._is_stateful else "past_key_values"
    return {name: cache, "use_cache": True}


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
        and reading_of(model).positions
    )
    if not declared:
        return None
    window = getattr(config, "sliding_window", None)
    # per layer, linear layers take about 12 H^2 multiplications a token, and attention takes 2 H of them a key
    free = 6 * config.hidden_size / ATTENTION_PER_PRODUCT
    return TreeLimits(float("inf") if window is None else window, free, config._attn_implementation == "sdpa")


@dataclass(frozen=True)
class Reading:
    """How a model must be given what it reads, which short forwards have shown.

    ``positions``: positions that are given, counted from ``first``, are those that it would count itself. ``padding``:
    what a row computes does not depend on padding to its left, so that rows of different lengths can be sampled
    together. ``cached``: it goes on from a cache of keys and values. ``gaps``: padding may stand between what is in the
    cache and new tokens, so that the cache of a conversation can be kept. ``rows``: rows of one batch are sampled as
    each alone. ``direct``: the output head reads what the transformer returns.
    """

    positions: bool
    padding: bool
    first: int = 0
    cached: bool = True
    gaps: bool = True
    rows: bool = True
    direct: bool = True


_readings: WeakKeyDictionary = WeakKeyDictionary()


def reading_of(model: Any) -> Reading:
    """Return how a Hugging Face model must be given what it reads. It is asked once, while its weights are whole.

    Some models have no argument for positions, or count padding as tokens. Those of RoBERTa's kind begin behind the id
    of the padding token, and count every token but this one, which a policy may sample.
    """
    if model not in _readings:
        if next(model.parameters()).device.type == "meta":
            return Reading(accepts(model, "position_ids"), True)
        _readings[model] = _ask_reading(model)
    return _readings[model]


def share_reading(model: Any) -> None:
    """Let all processes know what :func:`reading_of` says in the main one, which has the weights.

    They call this together.
    """
    _readings[model] = distributed.broadcast_from_main(reading_of(model) if distributed.is_main() else None)


def logits_of(base: Any) -> int:
    """Return the number of logits of a Hugging Face model, which may be larger than the vocabulary of its tokenizer."""
    return base.config.get_text_config().vocab_size


def beyond(model: Any, highest: int, longest: int) -> str:
    """Return why a model cannot read rows whose highest token id and number of tokens are these, or an empty text."""
    size, room = logits_of(base_of(model)), room_of(base_of(model))
    if highest >= size:
        return f"token id {highest} is outside its vocabulary of {size}"
    return f"a row has {longest} tokens, and it reads at most {room}" if room is not None and longest > room else ""


def room_of(model: Any) -> int | None:
    """Return how many tokens a Hugging Face model can read, or None if its configuration sets no limit."""
    context = context_of(model.config)
    return None if context is None else context - reading_of(model).first  # some begin to count behind 0


def rounds(model: Any) -> bool:
    """Return whether a Hugging Face model computes anywhere in less than float32."""
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    device = next(model.parameters()).device.type
    tensor_cores = device != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return half or tensor_cores or bool(getattr(model, "is_quantized", False))


PROBES = ((3, 4, 5, 6, 7), (8, 2, 9, 4, 1))
"""Two short rows to read and a token between them, as elevenths of the vocabulary. Special tokens, whose activations
are so large in some models that rounding shows, stand at the ends of most vocabularies."""


def _ask_reading(model: Any) -> Reading:
    """Return how a model must be given what it reads: what all of :data:`PROBES` show."""
    size = model.config.get_text_config().vocab_size
    found = [_probed(model, [size * n // 11 for n in probe]) for probe in PROBES]
    if len({one.first for one in found}) > 1:
        found = [replace(one, positions=False, first=0) for one in found]
    shown = {f.name: all(getattr(one, f.name) for one in found) for f in fields(Reading) if f.name != "first"}
    return Reading(first=found[0].first, **shown)


@torch.no_grad()
def _probed(model: Any, probe: Sequence[int]) -> Reading:
    """Return what short forwards of four tokens show, with a fifth one as padding."""
    device, positioned = next(model.parameters()).device, accepts(model, "position_ids")
    *ids, filler = probe
    headless = model.get_output_embeddings() is None  # a model for classification, of which only the states are read

    def read(**options: Any) -> Tensor:
        tensors = {name: torch.tensor(row, device=device) for name, row in {"input_ids": [ids], **options}.items()}
        output = trunk_of(model)(**tensors).last_hidden_state if headless else model(**tensors).logits
        return output[0, -1].float()

    def continued(start: int | None, gap: int) -> Tensor | None:
        """The last token after the others are in a cache, and then a gap, or None if the model has no such cache."""
        mask = [1, 1, 1, *[0] * gap, 1]
        places = [] if start is None else [start + n for n in (0, 1, 2, *[2] * gap, 3)]
        options = cache_arguments(model, DynamicCache(config=model.config))
        try:
            for part in (slice(0, 3), slice(3, None)):
                inputs = {
                    "input_ids": [[*ids[:3], *[PADDING] * gap, ids[3]][part]],
                    "attention_mask": [mask[: part.stop]],
                }
                inputs |= {"position_ids": [places[part]]} if places else {}
                tensors = {name: torch.tensor(row, device=device) for name, row in inputs.items()}
                output = model(**tensors, **options).logits
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return None
        return output[0, -1].float()

    def padded(filler: int, start: int | None) -> Tensor:
        places = {} if start is None else {"position_ids": [[start + n for n in (0, 0, 0, 0, 1, 2, 3)]]}
        return read(input_ids=[[filler] * 3 + ids], attention_mask=[[0] * 3 + [1] * 4], **places)

    with evaluating(model):
        plain, exact = read(), not rounds(model)
        starts = [0, (getattr(model.config.get_text_config(), "pad_token_id", None) or 0) + 1] if positioned else []
        first = next((n for n in starts if _close(plain, read(position_ids=[[n, n + 1, n + 2, n + 3]]), 1e-4)), None)
        row, positions = padded(PADDING, first), first is not None
        # half precision rounds a wider row otherwise, so that small effects of wrong positions would not show
        tolerance = 1e-4 if exact else 0.1
        padding = (
            _close(row, padded(filler, first), tolerance) and _close(plain, row, tolerance) and (exact or positions)
        )
        after, later = (None, None) if headless else (continued(first, 0), continued(first, 2))
        cached = after is not None and _close(plain, after, tolerance)
        gaps = cached and later is not None and _close(plain, later, tolerance) and (exact or positions)
        together = headless or cached or _samples_rows(model, torch.tensor([ids, ids[::-1]], device=device), tolerance)
        direct = headless or _reads_states(model, torch.tensor([ids], device=device))
    return Reading(positions, padding, first or 0, cached, gaps, together, direct)


def _samples_rows(model: Any, ids: Tensor, tolerance: float) -> bool:
    """Return whether a model's own generation samples two rows together as each alone."""
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": PADDING}
    try:
        generations = [
            model.generate(
                rows, attention_mask=torch.ones_like(rows), output_logits=True, return_dict_in_generate=True, **options
            )
            for rows in (ids, ids[:1], ids[1:])
        ]
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    both, *alone = [torch.stack(one.logits).float() for one in generations]
    return all(_close(both[:, n], one[:, 0], tolerance) for n, one in enumerate(alone))


def _reads_states(model: Any, ids: Tensor) -> bool:
    """Return whether the output head of a model reads what its transformer returns, with no layer in between."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        model(input_ids=ids)
        states = trunk_of(model)(input_ids=ids).last_hidden_state
    except (AttributeError, TypeError, ValueError):  # it has no transformer that can be called alone
        return False
    finally:
        handle.remove()
    return bool(seen) and seen[0].shape == states.shape and bool((seen[0] - states).abs().max() <= 1e-4 * states.std())


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two rows of logits, or several of them, are nearly one distribution.

    That is the mean distance of their log-probabilities, each counted as often as its token, beside their spread.
    """
    real = one.isfinite() & other.isfinite()  # some models rule tokens out
    if not torch.equal(one.isfinite(), other.isfinite()) or not bool(real.any()):
        return False
    told, heard = (logits.masked_fill(~real, -torch.inf).log_softmax(-1) for logits in (one, other))
    apart = (told.exp() * torch.where(real, (told - heard).abs(), 0.0)).sum(-1).max()
    return bool(apart <= tolerance * one[real].std() + 1e-6)


def length_regimes(model: Any) -> tuple[int, ...]:
    """Return the lengths beyond which a model turns positions by other angles: those of its "longrope", if it has it.

    With n tokens in front of it, a token is predicted by the angles for n tokens, and all n tokens are read with these.
    So rows that are shorter and longer than such a length cannot be read together, nor can one cache serve both.

    Args:
        model: the Hugging Face model itself, without a PEFT wrapper.
    """
    config, lengths = model.config.get_text_config(), set()
    for kind in _angles(config):
        if kind.get("rope_type", kind.get("type")) == "longrope":
            lengths.add(
                kind.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
            )
    return tuple(sorted(length for length in lengths if length is not None))


def angles_depend_on_length(model: Any) -> bool:
    """Return whether a model turns positions by angles that depend on the length of what it reads."""
    kinds = {kind.get("rope_type", kind.get("type")) for kind in _angles(model.config.get_text_config())}
    return not kinds.isdisjoint(("longrope", "dynamic"))


def _angles(config: Any) -> list[dict[str, Any]]:
    """Return the options of the angles of positions, which may be apart for kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]


def _arguments(model: Any, read: ToRead) -> dict[str, Any]:
    """Return what the forward of a Hugging Face model takes to read ``read``."""
    arguments: dict[str, Any] = {"input_ids": read.input_ids, "use_cache": False}
    device, first = read.input_ids.device, reading_of(model).first
    if read.layout is None and first:
        places = torch.arange(first, first + read.input_ids.shape[1], device=device)
        return {**arguments, "position_ids": places.expand(read.input_ids.shape)}
    if read.layout is None:
        return arguments
    assert read.position_ids is not None  # trees have them
    if model.config.get_text_config()._attn_implementation == "sdpa":
        mask = TreeMask.of(read.layout, device)
    else:  # eager attention adds the mask to the scores
        seen, lowest = read.layout.seen(device), torch.finfo(model.dtype).min
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=device).masked_fill_(~seen, lowest)
    return {**arguments, "position_ids": read.position_ids + first, "attention_mask": mask}


def read_actions(
    model: Any,
    read: ToRead,
    targets: Tensor,
    temperature: float | Tensor,
    autocast: Callable[[], AbstractContextManager],
    chunk: int | None = None,
    entropies: bool = False,
    entropy_gradient: bool = False,
    masks: Callable[[], Tensor | None] = lambda: None,
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
        masks: returns which tokens were allowed in place of each sampled one, [M, ceil(V / 32)] int32 with a bit for
            each token (:mod:`trl_ext.sampling.grammar`), or None if all were. An accelerator reads meanwhile.

    Returns:
        Hidden states [M, H], log-probabilities [M], and entropies [M] or None.
    """
    base = base_of(model)
    head = base.get_output_embeddings()

    def scores(logits: Tensor, wanted: Tensor, at: float | Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs = maths.token_logprobs(logits, wanted, at, allowed)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            return logprobs, maths.token_entropies(logits, at, allowed) if entropies else logprobs.new_zeros(())

    def tail(hidden: Tensor, wanted: Tensor, at: float | Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        with _trunk_gives(trunk, before), _head_reads(head, hidden), autocast():
            logits = base(input_ids=read.input_ids[:1, :1], use_cache=False).logits[0]
        return scores(logits, wanted, at, allowed)

    whole = chunk is None or len(read.index) <= chunk
    arguments, recorded = _arguments(base, read), [] if whole else trunks_of(base)
    with (
        _head_sees_only(head, read.input_ids.shape, read.index, compute=whole) as seen,
        _outputs_of(recorded) as made,
        autocast(),
    ):
        output = model(**arguments).logits
    hidden = seen["hidden"]
    if whole:
        logprobs, entropy = scores(output[0], targets, temperature, masks())
        return hidden, logprobs, entropy if entropies else None
    trunk, before = _one_token(made)
    size = chunk or 1
    parts = [hidden.split(size), targets.split(size)]
    each = temperature.split(size) if isinstance(temperature, Tensor) else [temperature] * len(parts[0])
    allowed = masks()
    refused = [None] * len(parts[0]) if allowed is None else allowed.split(size)
    scored = [
        checkpoint(tail, *part, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else tail(*part)
        for part in zip(*parts, each, refused, strict=True)
    ]
    logprobs = torch.cat([part for part, _ in scored])
    return hidden, logprobs, torch.cat([part for _, part in scored]) if entropies else None


@torch.no_grad()
def completion_logprobs(model: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """Return the log-probability of each completion after its prompt, in nats, summed over its tokens.

    ``rows`` are (prompt ids, completion ids). They are computed one at a time, so none is padded. Logits of the prompt
    are not computed, if the model can leave them out. The mode of ``model`` is restored.
    """
    logprobs = []
    device, brief = base_of(model).device, accepts(base_of(model), "logits_to_keep")
    with evaluating(model):
        for prompt, completion in rows:
            ids = torch.tensor([[*prompt, *completion]], device=device)
            options = {"logits_to_keep": len(completion) + 1} if brief else {}
            logits = model(input_ids=ids, **options).logits[:, -len(completion) - 1 : -1].float()
            logprobs.append(float(maths.token_logprobs(logits, ids[:, len(prompt) :]).sum()))
    return logprobs


Part = TypeVar("Part", bound="Tensor | tuple[Tensor | None, ...]")


def in_regimes(
    rows: TokenBatch,
    regimes: Sequence[int],
    limits: TreeLimits | None,
    read: Callable[[ToRead, Tensor | None], Part],
) -> Part:
    """Return what ``read`` computes at the M sampled tokens of ``rows``, in parts that a model reads by the same
    angles.

    ``read`` takes what one forward reads, and which of the M tokens it predicts, or None for all. It returns tensors
    whose first dimension is that of these tokens. ``regimes`` are the model's :func:`length_regimes`, and ``limits``
    its :func:`tree_limits`.
    """
    parts = rows.by_length(regimes) if regimes else [(rows, None)]
    results: list[Any] = [read(part.to_read(limits), tokens) for part, tokens in parts]
    if len(parts) == 1:
        return results[0]
    place = torch.cat([tokens for _, tokens in parts if tokens is not None]).argsort()

    def joined(pieces: Sequence[Tensor | None]) -> Tensor | None:
        present = [piece for piece in pieces if piece is not None]
        return torch.cat(present)[place] if present else None

    if isinstance(results[0], Tensor):
        return joined(results)  # type: ignore[return-value]
    return tuple(joined(pieces) for pieces in zip(*results, strict=True))  # type: ignore[return-value]


def states_of(model: Any, rows: TokenBatch) -> Tensor:
    """Return the hidden states [M, H] that the output head of ``model`` sees at the sampled tokens of ``rows``.

    They are those after the critic's prompts, where it has its own.
    """
    base, seen = base_of(model), rows.critic or rows
    return in_regimes(seen, length_regimes(base), tree_limits(base), lambda read, _: _read_states(model, read))


def _read_states(model: Any, read: ToRead) -> Tensor:
    """Return what the head would see at the M tokens of ``read``."""
    base = base_of(model)
    head, arguments = base.get_output_embeddings(), _arguments(base, read)
    if reading_of(base).direct:
        return trunk_of(model)(**arguments).last_hidden_state.flatten(0, 1)[read.index]
    with _head_sees_only(head, read.input_ids.shape, read.index, compute=False) as seen:
        base(**arguments)
    return seen["hidden"]


@contextmanager
def _head_sees_only(head: nn.Module, shape: torch.Size, index: Tensor, compute: bool) -> Iterator[dict[str, Tensor]]:
    """Give the output head only the states at ``index``, as [1, M, H], and yield a dict that receives ``hidden``."""
    # The model's own forward still applies whatever it does to logits, such as soft caps and scales. Without compute
    # the head sees a single position, whose logits the caller ignores.
    seen: dict[str, Tensor] = {}

    def select(_module, arguments):
        if arguments[0].dim() != 3 or arguments[0].shape[:2] != shape:
            raise ValueError(
                f"the output head {type(head).__name__} reads {list(arguments[0].shape)} for tokens {list(shape)}; "
                "expected one state for each token, as in a causal language model; use another model"
            )
        seen["hidden"] = arguments[0].flatten(0, 1)[index]
        chosen = seen["hidden"] if compute else seen["hidden"][:1].detach()
        return (chosen.unsqueeze(0), *arguments[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _head_reads(head: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Give the output head ``hidden`` [M, H] as one row, whatever the model computes."""
    handle = head.register_forward_pre_hook(lambda _module, arguments: (hidden.unsqueeze(0), *arguments[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _outputs_of(modules: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Module, Any]]]:
    """Yield a list that receives the outputs of ``modules``, in the order in which they return."""
    made: list[tuple[nn.Module, Any]] = []
    handles = [m.register_forward_hook(lambda module, _inputs, output: made.append((module, output))) for m in modules]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def _one_token(made: list[tuple[nn.Module, Any]]) -> tuple[Any, Any]:
    """Return the outermost transformer that ran, and its output for one token, or twice None if none is known."""
    if not made:
        return None, None
    trunk, output = made[-1]
    output = copy.copy(output)
    first = output[0][:1, :1].detach()
    if isinstance(output, tuple):
        return trunk, (first, *output[1:])
    output["last_hidden_state"] = first
    return trunk, output


@contextmanager
def _trunk_gives(trunk: Any, output: Any) -> Iterator[None]:
    """Let the transformer below the head, if it is known, return ``output``, so that only what follows it runs."""
    if trunk is None:
        yield
        return
    previous = trunk.__dict__.get("forward")
    trunk.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if previous is None:
            del trunk.forward
        else:
            trunk.forward = previous
