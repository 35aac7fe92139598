"""Score completions with reward functions (plain or async) and reward models. A failed reward is an error, never 0.

A source gives each completion one number, a number for each of its sampled tokens, or None where it does not apply. One
number is earned at the last sampled token.
"""

import asyncio
import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from trl_ext.chat.control_tokens import encode_pieces, encode_text
from trl_ext.chat.encoding import RenderedChat, Tokenizer
from trl_ext.copies import own_copy
from trl_ext.errors import ArgumentError, UserError
from trl_ext.learning.checks import sees_later_tokens
from trl_ext.learning.trained import NonFiniteError
from trl_ext.models.forward import angles_depend_on_length, base_of, beyond, trunk_of
from trl_ext.ppo.batch import Completion
from trl_ext.process.waits import SLICE, Threads, check, result

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, **columns) -> list[float | list[float] | None]``, plain or ``async``.

The function gets ``prompts``, ``completions``, ``completion_ids``, ``trainer_state`` and the columns of the data set by
keyword, as far as it has such parameters or ``**columns``. If its first parameter has another name, the prompts and the
completions are passed by position. A list has one number for each sampled token, whose ids are in ``completion_ids``.
None means that the function does not apply to a completion.
"""
Reward = float | list[float] | None
"""What a source gives one completion."""
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state")
"""The names of what reward functions get besides the columns of the data set."""


class RewardError(UserError, RuntimeError):
    """A reward source failed, returned values of the wrong kind, or left a completion without a score."""


def call_reward_functions(
    functions: Sequence[RewardFunction],
    prompts: list,
    completions: list,
    completion_ids: list[list[int]],
    columns: dict[str, list],
    state: Any = None,
) -> dict[str, list[Reward]]:
    """Call each function on all completions and return its values by its name. Async functions run concurrently.

    ``columns`` are the other columns of the data set, which the functions receive as keyword arguments. ``state`` is
    the trainer's state, which they receive as ``trainer_state``.

    Raises:
        RewardError: a function failed, or returned anything but one number, one number for each token, or None for each
            completion.
        NonFiniteError: a value is NaN or infinite.
    """

    # plain functions run here, outside any event loop, so that they may start one
    more = columns | {"completion_ids": completion_ids, "trainer_state": state}
    results = [_call(f, prompts, completions, more) for f in functions]

    async def gather() -> list:
        return await asyncio.gather(*(_finished(f, r) for f, r in zip(functions, results, strict=True)))

    named: dict[str, list[Reward]] = {}
    for function, values in zip(functions, _run(gather()), strict=True):
        name = reward_name(function)
        if isinstance(values, torch.Tensor | np.ndarray):
            values = values.tolist()
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
            raise RewardError(f"reward {name!r}: expected {len(completions)} values, for each completion, got {got}")
        named[_unused(name, named)] = [
            _read(value, len(ids), name, f"completion {row} ({text!r:.80})")
            for row, (value, ids, text) in enumerate(zip(values, completion_ids, completions, strict=True))
        ]
    return named


def assign_scores(
    completions: Sequence[Completion],
    named: dict[str, list[Reward]],
    weights: Sequence[float],
    missing_eos_penalty: float | None,
) -> None:
    """Fill in ``score`` of each completion: the weighted sum over the sources that apply to it.

    ``token_scores`` say where it was earned, if a source gave a list. They are None if all of it was earned at the last
    token, so that a loop of the user's own may change ``score`` alone. ``missing_eos_penalty`` is subtracted at the
    last token of a completion that did not end.

    Raises:
        RewardError: every source returned None for a completion.
        NonFiniteError: a value is NaN or infinite.
    """
    for row, completion in enumerate(completions):
        earned: list[float] = [0.0] * len(completion.response_ids)
        terms = [(name, w, values[row]) for (name, values), w in zip(named.items(), weights, strict=True)]
        if all(value is None for _, _, value in terms):
            raise RewardError(f"no source of {list(named)} scored completion {row}; every source returned None")
        for name, weight, value in terms:
            for token, number in _earned(value, len(earned)):
                if not math.isfinite(number):
                    raise NonFiniteError(f"reward {name!r}: value {number} for completion {row}")
                earned[token] += weight * number
        if missing_eos_penalty is not None and not completion.ended:
            earned[-1] -= missing_eos_penalty
        completion.score = math.fsum(earned)
        completion.token_scores = earned if any(isinstance(value, list) for _, _, value in terms) else None


def total(reward: Reward) -> float | None:
    """Return what a source gave a whole completion."""
    return math.fsum(reward) if isinstance(reward, list) else reward


class ModelReward:
    """Scores from a sequence-classification model with one output, at the last token of prompt and completion.

    ``tokenizer`` is the reward model's own. It may differ from the policy's, because texts are scored.

    A causal model with a head called ``score`` is read at the last token of each row, be it an EOS token. (Transformers
    reads the last token that is not the padding token.) Any other classifier, such as an encoder, pools its rows
    itself, so it reads rows of one length together, without padding. So does a model whose angles of positions depend
    on the length.

    Raises:
        ValueError: the model has more than one output for a text, or pools at EOS tokens.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, batch_size: int = 64):
        labels = getattr(model.config, "num_labels", 1)
        if labels != 1:
            raise ValueError(f"reward model: expected one output, got {labels}; load it with num_labels=1")
        self.model, self.tokenizer, self.batch_size = model.requires_grad_(False).eval(), tokenizer, batch_size
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"reward model: {type(base_of(model)).__name__} is an encoder with a decoder, which reads a text at "
                "its EOS tokens, and completions may have none; use a causal model or an encoder, or pass a function "
                "as reward_funcs"
            )
        self._has_score = hasattr(base_of(model), "score") and not sees_later_tokens(model)
        self._by_length = angles_depend_on_length(base_of(model))
        if not self._has_score:
            self._check_output()

    @torch.no_grad()
    def _check_output(self) -> None:
        device = next(self.model.parameters()).device
        try:
            shape = list(self.model(input_ids=torch.tensor([[0, 1]], device=device)).logits.shape)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            shape = [f"{type(error).__name__}: {str(error).splitlines()[0]:.80}"]
        if shape != [1, 1]:
            raise ValueError(
                "reward model: expected a sequence-classification model, whose output for a text is one number, got "
                f"{type(base_of(self.model)).__name__} with an output {shape}; load it with "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1), or pass a function as "
                "reward_funcs"
            )

    @torch.no_grad()
    def score_ids(self, rows: list[list[int]]) -> list[float]:
        """Return one score for each row of token ids. The ids belong to the reward model's own vocabulary.

        Raises:
            RewardError: an id is outside the vocabulary.
        """
        base = base_of(self.model)
        if why := beyond(base, max(map(max, rows)), max(map(len, rows))):
            raise RewardError(
                f"reward model: {why}; pass its own tokenizer as reward_processing_class, so that texts are scored and "
                "not the policy's ids, use a model with a longer context, or lower response_length"
            )
        device = next(self.model.parameters()).device
        if not self._has_score or self._by_length:
            return self._scores_alike(rows, device)
        trunk = trunk_of(base)
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            chunk = rows[start : start + self.batch_size]
            width = max(map(len, chunk))
            ids = torch.tensor([r + [0] * (width - len(r)) for r in chunk], device=device)
            last = torch.tensor([len(r) - 1 for r in chunk], device=device)
            # the padding is on the right, where causal attention hides it from every real token
            hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
            scores += base.score(hidden[torch.arange(len(chunk), device=device), last]).squeeze(-1).tolist()
        return scores

    def _scores_alike(self, rows: list[list[int]], device: torch.device) -> list[float]:
        """Return the scores of rows that are read together if they have the same length."""
        scores: dict[int, float] = {}
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
        for _, alike in itertools.groupby(order, key=lambda n: len(rows[n])):
            numbers = list(alike)
            for start in range(0, len(numbers), self.batch_size):
                chunk = numbers[start : start + self.batch_size]
                ids = torch.tensor([rows[n] for n in chunk], device=device)
                if self._has_score:
                    base = base_of(self.model)
                    outputs = base.score(trunk_of(base)(input_ids=ids, use_cache=False).last_hidden_state[:, -1])
                else:
                    outputs = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
                scores |= zip(chunk, outputs.squeeze(-1).tolist(), strict=True)
        return [scores[n] for n in range(len(rows))]

    def score_texts(self, texts: list[str]) -> list[float]:
        """Return one score for each text, tokenised by the reward model's own tokenizer.

        A text begins and ends with the tokens that the tokenizer puts there, and a :class:`RenderedChat` with those of
        its template. Words that spell a control token are encoded as words (:mod:`trl_ext.chat.control_tokens`).
        """
        rows = [
            encode_pieces(self.tokenizer, text.pieces)
            if isinstance(text, RenderedChat)
            else encode_text(self.tokenizer, text)
            for text in texts
        ]
        return self.score_ids(rows)


