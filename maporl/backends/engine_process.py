"""One of the processes that sample from the policies of a group. It knows nothing of the driver, and nothing of Ray."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from maporl.backends.member import GroupSpec
from maporl.backends.team_part import load_part
from maporl.backends.vllm_rows import VLLMRows
from maporl.backends.weights import Packed, sent_parameters, unpack
from maporl.rollout.restate import UntrainedWeights
from maporl.team.agents import Policy
from maporl.team.past_policies import past_of
from trl_ext.errors import UserError
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.request import TokenRequest


class OtherVersion(UserError, RuntimeError):
    """A process was asked to sample from a version of a policy that it does not have."""


class TransformersRows:
    """Samples with transformers from the models of ``policies``. It has the methods of :class:`VLLMRows`.

    Args:
        policies: the policies by name.
        options: the batch sizes, and whether to compute in bfloat16.
        device: the device of the models.
    """

    def __init__(self, policies: Mapping[str, Policy], options: Any, device: torch.device):
        self._bf16, self._device = options.bf16, device
        self._engine = OwnWeights(
            policies,
            options.local_rollout_forward_batch_size,
            options.max_tokens_per_generate,
            options.keep_states,
            keep_states_gib=options.keep_states_gib,
        )

    def sample(self, rows: Mapping[int, TokenRequest]) -> dict[int, Sampled]:
        """Return the completions of all ``rows`` by number."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            return dict(zip(rows, self._engine.sample(list(rows.values())), strict=True))

    def finish(self) -> None:
        """Do nothing, because every call ends what it begins."""

    def sync(self, policy: str, version: int) -> None:
        """Drop the KV cache, which other weights have computed."""
        self._engine.release()

    def release(self) -> None:
        """Drop the KV cache of all conversations."""
        self._engine.release()


class EngineProcess:
    """Samples from copies of the weights of a group's policies. It is at a version of each, or it does not answer.

    Args:
        spec: the group.
    """

    def __init__(self, spec: GroupSpec):
        self.spec = spec
        self.versions: dict[str, int] = {}

    def build(self) -> None:
        """Load the models. Where vLLM samples, they stay in main memory, and vLLM has copies of those that are not
        trained.

        Raises:
            ConfigError: a model cannot be loaded, or vLLM is not installed.
            VLLMFailure: vLLM does not start.
        """
        options, in_vllm = self.spec.args, bool(self.spec.vllm)
        on_cpu = options.use_cpu or not torch.cuda.is_available() or in_vllm
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.team = load_part(self.spec, ())
        policies = {name: self.team.policies[name] for name in self.spec.policies}
        policies |= {name: past_of(policies[policy], []) for name, policy in self.spec.past.items()}
        self.team.policies |= policies
        for policy in policies.values():
            if not policy.is_quantized:
                policy.model.to(self.device)  # type: ignore[arg-type]  # its decorator hides the signature
            policy.model.eval()
        rows = options.batch_rows
        self._untrained = UntrainedWeights(self.team, lambda name: policies[name].active(), rows)
        self.versions = {name: 0 for name in policies if name not in self.spec.trained}
        self.rows: TransformersRows | VLLMRows
        if in_vllm:
            sections = {name: self.spec.vllm[self.spec.past.get(name, name)] for name in policies}
            self.rows = VLLMRows(policies, sections, options, Path(mkdtemp(prefix="maporl-adapters-")))
        else:
            self.rows = TransformersRows(policies, options, self.device)
        for name in self.versions:
            self.rows.sync(name, 0)

    def load(self, policy: str, version: int, weights: Packed) -> int:
        """Take over the ``version`` of a policy's weights, and return their bytes.

        For a policy that speaks with past weights, they are those of the policy that had them.

        Raises:
            WeightsDiffer: the weights do not fit, or are not those that were sent.
        """
        self.versions.pop(policy, None)  # between two versions it answers for neither
        self.rows.finish()
        unpack(weights, sent_parameters(self.team.policies[policy]))
        self.rows.sync(policy, version)
        self.versions[policy] = version
        return weights.buffer.nbytes

    @torch.no_grad()
    def sample(self, rows: Mapping[int, TokenRequest], versions: Mapping[str, int]) -> dict[int, Sampled]:
        """Return completions of ``rows`` by their numbers, from the given ``versions`` of the policies.

        These are all of them, or where vLLM samples those of these and of earlier rows that are there.

        Raises:
            OtherVersion: it has another version of a policy, or none.
        """
        for name, version in versions.items():
            if self.versions.get(name) != version:
                raise OtherVersion(
                    f"policy {name!r}: asked for version {version}, and the engine has {self.versions.get(name)}"
                )
        return self.rows.sample(rows)

    @torch.no_grad()
    def untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights`, for a policy that is not trained."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.args.bf16 and method == "complete"):
            return getattr(self._untrained, method)(policy, *arguments)

    def release(self) -> None:
        """Drop the KV cache of all conversations, or let vLLM sleep."""
        self.rows.release()
