"""Where the completions of :class:`trl_ext.PPOv2Trainer` come from: its own model, or another program such as vLLM."""

from collections.abc import Sequence
from typing import Any

from trl_ext.learning.learner import Learner
from trl_ext.models.lora_merge import merged, merges
from trl_ext.sampling.options import Sampled, Sampling
from trl_ext.sampling.sample import sample


class Sampler:
    """The base class of samplers. A subclass defines :meth:`sample`, and may override the hooks.

    Token ids go in, and token ids come out: what was sampled is what is trained on.
    """

    def attach(self, learner: Learner, args: Any) -> None:
        """Hook: get to know the policy and the options, a :class:`trl_ext.PPOv2Config`, before anything is sampled."""

    def sample(self, prompts: list[list[int]], sampling: Sampling, keys: Sequence[tuple]) -> list[Sampled]:
        """Return one completion of each prompt, in order. ``keys`` are the keys of their random numbers."""
        raise NotImplementedError(f"{type(self).__name__}: a sampler defines sample(prompts, sampling, keys)")

    def sync(self) -> None:
        """Hook: take over the policy's weights, which are new or have changed. All processes call this together.

        This is called before the first :meth:`sample` too.
        """


class OwnWeights(Sampler):
    """The default sampler. It samples from the weights that are trained, in this process."""

    def attach(self, learner: Learner, args: Any) -> None:
        """Remember the policy."""
        self.learner = learner

    def sample(self, prompts: list[list[int]], sampling: Sampling, keys: Sequence[tuple]) -> list[Sampled]:
        """Return one completion of each prompt, in order. Each depends only on its prompt, its key and the weights."""
        learner = self.learner
        merge = merges(learner.model, learner.adapter) and learner.device.type == "cpu"
        with merged(learner.model, learner.adapter) if merge else learner.policy.active() as model:
            return sample(model, prompts, sampling, keys)
