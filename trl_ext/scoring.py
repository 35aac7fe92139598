"""Score completions with reward functions (plain or async) and reward models. A failed reward is an error, never 0."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_ext.chat import Tokenizer
from trl_ext.errors import UserError
from trl_ext.learner import NonFiniteError
from trl_ext.plain_text import encode_text

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, **columns) -> list[float | None]``, plain or ``async``.

None means that the function does not apply to a completion.
"""


class RewardError(UserError, RuntimeError):
    """A reward source failed, returned values of the wrong kind, or left a completion without a score."""


def call_reward_functions(
    functions: Sequence[RewardFunction], prompts: list, completions: list, columns: dict[str, list]
) -> dict[str, list[float | None]]:
    """Call each function on all completions and return its values by its name. Async functions run concurrently.

    ``columns`` are the other columns of the data set, which the functions receive as keyword arguments.

    Raises:
        RewardError: a function failed, or returned anything but one number or None for each completion.
        NonFiniteError: a value is NaN or infinite.
    """

    # plain functions run here, outside any event loop, so that they may start one
    results = [_call(f, prompts, completions, columns) for f in functions]

    async def gather() -> list:
        return await asyncio.gather(*(_finished(f, r) for f, r in zip(functions, results, strict=True)))

    named: dict[str, list[float | None]] = {}
    for function, values in zip(functions, _run(gather()), strict=True):
        name = reward_name(function)
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
            raise RewardError(f"reward {name!r}: expected a list of {len(completions)} numbers or None, got {got}")
        for row, value in enumerate(values):
            if value is None:
                continue
            if not isinstance(value, numbers.Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                raise RewardError(f"reward {name!r}: expected numbers or None, got {value!r:.80} for completion {row}")
            if not math.isfinite(value):
                raise NonFiniteError(f"reward {name!r}: value {value} for completion {row} ({completions[row]!r:.80})")
        named[_unused(name, named)] = [None if v is None else float(v) for v in values]
    return named


def weighted_scores(named: dict[str, list[float | None]], weights: Sequence[float]) -> list[float]:
    """Return each completion's weighted sum over the sources that apply to it.

    Raises:
        RewardError: every source returned None for a completion.
        NonFiniteError: a value is NaN or infinite.
    """
    scores: list[float] = []
    for name, source in named.items():
        for row, value in enumerate(source):
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(f"reward {name!r}: value {value} for completion {row}")
    for row in range(len(next(iter(named.values())))):
        given = [(w, source[row]) for w, source in zip(weights, named.values(), strict=True)]
        values = [(w, v) for w, v in given if v is not None]
        if not values:
            raise RewardError(f"no source of {list(named)} scored completion {row}; every source returned None")
        scores.append(sum(w * v for w, v in values))
    return scores


class ModelReward:
    """Scores from a sequence-classification model with one output, at the last token of prompt and completion.

    ``tokenizer`` is the reward model's own. It may differ from the policy's, because texts are scored.

    Raises:
        ValueError: the model has more than one output.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, batch_size: int = 64):
        labels = getattr(model.config, "num_labels", 1)
        if labels != 1:
            raise ValueError(f"reward model: expected one output (num_labels=1), got {labels}")
        self.model, self.tokenizer, self.batch_size = model.requires_grad_(False).eval(), tokenizer, batch_size

    @torch.no_grad()
    def score_ids(self, rows: list[list[int]]) -> list[float]:
        """Return one score for each row of token ids. The ids belong to the reward model's own vocabulary.

        Raises:
            RewardError: an id is outside the vocabulary.
        """
        highest, size = max(map(max, rows)), self.model.config.get_text_config().vocab_size
        if highest >= size:
            raise RewardError(
                f"reward model: token id {highest} is outside its vocabulary of {size}; pass its own tokenizer as "
                "reward_processing_class, and texts are scored in place of the policy's ids"
            )
        device = next(self.model.parameters()).device
        trunk = getattr(self.model, self.model.base_model_prefix)
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            chunk = rows[start : start + self.batch_size]
            width = max(map(len, chunk))
            ids = torch.tensor([r + [0] * (width - len(r)) for r in chunk], device=device)
            last = torch.tensor([len(r) - 1 for r in chunk], device=device)
            # the padding is on the right, where causal attention hides it from every real token
            hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
            scores += self.model.score(hidden[torch.arange(len(chunk), device=device), last]).squeeze(-1).tolist()
        return scores

    def score_texts(self, texts: list[str]) -> list[float]:
        """Return one score for each text, tokenised by the reward model's own tokenizer.

        A text that spells a control token is encoded as text (:mod:`trl_ext.plain_text`).
        """
        return self.score_ids([encode_text(self.tokenizer, text) for text in texts])


def reward_name(function: RewardFunction) -> str:
    """Return the name of a reward function in metrics and errors: its own name, or that of its class."""
    return getattr(function, "__name__", type(function).__name__)


def _call(function: RewardFunction, prompts: list, completions: list, columns: dict[str, list]):
    try:
        return function(prompts, completions, **columns)
    except Exception as error:
        raise RewardError(f"reward {reward_name(function)!r} raised {type(error).__name__}: {error}") from error


async def _finished(function: RewardFunction, result):
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except Exception as error:
        raise RewardError(f"reward {reward_name(function)!r} raised {type(error).__name__}: {error}") from error


def _run(coroutine):
    """Run a coroutine to its end. This works in a notebook too, whose event loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _unused(name: str, taken: dict) -> str:
    return name if name not in taken else _unused(f"{name}_2", taken)
