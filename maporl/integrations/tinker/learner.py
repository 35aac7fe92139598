"""What trains a policy that is on a service: the learner of every run, whose forward and step are asked for there.

Losses, their statistics and the gradients by log-probabilities are computed here (:mod:`trl_ext.ppo.losses`). The
gradient by the weights is linear in those, so that the service can compute it for any loss of the sampled tokens.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, nn

from maporl.integrations.tinker.engine import prompt_logprobs
from maporl.integrations.tinker.service import Adapter, Row, ServiceFailure, SessionLost
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.learner import Forward, Learner
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Metrics
from trl_ext.learning.trained import NonFiniteError, Trained
from trl_ext.ppo.batch import TokenBatch
from trl_ext.ppo.losses import Totals
from trl_ext.process.waits import Threads, finished, result

STATE = "tinker.json"
"""The file of a policy's folder in a checkpoint that says where the service keeps its state."""
Result = TypeVar("Result")


class TinkerLearner(Learner):
    """A policy on a service, with its optimizer there. Its critic, if it has one, is a model in this process.

    Args:
        adapter: the policy's LoRA on the service.
        base: returns the SDK's client that samples from the base model.
        arguments: those of :class:`Learner`. The policy's model has no weights.
    """

    rounded = True
    """The service computes in half precision."""

    def __init__(self, adapter: Adapter, base: Callable[[], Any], *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.remote, self.base = adapter, base
        self.checked = True  # gradients are elsewhere, and the probe compares two forwards
        self._anchor = nn.Parameter(torch.zeros(1))
        """Stands for the policy in the optimizer here, which so has its learning rate."""
        self._fresh = False
        """Whether ``old_logprobs`` of the present token batch are those of the present weights."""
        self._read_rows: list[tuple[TokenBatch, Tensor]] = []
        self._asked: list[Any] = []

    def _check_adapter(self) -> None:
        """Do nothing: a new LoRA sees no later tokens, and no weights are here to try it with."""

    def prepare(
        self, accelerator: Any, updates: int, optimizer: Any = None, scheduler: Any = None, device: Any = None
    ) -> None:
        """Build the schedule of the learning rate, and the optimizer of the critic."""
        models = {} if self.critic.model is None else {"value_model": self.critic.model}
        anchor = nn.Module()
        anchor.register_parameter("anchor", self._anchor)
        critic = [{"params": params, "lr": self.value_learning_rate} for params in self.critic.parameters() if params]
        groups = [{"params": [self._anchor], "lr": self.learning_rate}, *critic]
        self._trained = Trained(
            f"policy {self.name!r}",
            {"policy": anchor, **models},
            self.critic.head,
            lambda: groups,
            self.args,
            accelerator,
            updates,
        )

    def microbatches(self, rows: TokenBatch, index: Tensor | None = None) -> list[Tensor]:
        """Return the rows of a minibatch as one part: what is too much for a request is cut by the client."""
        index = torch.arange(len(rows)) if index is None else index
        return [index] if len(index) else []

    # -- forward --------------------------------------------------------------------------------------------------

    def _read(self, model: Any, rows: TokenBatch, entropies: bool = False, entropy_gradient: bool = False) -> Any:
        """Return no hidden states, log-probabilities, and what these say of entropies: a sampled token's estimate.

        Before the first step of an update, the log-probabilities are those that the update has read already.
        """
        if self._fresh:
            logprobs = rows.old_logprobs[rows.sampled].clone()
        else:
            self._check_temperature(rows)
            sequences = rows_of(rows)
            logprobs = torch.cat(self.remote.logprobs(sequences, self.remote.forward(sequences)))
        if torch.is_grad_enabled():
            logprobs.requires_grad_(True)
            self._read_rows.append((rows, logprobs))
        return None, logprobs, -logprobs.detach() if entropies else None

    def _check_temperature(self, rows: TokenBatch) -> None:
        """Check that all rows were sampled at temperature 1, at which the service computes log-probabilities."""
        other = ((rows.temperature != 1.0) & ~rows.temperature.isnan()).nonzero().flatten().tolist()
        if other:
            raise ServiceFailure(
                f"{rows.labels[other[0]]}: was sampled at temperature {float(rows.temperature[other[0]]):g}, and the "
                "service computes log-probabilities at 1; let the program or the protocol ask at 1"
            )

    def reference_logprobs(self, rows: TokenBatch) -> Tensor:
        """Return log-probabilities [M] of the sampled tokens under the base model."""
        sampler, sequences = self.base(), rows_of(rows)
        asked = [prompt_logprobs(sampler, row.ids) for row in sequences]
        told = [self.remote.answer("read rows under the base", one) for one in asked]
        return torch.tensor(
            [p for row, one in zip(sequences, told, strict=True) for p in one[row.first - len(row.ids) :]]
        )

    def annotate(self, rows: TokenBatch) -> tuple[Metrics, Forward | None]:
        """Fill in ``old_logprobs``, ``values`` and ``ref_logprobs``, as :meth:`Learner.annotate` does."""
        self._fresh = False
        metrics, _ = super().annotate(rows)
        self._fresh = True
        self._read_rows = []
        return metrics, None

    # -- learning -------------------------------------------------------------------------------------------------

    def accumulate(
        self, rows: TokenBatch, index: Tensor, forward: Forward | None = None, totals: Totals | None = None
    ) -> Metrics:
        """Add the gradient of the loss over a minibatch, as :meth:`Learner.accumulate` does. The service is asked for
        that of the policy, and not waited for."""
        measures = super().accumulate(rows, index, None, totals)
        for read, logprobs in self._read_rows:
            if not rows.critic_only and logprobs.grad is not None:
                sequences = rows_of(read)
                each = [row.length - row.first + 1 for row in sequences]
                parts = logprobs.detach().split(each), logprobs.grad.split(each)
                self._asked += self.remote.backward(sequences, *parts)
        self._read_rows = []
        return measures

    def step(self) -> float:
        """Step the critic here, and the policy on the service, if it has a gradient.

        Returns:
            The norm of the policy's gradient before clipping, if the service tells it, and otherwise NaN.

        Raises:
            NonFiniteError: the gradient norm is infinite, or that of the critic is NaN.
        """
        if self.critic.model is not None:
            super().step()
        if not self._asked:
            return math.nan
        args, rate = self.args, self.trained.rates()["lr"]
        clip = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else 0.0
        adam = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon}
        stepped = self.remote.step(learning_rate=rate, weight_decay=args.weight_decay, grad_clip_norm=clip, **adam)
        asked, self._asked, self._fresh = self._asked, [], False
        for future in asked:
            self.remote.answer("train", future)
        said = self.remote.answer("step", stepped).metrics or {}
        if rate > 0:
            self._anchor.data += 1  # so that the audit sees that the policy moved
        norm = next((value for key, value in said.items() if "grad" in key and "norm" in key), math.nan)
        if math.isinf(norm):
            raise NonFiniteError(f"policy {self.name!r}: the service says that the gradient norm is {norm}")
        return norm

    def begin_again(self) -> None:
        """Forget what was asked for in this update. The weights are those before it."""
        self._asked, self._read_rows, self._fresh = [], [], True
        self.trained.optimizer.zero_grad(set_to_none=True)

    # -- its folder -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write where the service keeps the present state, and the critic, for a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        path = self.remote.save(f"{self.name}-{uuid4().hex[:8]}")
        state = {"path": path, "base_model": self.remote.base, "service": self.remote.service.url}
        (folder / STATE).write_text(json.dumps(state, indent=1))
        self.tokenizer.save_pretrained(folder)
        self.critic.save(folder)

    def load(self, folder: Path) -> None:
        """Begin from the state that :meth:`save` wrote down.

        Raises:
            CheckpointError: the folder says of no state, or of another service's.
        """
        file = folder / STATE
        state = json.loads(file.read_text()) if file.is_file() else {}
        if state.get("service", "") != self.remote.service.url or "path" not in state:
            there = state.get("service") or "the Tinker service" if state else "no service"
            raise CheckpointError(
                f"{folder}: its weights are on {there}, and this run trains on {self.remote.service.name}; weights "
                "cannot be moved from one to the other: resume with the first, or begin another run"
            )
        self.remote.load(state["path"])
        self._fresh = False
        self.critic.load(folder)

    def export(self, folder: Path) -> None:
        """Write the policy into ``folder`` as PEFT does, with its tokenizer and its critic."""
        folder.mkdir(parents=True, exist_ok=True)
        self.remote.download(f"{self.name}-final", folder)
        self.tokenizer.save_pretrained(folder)
        self.critic.save(folder)


