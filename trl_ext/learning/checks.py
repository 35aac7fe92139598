"""Check the models that a trainer is given, before it trains them."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import ProcessorMixin

from trl_ext.errors import one_line
from trl_ext.models.adapters import check_adapters
from trl_ext.models.forward import base_of, rounds, trunk_of
from trl_ext.models.randomness import evaluating

REFUSED = {
    "prophetnet": "its head reads several streams of predictions, and not one state for each token",
    "reformer": "its backward pass needs training mode, in which dropout is on",
}
"""Architectures that cannot be policies, and why. docs/models.md has those that were tried."""


def check_policy_model(model: Any, processing_class: Any, where: str) -> None:
    """Check that a policy is a loaded language model with a tokenizer. Images are not supported.

    Raises:
        ValueError: the model is something else or has a vision part, or a processor was given in the place of a
            tokenizer. The message begins with ``where``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where}: expected a loaded model, got {model!r:.80}; load it with AutoModelForCausalLM")
    _check_plain(model, where)
    base = base_of(model)
    if getattr(base.config, "vision_config", None) is not None:
        raise ValueError(f"{where}: {type(base).__name__} has a vision part, which nothing trains; load its text part")
    if base.get_output_embeddings() is None:
        raise ValueError(
            f"{where}: {type(base).__name__} has no output head, so it samples no tokens; load it with "
            "AutoModelForCausalLM"
        )
    check_adapters(model, where)
    if (why := REFUSED.get(base.config.model_type)) is not None:
        raise ValueError(f"{where}: {type(base).__name__} is not supported, because {why}; use another model")
    if getattr(base.config.get_text_config(), "output_router_logits", False):
        raise ValueError(f"{where}: config.output_router_logits is True; set it to False: PPO has no balancing loss")
    if sees_later_tokens(model):
        raise ValueError(
            f"{where}: {type(base).__name__} sees the tokens that follow, so it has no probability of the next one; "
            "load a decoder (AutoModelForCausalLM), or set is_decoder=True in its configuration"
        )
    _check_generation(model, where)
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(f"processing_class: expected a tokenizer, got the processor {type(processing_class).__name__}")


def check_apart(models: Mapping[str, nn.Module | None], remedy: str) -> None:
    """Check that no two models have a parameter in common, because one would be trained or frozen with the other.

    ``get_peft_model`` changes the model that it is given, so an adapter and its base are not apart either.

    Raises:
        ValueError: two of them have. The message has their names, and then ``remedy``.
    """
    parameters = {name: set(map(id, model.parameters())) for name, model in models.items() if model is not None}
    for (one, ids), (other, other_ids) in combinations(parameters.items(), 2):
        if ids & other_ids:
            raise ValueError(f"{one} and {other} have the same weights; {remedy}")


def check_steps_all(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], where: str) -> None:
    """Check that an optimizer of the user's own steps everything that is trained.

    A parameter that it lacks would keep its value through the whole run. The trainer makes the critic's head itself, so
    an optimizer that was made before cannot step it.

    Raises:
        ValueError: it lacks parameters of ``trained``, or has modes of its own. The message begins with ``where``.
    """
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise ValueError(
            f"{where}: optimizers: {type(optimizer).__name__} has modes (train() and eval()), between which its "
            "weights are others; a policy samples between any two updates, so it cannot be used here. Use a plain "
            "optimizer"
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lacking = [name for name, parameter in trained.items() if id(parameter) not in stepped]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"{where}: optimizers: the optimizer does not step {', '.join(lacking[:3])}{more}, so they would never "
            "learn; name an optimizer by optim= in the arguments, which steps all; or pass value_model= and give the "
            "optimizer its parameters too, or critic='none'; requires_grad_(False) says that a weight is not to learn"
        )


def check_module(model: Any, where: str, remedy: str) -> None:
    """Check that an optional argument is a loaded model. ``remedy`` says what to pass in the place of anything else.

    Raises:
        ValueError: it is anything else.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"{where}: expected a loaded model, got {model!r:.80}; {remedy}")
    _check_plain(model, where)
    check_adapters(model, where)


def _check_plain(model: Any, where: str) -> None:
    """Check that a model is not compiled. ``torch.compile`` wraps it in a module that lacks the model's methods."""
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"{where}: expected a model that is not compiled; pass the model itself (model._orig_mod)")


def check_causal(model: Any, where: str) -> None:
    """Check that a model's numbers at a token do not depend on the tokens that follow it.

    Raises:
        ValueError: they do. The message begins with ``where``.
    """
    if sees_later_tokens(model):
        raise ValueError(
            f"{where}: {type(base_of(model)).__name__} sees the tokens that follow, so that its value of a state would "
            "know what the policy says next; expected a causal model: load a decoder with "
            "AutoModelForSequenceClassification, or leave it out"
        )


@torch.no_grad()
def sees_later_tokens(model: Any) -> bool:
    """Return whether a model's hidden states at a token depend on the tokens that follow it, as those of an encoder do.

    It is asked of the model by two short rows, of which the second is longer and has another last token.
    """
    base = base_of(model)
    device = next(base.parameters()).device
    if device.type == "meta":
        return False
    size = base.config.get_text_config().vocab_size
    rows = [[n % size for n in row] for row in ([1, 2, 3, 1], [1, 2, 3, 1], [1, 2, 3, 2, 0, 0])]
    with evaluating(base):
        one, again, other = (
            trunk_of(base)(input_ids=torch.tensor([row], device=device)).last_hidden_state[:, :3].float()
            for row in rows
        )
    tolerance = 0.1 if rounds(base) else 1e-3
    most = tolerance * one.abs().max()
    # a model that draws random numbers differs from itself, which the first update names (trl_ext.learning.invariants)
    return bool((one - other).abs().max() > most >= (one - again).abs().max())


def _check_generation(model: Any, where: str) -> None:
    """Check that the generation configuration of a model can be saved with it."""
    config = getattr(model, "generation_config", None)
    if config is None or isinstance(model, PeftModel):  # an adapter is saved without it
        return
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"{where}: its generation configuration could not be saved with it: {one_line(error, 300)} Change "
            "model.generation_config; what the trainer samples by are its own options"
        ) from None
