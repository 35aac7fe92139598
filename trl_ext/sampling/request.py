"""What is asked of a model, in tokens. Imports no torch."""

from dataclasses import dataclass

from trl_ext.ppo.options import GREEDY, Decoding, Grammar


@dataclass(frozen=True)
class Draw:
    """The sampling parameters of a completion, and the conditions that end it.

    Args:
        max_tokens: the most tokens of the completion.
        temperature: the sampling temperature; 0 is greedy.
        top_p: the share of the probability to sample from (:class:`trl_ext.ppo.options.Decoding`).
        top_k: the number of likeliest tokens to sample from; 0: all.
        stop: the strings that end it.
        stop_ids: the token ids that end it.
        grammar: what it is held to: each token is drawn among those that may come next. None: nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    @property
    def decoding(self) -> Decoding:
        """Return how each token is drawn."""
        return Decoding(self.temperature, self.top_p, self.top_k) if self.temperature > 0 else GREEDY


@dataclass(frozen=True)
class TokenRequest:
    """A completion that is asked for.

    Args:
        policy: the name of the policy that samples.
        prompt_ids: the token ids of the prompt.
        draw: how the completion is drawn.
        key: the key of the random numbers. None: the engine takes numbers of its own.
        read: how many ids at the beginning of the prompt the conversation had before, which a KV cache may hold.
        label: the request's name in errors.
        top: how many of the likeliest tokens are listed at each position of a completion that is not greedy.
    """

    policy: str
    prompt_ids: list[int]
    draw: Draw
    key: tuple | None = None
    read: int = 0
    label: str = "completion"
    top: int = 0