def rows_of(rows: TokenBatch) -> list[Row]:
    """Return the rows of a token batch as the service reads them.

    Raises:
        ServiceFailure: a prompt is empty, so that its first token has no log-probability there.
    """
    ids = rows.input_ids.tolist()
    if any(first < 1 for first in rows.first):
        raise ServiceFailure(f"{rows.labels[rows.first.index(0)]}: its prompt has no token, which the service needs")
    return [Row(one[:end], first) for one, first, end in zip(ids, rows.first, rows.tree.lengths, strict=True)]


class TinkerLearning(Learning):
    """Trains policies on services, all at the same time: each of them is asked in a thread of its own.

    Args:
        learners: the learners by name.
        args: the trainer's arguments.
        device: the device of critics.
        reopen: opens all sessions again, with the adapters as they were after the last update.
    """

    def __init__(self, learners: dict[str, Any], args: Any, device: torch.device, reopen: Callable[[], None]):
        super().__init__(learners, args, device)
        self.tinker: dict[str, TinkerLearner] = learners
        self.reopen = reopen

    def token_batches(self, completions: Mapping[str, Sequence[Any]], critic_only: Collection[str] = ()) -> Any:
        """Build each learner's token batch, as :meth:`Learning.token_batches` does. Forward passes do not change
        anything, so that they are asked for again where a session is lost."""
        return self._again(partial(super().token_batches, completions, critic_only))

    def update(self, batches: dict[str, TokenBatch], step: int) -> tuple[dict[str, Metrics], float]:
        """Train every learner, as :meth:`Learning.update` does, and let the service keep what this made of it.

        An update that a lost session ended is made again, from the state after the last one. A critic here has moved
        by then, so that the run ends if there is one.
        """
        make = partial(super().update, batches, step)
        has_critic = any(learner.critic.model is not None for learner in self.tinker.values())
        merged, rate = make() if has_critic else self._again(make)
        for name in merged:
            if math.isnan(merged[name].get("grad_norm", 0.0)):
                del merged[name]["grad_norm"]  # the service does not tell it
            self.tinker[name].remote.keep(f"{name}-after-{step + 1}")
        return merged, rate

    def _again(self, make: Callable[[], Result]) -> Result:
        try:
            return make()
        except SessionLost:
            self.reopen()
            for learner in self.tinker.values():
                learner.begin_again()
            return make()

    def _on_all_devices(self, names: Iterable[str], work: Callable[[str], Result]) -> dict[str, Result]:
        """Return ``work(name)`` for every learner of ``names``, in order, and ask for all of it together."""
        names = list(names)
        with Threads(len(names), "asks the service") as threads:
            ends = [threads.submit(work, name) for name in names]
            finished(ends)
            return {name: result(end) for name, end in zip(names, ends, strict=True)}

    @contextmanager
    def whole_weights(self, names: Collection[str] | None = None, references: bool = False) -> Iterator[None]:
        """Do nothing, because nothing samples from weights in this process."""
        yield

    def save_policy(self, name: str, folder: Path) -> None:
        """Save a policy as a ``from_pretrained`` folder."""
        self.tinker[name].export(folder)
