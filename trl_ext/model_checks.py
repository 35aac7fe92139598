"""Check the models that a trainer is given, before it trains them."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn
from transformers import ProcessorMixin

from trl_ext.forward import base_of


def check_policy_model(model: Any, processing_class: Any, where: str) -> None:
    """Check that a policy is a loaded language model with a tokenizer. Images are not supported.

    Raises:
        ValueError: the model is something else or has a vision part, or a processor was given in the place of a tokenizer.
            The message begins with ``where``.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{where}: expected a loaded model, got {model!r:.80}; load it with AutoModelForCausalLM.from_pretrained"
        )
    base = base_of(model)
    if getattr(base.config, "vision_config", None) is not None:
        raise ValueError(
            f"{where}: {type(base).__name__} has a vision part, and vision-language models are not supported; load its text "
            "part, or another causal language model"
        )
    if base.get_output_embeddings() is None:
        raise ValueError(
            f"{where}: {type(base).__name__} has no output head, so it samples no tokens; load it with AutoModelForCausalLM"
        )
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class: expected a tokenizer, got the processor {type(processing_class).__name__}; "
            "vision-language models are not supported"
        )


def check_apart(models: Mapping[str, nn.Module | None], remedy: str) -> None:
    """Check that no two models have a parameter in common, because one would be trained or frozen with the other.

    ``get_peft_model`` changes the model that it is given, so an adapter and its base are not apart either.

    Raises:
        ValueError: two of them have. The message has their names, and then ``remedy``.
    """
    parameters = {name: set(map(id, model.parameters())) for name, model in models.items() if model is not None}
    for (one, own), (other, theirs) in combinations(parameters.items(), 2):
        if own & theirs:
            raise ValueError(f"{one} and {other} have the same weights; {remedy}")


def check_steps_all(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], where: str) -> None:
    """Check that an optimizer of the user's own steps everything that is trained.

    A parameter that it lacks would keep its value through the whole run. The trainer makes the critic's head itself, so an
    optimizer that was made before cannot step it.

    Raises:
        ValueError: it lacks parameters of ``trained``. The message begins with ``where``.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lacking = [name for name, parameter in trained.items() if id(parameter) not in stepped]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"{where}: optimizers: the optimizer does not step {', '.join(lacking[:3])}{more}, so they would never learn; name "
            "an optimizer by optim= in the arguments, which steps all; or pass value_model= and give the optimizer its "
            "parameters too, or critic='none'; requires_grad_(False) says that a weight is not to learn"
        )


def check_module(model: Any, where: str, remedy: str) -> None:
    """Check that an optional argument is a loaded model. ``remedy`` says what to pass in the place of anything else.

    Raises:
        ValueError: it is anything else.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"{where}: expected a loaded model, got {model!r:.80}; {remedy}")
