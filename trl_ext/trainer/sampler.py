"""Where the completions of :class:`trl_ext.PPOv2Trainer` come from, if not from its own model: vLLM, for example."""

from typing import Any

from trl_ext.learning.learner import Learner
from trl_ext.sampling.engine import TokenEngine


class Sampler(TokenEngine):
    """The base class of the engines that a program gives to the trainer, which tells them the policy.

    A subclass defines :meth:`submit`, and may override the hooks. Token ids go in, and token ids come out: what was
    sampled is what is trained on.
    """

    def attach(self, learner: Learner, args: Any) -> None:
        """Hook: get to know the policy and the options, a :class:`trl_ext.PPOv2Config`, before anything is sampled."""
