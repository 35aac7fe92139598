"""The reward sources of a trainer of one policy: a reward model and reward functions, with their weights."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from trl_ext.chat.encoding import RenderedChat, Tokenizer
from trl_ext.errors import ArgumentError
from trl_ext.models.randomness import quiet
from trl_ext.ppo.batch import Completion
from trl_ext.process import distributed
from trl_ext.trainer.scoring import (
    ModelReward,
    Reward,
    RewardFunction,
    assign_scores,
    call_reward_functions,
    reward_name,
    total,
)


class RewardSources:
    """Scores completions with all sources, and keeps what each source gave.

    Args:
        tokenizer: the policy's tokenizer.
        functions: one or several reward functions, or None.
        weights: one weight for each source: first the model, then the functions. The default is 1.
        model: a reward model, or None.
        model_tokenizer: the reward model's tokenizer, if it differs from the policy's.
        batch_size: the most rows that the reward model reads at a time.

    Raises:
        ArgumentError: a source is missing, or the weights do not fit the sources.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        functions: RewardFunction | Sequence[RewardFunction] | None,
        weights: Sequence[float] | None,
        model: Any,
        model_tokenizer: Tokenizer | None,
        batch_size: int,
    ):
        if model is None and functions is None:
            raise ArgumentError("a source of reward is missing: pass reward_funcs (functions) or reward_model")
        self.tokenizer = tokenizer
        self.functions = _as_list(functions)
        if wrong := [f for f in self.functions if not callable(f) or isinstance(f, torch.nn.Module)]:
            raise ArgumentError(f"reward_funcs: expected functions, got {wrong[0]!r:.80}; models go to reward_model")
        self.model: ModelReward | None = None
        if model is not None:
            quiet(model)
            self.model = ModelReward(model, model_tokenizer, batch_size)
        self.names = ["reward_model"] * (model is not None) + [reward_name(f) for f in self.functions]
        self.weights = _weights(weights, self.names)
        self.rewards: dict[str, list[Reward]] = {}
        """What each source gave each completion that was scored last, by the source's name."""

    def to(self, device: torch.device) -> None:
        """Move the reward model to ``device``."""
        if self.model is not None:
            self.model.model.to(device)

    def score(self, completions: list[Completion], missing_eos_penalty: float | None, state: Any = None) -> None:
        """Fill in the scores of ``completions``. They may be none, if other processes have some.

        ``state`` is the trainer's state, for reward functions.

        Raises:
            RewardError: a source failed, or left a completion without a score.
            NonFiniteError: a reward is NaN or infinite.
        """
        self.rewards = {}
        if not completions:
            return
        prompts = [c.prompt for c in completions]
        if self.model is not None:
            self.rewards["reward_model"] = list(self._scores_of(self.model, completions))
        if self.functions:
            columns = {key: [p.columns.get(key) for p in prompts] for key in prompts[0].columns}
            self.rewards |= call_reward_functions(
                self.functions,
                [p.prompt for p in prompts],
                [_answer(c) for c in completions],
                [c.response_ids for c in completions],
                columns,
                state,
            )
        assign_scores(completions, self.rewards, self.weights, missing_eos_penalty)

    def gathered(self) -> dict[str, list[float | None]]:
        """Return what each source gave each completion, over all processes. All processes call this together."""
        totals = {name: [total(value) for value in values] for name, values in self.rewards.items()}
        parts = distributed.all_gather(totals)
        return {name: [v for part in parts for v in part.get(name, [])] for name in max(parts, key=len)}

    def _scores_of(self, reward: ModelReward, completions: list[Completion]) -> list[float]:
        if reward.tokenizer is None:
            return reward.score_ids([c.prompt_ids + c.response_ids for c in completions])
        return reward.score_texts([self._shown(reward.tokenizer, c) for c in completions])

    def _shown(self, tokenizer: Tokenizer, completion: Completion) -> str:
        """Return a completion as a reward model with its own ``tokenizer`` reads it: in its template, or as text."""
        # prompt and completion are decoded together, so that the blank between them stays
        prompt = getattr(completion.prompt, "prompt", None)
        if isinstance(prompt, list):
            answer = {"role": "assistant", "content": _answer(completion)}
            return RenderedChat.of(tokenizer, [*prompt, answer])
        return self.tokenizer.decode(completion.prompt_ids + completion.response_ids, skip_special_tokens=True)


def _answer(completion: Completion) -> str:
    """Return a completion's text after the words with which its row had begun it."""
    return getattr(completion.prompt, "begun", "") + completion.text


def _as_list(functions) -> list[RewardFunction]:
    if functions is None:
        return []
    return list(functions) if isinstance(functions, (list, tuple)) else [functions]


def _weights(weights: Sequence[float] | None, sources: list[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(sources)
    expected = f"expected {len(sources)} numbers, one per source ({', '.join(sources)})"
    if not isinstance(weights, Sequence):
        raise ArgumentError(f"reward_weights: {expected}, got {weights!r:.80}")
    values = list(weights)
    if len(values) != len(sources):
        raise ArgumentError(f"reward_weights: {expected}, got {len(values)}")
    if not all(isinstance(w, numbers.Real) and math.isfinite(w) for w in values):
        raise ArgumentError(f"reward_weights: {expected}, got {values}")
    if not any(values):
        raise ArgumentError(f"reward_weights: all are 0, so no completion would earn anything; got {values}")
    return [float(w) for w in values]
