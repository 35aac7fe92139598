"""vLLM for the trainer of one policy: :class:`trl_ext.PPOv2Trainer` samples with the engine that teams have."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from maporl.config.parse import validated
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import VLLMSection
from maporl.team.agents import Policy, Voice
from trl_ext.chat.encoding import context_of
from trl_ext.learning.learner import Learner
from trl_ext.models.forward import base_of
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest
from trl_ext.trainer.ppov2 import Sampler


class VLLMSampler(Sampler):
    """Samples a policy's completions with vLLM: ``PPOv2Trainer(..., sampler=VLLMSampler("http://127.0.0.1:8000"))``.

    vLLM gets the policy's new weights after every update (:mod:`maporl.integrations.vllm.engine`).

    Args:
        urls: the addresses of servers of the policy's base model, which take turns. Give either these or ``colocate``.
        options: ``colocate``, ``base``, ``folder``, ``seeds``, ``key_variable``, ``concurrency``, ``timeout`` and
            ``retries``, which are those of the YAML section ``agents.NAME.vllm``.

    Raises:
        ConfigError: an option cannot be used, or the package ``vllm`` is missing.
    """

    tells_cut = True

    def __init__(self, urls: str | Sequence[str] = (), **options: Any):
        urls = [urls] if isinstance(urls, str) else list(urls)
        self.section: VLLMSection = validated(VLLMSection, {"urls": urls, **options}, "VLLMSampler")

    def attach(self, learner: Learner, args: Any) -> None:
        """Build the engine for the policy. Its weights are sent when the first completion is asked for."""
        voice = Voice(learner.name, learner.tokenizer, context_of(base_of(learner.model).config))
        policy = Policy(voice, learner.model, learner.adapter, True)
        folder = Path(args.output_dir) / "adapters"
        self.engine = VLLMEngine({learner.name: policy}, {learner.name: self.section}, args.temperature, folder)

    def submit(self, requests: Sequence[TokenRequest]) -> Sequence[Future[Sampled] | Ready[Sampled]]:
        """Begin to sample one completion for each request.

        Raises:
            VLLMFailure: a server is not what the options need.
        """
        return self.engine.submit(requests)

    def advance(self) -> bool:
        """Let a vLLM in this process sample one more token. Return whether there is more to do."""
        return self.engine.advance()

    def release(self) -> None:
        """Give up the requests that are left, and let a vLLM in this process give its memory back."""
        self.engine.release()

    def sync(self, policy: str, version: int) -> None:
        """Send the policy's new weights. All processes call this together.

        Raises:
            VLLMFailure: a server did not take the weights.
        """
        self.engine.sync(policy, version)
