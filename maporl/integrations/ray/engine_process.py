"""One of the processes that sample from the policies of a group, with transformers or with vLLM.

It knows nothing of the driver, and nothing of Ray.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from maporl.engines.transformers import own_weights
from maporl.integrations.ray.member import GroupSpec
from maporl.integrations.ray.messages import Packed, sent_parameters, unpack
from maporl.integrations.ray.team_part import load_part
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import VLLMSection
from maporl.rollout.restate import UntrainedWeights
from maporl.team.agents import Policy
from maporl.team.past_policies import past_of
from trl_ext.errors import UserError
from trl_ext.ppo.options import PPOOptions
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

# -- vLLM --------------------------------------------------------------------------------------------------------------

PAUSE = 0.02
"""The seconds for which a call waits for answers while vLLM works."""
PROBED = 100
"""vLLM's probabilities are compared with those of the policy here after the first weights, and after every so many."""


class VLLMRows:
    """A vLLM for each base of ``policies``, which works in a thread of its own between the calls of this process.

    Its weights are copied from the models of the policies, which stay in main memory.

    Args:
        policies: the policies by name.
        sections: the options of vLLM by policy.
        options: the temperature of the run.
        folder: where adapters are written for vLLM to read.

    Raises:
        ConfigError: the package ``vllm`` is not installed.
        VLLMFailure: vLLM does not start.
    """

    def __init__(
        self, policies: Mapping[str, Policy], sections: Mapping[str, VLLMSection], options: PPOOptions, folder: Path
    ):
        self._engine = VLLMEngine(policies, sections, options.temperature, folder, probe_every=PROBED)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vLLM")
        self._running: dict[int, Future[Sampled] | Ready[Sampled]] = {}
        """What vLLM works on, by number. Only its thread changes this."""
        self._finished: dict[int, Sampled] = {}
        self._failed: Exception | None = None
        self._changed = threading.Condition()

    def sample(self, rows: Mapping[int, TokenRequest]) -> dict[int, Sampled]:
        """Begin with ``rows``, by number, and return the completions of earlier and of these rows that are there.

        This waits until all are there, or for a moment.

        Raises:
            VLLMFailure: vLLM does not take a row.
            Exception: what vLLM raised.
        """
        if rows:
            self._thread.submit(self._safely, lambda: self._begin(rows)).result()
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._failed is not None, PAUSE)
            if self._failed is not None:
                raise self._failed
            finished, self._finished = self._finished, {}
        return finished

    def finish(self) -> None:
        """Let what has begun end. Its completions are returned by the next :meth:`sample`."""

        def work() -> None:
            while self._running:
                self._step()

        self._thread.submit(self._safely, work).result()

    def sync(self, policy: str, version: int) -> None:
        """Copy the weights of a policy into vLLM, after :meth:`finish`.

        Raises:
            VLLMFailure: vLLM does not take them, or has other ones afterwards.
        """
        self._thread.submit(self._engine.sync, policy, version).result()

    def release(self) -> None:
        """Let vLLM give its memory back until the next row, if nothing is running and ``sleep`` is set."""

        def work() -> None:
            if not self._running:
                self._engine.release()

        self._thread.submit(work).result()

    # -- in vLLM's thread -------------------------------------------------------------------------------------------

    def _begin(self, rows: Mapping[int, TokenRequest]) -> None:
        idle = not self._running
        begun = self._engine.submit(list(rows.values()))
        with self._changed:
            self._running |= zip(rows, begun, strict=True)
        if idle:
            self._thread.submit(self._safely, self._work)

    def _work(self) -> None:
        """Take one step, and the next one after whatever else was asked of this thread."""
        self._step()
        if self._running:
            self._thread.submit(self._safely, self._work)

    def _step(self) -> None:
        self._engine.advance()
        sampled = {number: future.result() for number, future in self._running.items() if future.done()}
        with self._changed:
            self._finished |= sampled
            for number in sampled:
                del self._running[number]
            self._changed.notify_all()

    def _safely(self, work: Any) -> None:
        """Do ``work``. Calls raise what it raises."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()


# -- transformers, and the process -------------------------------------------------------------------------------------


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
        self._engine = own_weights(policies, options)

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
