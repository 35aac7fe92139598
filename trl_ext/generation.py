"""Sampling from one policy: batched, left-padded, token ids in and token ids out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from trl_ext.chat import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How to sample: ``temperature`` 0 is greedy.

    ``top_p`` below 1 truncates the distribution; PPO leaves it at 1, so that log-probabilities of the training forward
    are those of the sampler.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    batch_size: int = 64
    top_p: float = 1.0


def stop_ids_of(
    model: PreTrainedModel, tokenizer: Tokenizer, stop_token: str | None, stop_id: int | list[int] | None
) -> frozenset[int]:
    """The ids that end an answer: as asked for, else the EOS list of the model's generation config and tokenizer."""
    if stop_id is not None:
        return frozenset([stop_id] if isinstance(stop_id, int) else stop_id)
    if stop_token == "none":
        return frozenset()
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop_token is None and configured is not None:
        found |= {configured} if isinstance(configured, int) else set(configured)
    if not found:
        raise ValueError(
            "no end-of-sequence id is known: the tokenizer and the model's generation config name none; "
            "set stop_token_id, or stop_token='none' to always generate the full length"
        )
    return frozenset(found)


@contextmanager
def _clean_generation(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradient checkpointing, and none of the model's own sampling defaults (top_k, ...)."""
    kept_config, was_training = model.generation_config, model.training
    checkpointing = getattr(model, "is_gradient_checkpointing", False)
    model.generation_config = GenerationConfig()
    model.eval()
    if checkpointing:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        model.generation_config = kept_config
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train(was_training)


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], pad_id: int, sampling: Sampling) -> list[list[int]]:
    """One answer per prompt, in order: its ids, up to and including the first stop id.

    ``model`` is the unwrapped model with the right adapter active. Rows are cut into batches of
    ``sampling.batch_size`` in the order given. The caller knows that an answer ended when its last id is a stop id.
    """
    answers: list[list[int]] = []
    device = next(model.parameters()).device
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=None if sampling.stop_ids else sampling.max_new_tokens,
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature if sampling.temperature > 0 else None,
        top_k=0 if sampling.temperature > 0 else None,
        top_p=sampling.top_p if sampling.temperature > 0 else None,
        eos_token_id=sorted(sampling.stop_ids) or None,
        pad_token_id=pad_id,
        use_cache=True,
    )
    with _clean_generation(model):
        for start in range(0, len(prompts), sampling.batch_size):
            chunk = prompts[start : start + sampling.batch_size]
            width = max(len(ids) for ids in chunk)
            input_ids = torch.full((len(chunk), width), pad_id, dtype=torch.long)
            attention = torch.zeros_like(input_ids)
            for row, ids in enumerate(chunk):
                input_ids[row, width - len(ids) :] = torch.tensor(ids)
                attention[row, width - len(ids) :] = 1
            output = model.generate(
                input_ids=input_ids.to(device), attention_mask=attention.to(device), generation_config=config
            )
            answers += [_until_stop(ids, sampling.stop_ids) for ids in output[:, width:].tolist()]
    return answers


def _until_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in stop_ids:
            return ids[: position + 1]
    return ids
