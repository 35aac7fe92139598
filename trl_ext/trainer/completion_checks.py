"""Check the completions of a batch before they become rows, because a loop of the user's own may have filled them
in."""

import math
from collections.abc import Sequence
from typing import Any

from trl_ext.learning.trained import NonFiniteError
from trl_ext.ppo.batch import Completion


def check_completions(completions: Sequence[Completion], vocabulary: int) -> None:
    """Check that every completion has token ids, and one score that its ``token_scores`` do not contradict.

    ``vocabulary`` is the number of the policy's tokens.

    Raises:
        ValueError: completions are missing, or one lacks a score, has two scores, or has ids that the policy lacks.
        NonFiniteError: a score is NaN or infinite.
    """
    if not completions:
        raise ValueError("advantage: the batch has no completions; call collect and score, or fill completions in")
    for completion in completions:
        _check_ids(completion, "prompt_ids", completion.prompt_ids, vocabulary)
        _check_ids(completion, "response_ids", completion.response_ids, vocabulary)
        _check_score(completion)


def _check_ids(completion: Completion, name: str, ids: Any, vocabulary: int) -> None:
    where = f"{completion.label}: {name}"
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{where}: expected a list of token ids, got {ids!r:.80}; a tensor has tolist()")
    if not ids:
        raise ValueError(f"{where}: expected at least one token, got none")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"{where}: token id {wrong} is outside the model's vocabulary of {vocabulary}")


def _check_score(completion: Completion) -> None:
    """Check what a completion earned."""
    # token_scores are what is trained on, so a score of its own would do nothing
    where, parts, score = completion.label, completion.token_scores, completion.score
    if parts is None and score is None:
        raise ValueError(f"{where}: has no score; call score(batch) before advantage(batch), or give it a score")
    if parts is not None and len(parts) != len(completion.response_ids):
        raise ValueError(f"{where}: expected {len(completion.response_ids)} token_scores, as tokens, got {len(parts)}")
    for name, value in [("score", score), *(("token_scores", part) for part in parts or ())]:
        if value is not None and not math.isfinite(_number(value, f"{where}: {name}")):
            raise NonFiniteError(f"{where}: {name} is {float(value)}")
    if parts is None or score is None:
        return
    earned = math.fsum(parts)
    if not math.isclose(float(score), earned, rel_tol=1e-5, abs_tol=1e-5):
        raise ValueError(
            f"{where}: score is {float(score):g}, but its token_scores have the sum {earned:g}, and these are trained "
            "on; change token_scores too, or set token_scores to None to give the whole score at the last token"
        )


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise ValueError(f"{where}: expected a number, got {value!r:.80}") from None
