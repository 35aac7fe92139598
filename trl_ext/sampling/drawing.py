"""Random numbers of completions, and how they choose a token."""

import numpy as np
import torch
from torch import Tensor

from trl_ext.process.random_states import number_of
from trl_ext.sampling.options import Sampling


def uniforms(key: tuple, sampling: Sampling) -> Tensor | None:
    """Return uniform random numbers in [0, 1), one for each token. They depend on ``key`` only."""
    if sampling.temperature <= 0:
        return None
    generator = np.random.Generator(np.random.Philox(key=number_of(key)))
    return torch.from_numpy(generator.random(sampling.max_new_tokens))


def draw(logits: Tensor, drawn: tuple[float, float, int], uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Draw the next token of rows that draw alike. Return the tokens, and their log-probabilities unless greedy."""
    temperature, top_p, top_k = drawn
    if temperature <= 0:
        return logits.argmax(-1), None
    assert uniforms is not None  # the temperature is above 0
    probabilities = truncated(torch.softmax(logits / temperature, -1), top_p, top_k)
    tokens = inverse_cdf(probabilities, uniforms)
    return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token of each row at which the cumulated ``probabilities`` [B, V] pass ``uniforms`` [B].

    The token's probability is never 0.
    """
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    wanted = uniforms.to(cumulated.dtype).unsqueeze(1) * total
    # a number just below 1 rounds to 1 in float32, and no cumulated probability passes the total
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, wanted, right=True)
    tokens = tokens.clamp(max=probabilities.shape[1] - 1)  # NaN passes nothing; its log-probability is reported later
    # an accelerator adds up in parallel, so that rounding may make a sum grow at a token of probability 0
    impossible = probabilities.gather(1, tokens) == 0
    return torch.where(impossible, probabilities.argmax(-1, keepdim=True), tokens).squeeze(1)


def truncated(probabilities: Tensor, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Return ``probabilities`` [B, V] of the ``top_k`` likeliest tokens, without the tail beyond ``top_p`` of these.

    The rest is 0, and each row has the sum 1. The likeliest token always stays. ``top_k`` cuts first, as it does in
    transformers and in vLLM.
    """
    size = probabilities.shape[-1]
    if top_p >= 1 and not 0 < top_k < size:
        return probabilities
    ordered, index = probabilities.topk(min(top_k or size, size), -1)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    if top_p < 1:
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(1, index, ordered / ordered.sum(-1, keepdim=True))
