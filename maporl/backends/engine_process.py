"""One of the processes that sample from the policies of a group. It knows nothing of the driver, and nothing of Ray."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from maporl.backends.spec import GroupSpec
from maporl.backends.team_part import load_part
from maporl.backends.weights import Packed, sent_parameters, unpack
from maporl.engines.token_sampler import TokenRow, TokenSampler
from maporl.rollout.restate import UntrainedWeights
from maporl.team.past_policies import past_of
from trl_ext.errors import UserError
from trl_ext.sampling_options import Sampled


class OtherVersion(UserError, RuntimeError):
    """A process was asked to sample from a version of a policy that it does not have."""


class EngineProcess:
    """Samples from copies of the weights of a group's policies. It is at a version of each, or it does not answer.

    Args:
        spec: the group.
    """

    def __init__(self, spec: GroupSpec):
        self.spec = spec
        self.versions: dict[str, int] = {}

    def build(self) -> None:
        """Load the models.

        Raises:
            ConfigError: a model cannot be loaded.
        """
        options = self.spec.args
        on_cpu = options.use_cpu or not torch.cuda.is_available()
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.team = load_part(self.spec, ())
        own = {name: self.team.policies[name] for name in self.spec.policies}
        own |= {name: past_of(own[policy], []) for name, policy in self.spec.past.items()}
        self.team.policies |= own
        for policy in own.values():
            if not policy.is_quantized:
                policy.model.to(self.device)  # type: ignore[arg-type]  # its decorator hides the signature
            policy.model.eval()
        rows = options.local_rollout_forward_batch_size
        self._untrained = UntrainedWeights(self.team, lambda name: own[name].active(), rows)
        self.sampler = TokenSampler(
            own,
            rows,
            options.max_tokens_per_generate,
            options.keep_states,
            keep_states_gib=options.keep_states_gib,
        )
        self.versions = {name: 0 for name in own if name not in self.spec.trained}

    def load(self, policy: str, version: int, weights: Packed) -> int:
        """Take over the ``version`` of a policy's weights, and return their bytes.

        For a policy that speaks with past weights, they are those of the policy that had them.

        Raises:
            WeightsDiffer: the weights do not fit, or are not those that were sent.
        """
        self.versions.pop(policy, None)  # between two versions it answers for neither
        own, origin = self.team.policies[policy], self.team.policies[self.spec.past.get(policy, policy)]
        named = {name.replace(f".{own.adapter}.", f".{origin.adapter}."): p for name, p in sent_parameters(own).items()}
        unpack(weights, named)
        self.sampler.release()
        self.versions[policy] = version
        return weights.buffer.nbytes

    @torch.no_grad()
    def sample(self, rows: Sequence[TokenRow], versions: Mapping[str, int]) -> list[Sampled]:
        """Return a completion for each row, from the given ``versions`` of the policies.

        Raises:
            OtherVersion: it has another version of a policy, or none.
        """
        for name, version in versions.items():
            if self.versions.get(name) != version:
                raise OtherVersion(
                    f"policy {name!r}: asked for version {version}, and the engine has {self.versions.get(name)}"
                )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.args.bf16):
            return self.sampler.sample(rows)

    @torch.no_grad()
    def untrained(self, method: str, policy: str, *arguments: Any) -> Any:
        """Call a method of :class:`maporl.rollout.restate.UntrainedWeights`, for a policy that is not trained."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.args.bf16 and method == "complete"):
            return getattr(self._untrained, method)(policy, *arguments)

    def release(self) -> None:
        """Drop the KV cache of all conversations."""
        self.sampler.release()