def reward_name(function: RewardFunction) -> str:
    """Return the name of a reward function in metrics and errors: its own name, or that of its class."""
    return getattr(function, "__name__", type(function).__name__)


def _call(function: RewardFunction, prompts: list, completions: list, more: dict[str, Any]):
    positional, keywords = _arguments(function, prompts, completions, more)
    shared = {name: keywords.pop(name) for name in ("trainer_state", "environments") if name in keywords}
    try:
        return function(*own_copy(positional), **own_copy(keywords), **shared)
    except Exception as error:
        raise RewardError(f"reward {reward_name(function)!r} raised {type(error).__name__}: {error}") from error


def _arguments(
    function: RewardFunction, prompts: list, completions: list, more: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a reward function by position and by keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions that are written in C have none
        return (prompts, completions), {}
    named = {"prompts": prompts, "completions": completions}
    first = next(iter(parameters.values()), None)
    by_name = first is not None and (first.name in named | more or first.kind is first.VAR_KEYWORD)
    if by_name and first.kind is not first.POSITIONAL_ONLY:  # type: ignore[union-attr]  # by_name says that it exists
        positional: tuple = ()
        keywords = named | more
    else:
        positional, keywords = (prompts, completions), more
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return positional, keywords
    return positional, {name: value for name, value in keywords.items() if name in parameters}


def check_parameters(function: RewardFunction, columns: Collection[str]) -> None:
    """Check that a reward function has no parameter, besides those with a default, that nothing fills.

    ``columns`` are the names of what it gets besides the prompts, the completions and the other :data:`RESERVED` names.

    Raises:
        ArgumentError: it has one.
    """
    more: dict[str, Any] = dict.fromkeys([*columns, *RESERVED[2:]])
    positional, keywords = _arguments(function, [], [], more)
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError as error:
        raise ArgumentError(
            f"reward function {reward_name(function)!r}: {error}; its parameters may be "
            f"{', '.join([*RESERVED, *columns])}, and **kwargs takes the rest"
        ) from None
    except ValueError:  # some functions that are written in C have no signature
        return


def _read(value: Any, tokens: int, name: str, where: str) -> Reward:
    """Return one value of a reward function as a number, a list of a number for each of ``tokens``, or None."""
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.item() if math.prod(value.shape) == 1 else value.tolist()
    if not isinstance(value, list | tuple):
        return None if value is None else _number(value, name, where)
    if len(value) != tokens:
        raise RewardError(
            f"reward {name!r}: expected one number, None, or a list of {tokens} numbers, one for each sampled token "
            f"(completion_ids), got a list of {len(value)} for {where}"
        )
    return [_number(number, name, f"token {token} of {where}") for token, number in enumerate(value)]


def _number(value: Any, name: str, where: str) -> float:
    if not isinstance(value, numbers.Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
        raise RewardError(f"reward {name!r}: expected numbers or None, got {value!r:.80} for {where}")
    size: Any = abs(value)
    if not size <= torch.finfo(torch.float32).max:  # also where it is NaN
        raise NonFiniteError(f"reward {name!r}: value {value!s:.80} for {where}")
    return float(value)


def _earned(value: Reward, tokens: int) -> list[tuple[int, float]]:
    """Return at which of ``tokens`` a value was earned, and how much at each."""
    if isinstance(value, list):
        return list(enumerate(value))
    return [] if value is None else [(tokens - 1, value)]


async def _finished(function: RewardFunction, result):
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except Exception as error:
        raise RewardError(f"reward {reward_name(function)!r} raised {type(error).__name__}: {error}") from error


def _run(coroutine):
    """Run a coroutine to its end, in a thread of its own."""
    # a notebook's event loop runs in this one already, and an event loop would catch what a signal raises here
    gradients = torch.is_grad_enabled()

    def run():
        with torch.set_grad_enabled(gradients):
            return asyncio.run(_wanted(coroutine))

    with Threads(1, "awaits rewards") as threads:
        return result(threads.submit(run))


async def _wanted(coroutine):
    """Await a coroutine, which is cancelled when nobody wants its result any more."""
    task = asyncio.ensure_future(coroutine)
    while not task.done():
        await asyncio.wait({task}, timeout=SLICE)
        check()
    return task.result()


def _unused(name: str, taken: dict) -> str:
    return name if name not in taken else _unused(f"{name}_2", taken)
