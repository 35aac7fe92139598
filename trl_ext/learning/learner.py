"""A learner holds one policy and everything that trains it: critic, reference, optimizer and scheduler.

``PPOv2Trainer`` has one learner, and a trainer of a team has one for each policy. Several learners may
share one base model, each with its own adapter.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from trl_ext.learning.checks import check_causal, check_steps_all, sees_later_tokens
from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.critics import CRITICS, ValueHead
from trl_ext.learning.metrics import Metrics
from trl_ext.learning.policy import Policy, load_everywhere, try_saving
from trl_ext.learning.trained import NonFiniteError, Trained, flat
from trl_ext.models.adapters import (
    HALF_PRECISION,
    AdapterError,
    adapter_parameters,
    check_adapters,
    initialisation,
    narrow_adapters,
    repeats,
    shaken,
    strays,
)
from trl_ext.models.forward import (
    base_of,
    beyond,
    in_regimes,
    length_regimes,
    logits_of,
    read_actions,
    rounds,
    share_reading,
    tree_limits,
)
from trl_ext.models.liger import use_liger
from trl_ext.models.randomness import quiet, set_recomputation
from trl_ext.ppo.batch import TokenBatch, ToRead, placeholder
from trl_ext.ppo.losses import Totals, micro_batch_loss, objective_of
from trl_ext.ppo.options import rate_of
from trl_ext.ppo.value_bins import ValueBins
from trl_ext.process import distributed
from trl_ext.sampling.grammar import forced, grammars_of
from trl_ext.sharding.choice import strategy_of
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.spreading import place

logger = logging.getLogger(__name__)


@dataclass
class PolicyOutput:
    """The outputs of one forward at the M sampled tokens of its rows, in row-major order. Every tensor is [M].

    ``values`` is None without a critic. ``entropies`` is None where they were not asked for. ``value_logits`` [M, B]
    are those of a categorical critic (:class:`trl_ext.ppo.value_bins.ValueBins`), of which ``values`` are the means.
    """

    logprobs: Tensor
    values: Tensor | None
    entropies: Tensor | None
    value_logits: Tensor | None = None


@dataclass
class Forward:
    """A forward with its graph, over all ``rows`` in the order of ``index`` [N], that the first step may reuse."""

    rows: TokenBatch
    index: Tensor
    output: PolicyOutput


MicroBatch = tuple[TokenBatch, Tensor, dict[str, Tensor]]
"""What is kept of a micro-batch until its measures are read: its rows, its log-probabilities [M], and the measures."""


class Learner:
    """One policy with its critic, reference, optimizer and scheduler.

    Args:
        policy: the policy. Several learners may share its ``PeftModel``.
        args: the options.
        critic: where values come from, a key of ``trl_ext.learning.critics.CRITICS``.
        value_model: the critic ``model``. It may be a sequence classifier, which has its own head. By default it is a
            copy of the policy.
        central_values: the function that returns the values of rows by the critic ``central``, which is not part of
            this learner: the learner only adds gradients to it.
        reference: the reference model of the KL penalty. By default a ``PeftModel`` is read with its adapters off, and
            another model is copied and frozen. With ``kl_coef`` 0 a reference is not needed, and no copy is made.
        ref_adapter: the adapter of the model that serves as the reference, instead of adapters off.
        outputs: the number of critic outputs, such as one for each turn.

    Raises:
        ValueError: the parts do not fit each other. The message says which, and what to do.
        AdapterError: the adapter cannot be trained or copied as it is.
    """

    def __init__(
        self,
        policy: Policy,
        args: PPOv2Config,
        *,
        critic: str = "head",
        value_model: nn.Module | None = None,
        central_values: Callable[[TokenBatch], Tensor] | None = None,
        reference: nn.Module | None = None,
        ref_adapter: str | None = None,
        outputs: int = 1,
    ):
        name, model = policy.name, policy.model
        if critic not in CRITICS:
            raise ValueError(f"policy {name!r}: critic must be one of {', '.join(CRITICS)}, got {critic!r}")
        self.policy, self.args = policy, args
        self.name, self.model, self.tokenizer, self.adapter = name, model, policy.tokenizer, policy.adapter
        policy.keep_frozen()
        self.learning_rate = rate_of(args.learning_rate, adapter=self.adapter is not None)
        for part, module in (("model", model), ("value_model", value_model), ("reference", reference)):
            check_adapters(module, f"policy {name!r}: its {part}")
        if value_model is not None:
            check_causal(value_model, f"policy {name!r}: value_model")
        if self.adapter is not None:
            self._check_adapter()
        self.critic = CRITICS[critic](policy, args, outputs, value_model, central_values)
        trunk = model if self.critic.model is None else self.critic.model
        self.value_learning_rate = rate_of(
            args.value_learning_rate, args.learning_rate, adapter=isinstance(trunk, PeftModel)
        )
        policy.refer_to(reference, ref_adapter, needed=args.kl_coef != 0)
        for module in filter(None, (model, self.critic.model, policy.reference)):
            quiet(module)  # also the adapters that were added here
        if policy.reference is not None:
            policy.reference.eval()  # it has no backward pass to recompute activations for
        self._trained: Trained | None = None
        self.mixed_precision = False
        """Whether forward passes convert float32 weights to bfloat16 (``bf16``)."""
        self.device = torch.device("cpu")
        """The device of this policy's token batches."""
        self.most_tokens = args.max_tokens_per_microbatch
        """The most tokens, padding included, that one training forward reads. None: only rows are limited."""
        self.frozen = Holder()
        """How the processes hold ``reference``, if this is a separate model."""
        self.checked = False
        """Whether a second forward has shown that forwards of the same weights are equal
        (:mod:`trl_ext.learning.invariants`)."""
        self.objective = objective_of(args)

    def _check_adapter(self) -> None:
        """Check that the adapter, once it has learned, sees no later tokens, and say if it cannot be loaded again."""
        options = self.model.peft_config[self.adapter]
        with self.policy.active(), shaken(self.model, [self.adapter]):
            if sees_later_tokens(self.model):
                raise AdapterError(
                    f"policy {self.name!r}: with its adapter {self.adapter!r} ({type(options).__name__}) the model "
                    "sees the tokens that follow, so that it has no probability of the next one; use a LoraConfig"
                )
        if not repeats(options):
            logger.warning(
                "policy %r: the initialisation of adapter %r (%s) cannot be repeated, so the adapter fits only the "
                "base that is in memory now; save that too (model.get_base_model().save_pretrained), before you "
                "resume or load the adapter elsewhere",
                self.name, self.adapter, initialisation(options),
            )  # fmt: skip

    @property
    def trained(self) -> Trained:
        """Return what is trained, with its optimizer.

        Raises:
            RuntimeError: :meth:`prepare` has not been called yet.
        """
        if self._trained is None:
            raise RuntimeError(f"policy {self.name!r}: the learner is not prepared; call prepare(accelerator, updates)")
        return self._trained

    @property
    def strategy(self) -> Holder:
        """Return how the processes hold the weights that are trained."""
        return self.trained.strategy

    @property
    def optimizer(self) -> Any:
        """Return the optimizer of the policy and of its critic."""
        return self.trained.optimizer

    @property
    def scheduler(self) -> Any:
        """Return the schedule of the learning rate."""
        return self.trained.scheduler

    @property
    def reference(self) -> nn.Module | None:
        """Return the reference of the KL penalty, or None if it is not a model of its own."""
        return self.policy.reference

    @property
    def value_head(self) -> ValueHead | None:
        """Return the critic's head, if it has one."""
        return self.critic.head

    def prepare(self, accelerator, updates: int, optimizer=None, scheduler=None, device=None) -> None:
        """Move the models to their device, and build the optimizer and its learning-rate schedule.

        Args:
            accelerator: accelerate's ``Accelerator``. Its configuration decides how weights are sharded.
            updates: the number of updates of the run, over which the schedule runs.
            optimizer: an optimizer to use. By default ``args.optim`` names one.
            scheduler: a schedule to use. By default ``args.lr_scheduler_type`` names one.
            device: the device. By default it is the accelerator's.

        Raises:
            ValueError: ``optimizer`` does not step everything that is trained.
        """
        for module in filter(None, (self.model, self.critic.model, self.reference)):
            share_reading(base_of(module))  # now, because processes may share the weights from here on
        self.mixed_precision = check_mixed_precision(accelerator.mixed_precision)
        self.device = accelerator.device if device is None else device
        kind = strategy_of(accelerator)
        for module in filter(None, (self.model, self.critic.model, self.critic.head)):
            if _is_quantized(module):
                _check_device(self.name, module, self.device)
            elif not kind.distributes(accelerator):
                place(module, self.device)
        if self.args.use_liger_kernel:
            # the reference too, because its probabilities must be the policy's where their weights are equal
            for module in filter(None, (self.model, self.critic.model, self.reference)):
                use_liger(module, self.args.liger_kernel_config)  # type: ignore[arg-type]  # a text was parsed
        if self.args.gradient_checkpointing:
            kwargs = self.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
            for module in filter(None, (self.model, self.critic.model)):
                set_recomputation(base_of(module), kwargs)  # type: ignore[arg-type]  # a text was parsed
                base_of(module).enable_input_require_grads()
        narrow_adapters(self.model, [self.adapter, self.critic.adapter, self.policy.ref_adapter])
        if isinstance(self.critic.model, PeftModel):
            narrow_adapters(self.critic.model, self.critic.model.active_adapters)
        if optimizer is not None:
            check_steps_all(optimizer, self._trained_names(), f"policy {self.name!r}")
        models, groups = {"policy": self.model, "value_model": self.critic.model}, partial(self._groups, optimizer)
        self._trained = Trained(
            f"policy {self.name!r}", models, self.critic.head, groups, self.args, accelerator, updates, optimizer,
            scheduler,
        )  # fmt: skip
        self.policy.let_learn(self.trained.parameters)
        for module in filter(None, (self.model, self.critic.model)):
            quiet(module)  # and in the mode in which it recomputes activations, if it does
        if self.reference is not None and _is_quantized(self.reference):
            _check_device(self.name, self.reference, self.device)
        elif self.reference is not None:
            self.frozen = self.strategy.freeze(self.reference, self.device)

    def _groups(self, optimizer: Any) -> list[dict]:
        """Return the parameter groups of ``optimizer``, or those of an optimizer that is still to be built."""
        if optimizer is None:
            with self.policy.active():
                return self._parameter_groups()
        if optimizer.state and any(p.dtype in HALF_PRECISION for p in flat(optimizer.param_groups)):
            raise ValueError(
                f"policy {self.name!r}: the optimizer has made steps already, or keeps a state from its start, and "
                "this state cannot move to float32 master weights; pass a new optimizer, or name one by args.optim"
            )
        return optimizer.param_groups

    def _trained_names(self) -> dict[str, nn.Parameter]:
        """Return everything in the models of this learner that requires gradients, by names that a user knows."""
        others: set[int] = set()  # adapters of other learners on the same base
        if self.adapter is not None:
            for name in set(self.model.peft_config) - {self.adapter, self.critic.adapter}:
                others |= {id(p) for p in adapter_parameters(self.model, name).values()}
        parts = {"model": self.model, "value_model": self.critic.model, "value_head": self.critic.head}
        named = [(f"{part}.{n}", p) for part, m in parts.items() if m is not None for n, p in m.named_parameters()]
        with self.policy.active():
            return {name: p for name, p in named if p.requires_grad and id(p) not in others}

    def _parameter_groups(self) -> list[dict]:
        policy = [p for p in self.policy.parameters().values() if p.requires_grad]
        if not policy:
            raise ValueError(f"policy {self.name!r}: no parameter requires a gradient; load the adapter as trainable")
        if self.adapter is not None and (lost := strays(self.model)):
            raise AdapterError(
                f"policy {self.name!r}: {len(lost)} parameters require gradients and belong to no adapter, such as "
                f"{lost[0]}; PEFT would not save them, so they are not trained: name their modules in modules_to_save, "
                "train the whole model without PEFT, or say requires_grad_(False)"
            )
        rate = self.value_learning_rate
        critic = [{"params": params, "lr": rate} for params in self.critic.parameters() if params]
        return [{"params": policy, "lr": self.learning_rate}, *critic]

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, rows: TokenBatch, entropies: bool = False) -> PolicyOutput:
        """Return log-probabilities, values and entropies at the sampled tokens of ``rows`` under the current weights.

        ``entropies`` asks for entropies. They have a gradient if ``entropy_coef`` is not 0.
        """
        wanted = entropies and self.args.entropy_coef != 0
        with self.policy.active() as model:
            hidden, logprobs, entropy = self._read(model, rows, entropies, wanted)
        with self.autocast():
            values = self.critic.values(rows, hidden)
        bins = ValueBins.of(self.args)
        if bins is None or values is None:
            return PolicyOutput(logprobs, values, entropy)
        return PolicyOutput(logprobs, bins.values(values), entropy, values)

    def _read(self, model: Any, rows: TokenBatch, entropies: bool = False, entropy_gradient: bool = False):
        """Return hidden states, log-probabilities and entropies at the sampled tokens of ``rows`` under ``model``."""
        targets, temperature = rows.input_ids[rows.sampled], rows.temperatures(self.args.temperature)
        masks = cache(lambda: self._masks(rows))

        def read(part: ToRead, tokens: Tensor | None) -> tuple[Tensor | None, ...]:
            each = isinstance(temperature, Tensor) and tokens is not None
            if tokens is not None and len(tokens) < len(targets) and self.strategy.sharded:
                raise ValueError(
                    f"policy {self.name!r}: rows are longer and shorter than {length_regimes(base_of(model))[0]} "
                    "tokens, beyond which its longrope reads them apart, and processes that share weights must make "
                    "equally many forwards; keep prompts and response_length below that, or hold the weights whole "
                    "(without FSDP and ZeRO-3)"
                )
            return read_actions(
                model,
                part,
                targets if tokens is None else targets[tokens],
                temperature[tokens] if each else temperature,  # type: ignore[index]
                self.autocast,
                self.args.logits_chunk,
                entropies,
                entropy_gradient,
                masks if tokens is None else lambda: None if (allowed := masks()) is None else allowed[tokens],
            )

        base = base_of(model)
        return in_regimes(rows, length_regimes(base), tree_limits(base), read)

    def _masks(self, rows: TokenBatch) -> Tensor | None:
        """Return which tokens the grammars of ``rows`` allowed in place of each sampled one, [M, ceil(V / 32)] int32
        with a bit for each token, or None if no row has a grammar."""
        if not any(rows.grammars):
            return None
        ids, ends = rows.input_ids.tolist(), rows.tree.lengths
        said = [row[first:end] for row, first, end in zip(ids, rows.first, ends, strict=True)]
        masks = grammars_of(self.tokenizer, logits_of(base_of(self.model))).replay(rows.grammars, said)
        return masks.to(rows.input_ids.device)

    def reference_logprobs(self, rows: TokenBatch) -> Tensor:
        """Return log-probabilities [M] of the sampled tokens under the reference, at the same temperature."""
        with self.policy.reference_model() as model:
            return self._read(model, rows)[1]

    def autocast(self) -> Any:
        """Return a context manager for mixed precision (``bf16``), which does nothing without it."""
        # accelerate's own context does nothing under DeepSpeed
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision)

    @torch.no_grad()
    def annotate(self, rows: TokenBatch) -> tuple[Metrics, Forward | None]:
        """Fill in ``old_logprobs``, ``values`` and ``ref_logprobs`` of ``rows`` under the weights that sampled them.

        This runs the same forward as training. The probability ratio of the first minibatch is therefore 1. All
        processes call this together.

        Returns:
            The mean entropy per token that the policy could choose, over all processes, the share of the tokens that a
            grammar forced if there are any, and the forward that :meth:`accumulate` may reuse.
            This is None unless a single forward read all rows, and in the first update, whose second forward is
            compared with it (:mod:`trl_ext.learning.invariants`).

        Raises:
            NonFiniteError: a log-probability or a value is NaN or infinite.
            ValueError: a separate value model or the reference lacks a token of ``rows``.
        """
        args = self.args
        self._check_vocabulary(rows)
        parts = self.microbatches(rows)
        keep = (
            len(parts) == 1
            and self.checked
            and args.num_mini_batches == 1
            and not args.gradient_checkpointing
            and distributed.size() == 1
        )
        logprobs, values, references, entropies = [], [], [], []
        chosen = float(len(rows.sampled[0]))
        if (masks := self._masks(rows)) is not None:
            rows.forced = _scatter(forced(masks), rows, torch.arange(len(rows)))
            chosen = float(rows.chosen.sum())
            del masks
        for number in range(self.strategy.rounds(len(parts), rows.input_ids.device)):
            microbatch = rows.take(parts[number]) if number < len(parts) else placeholder(rows.input_ids.device)
            # the reference goes first, while memory holds no graph yet
            reference = self._reference_logprobs(microbatch) if args.kl_coef != 0 else None
            with torch.set_grad_enabled(keep):
                out = self.strategy.call(partial(self.forward, microbatch, entropies=True))
            references.append(out.logprobs.detach() if reference is None else reference)
            logprobs.append(out.logprobs.detach())
            entropies.append(cast(Tensor, out.entropies).detach())
            values.append(torch.zeros_like(logprobs[-1]) if out.values is None else out.values.detach())
        if parts:
            order, real = torch.cat(parts), slice(len(parts))
            rows.old_logprobs = _scatter(torch.cat(logprobs[real]), rows, order)
            rows.values = _scatter(torch.cat(values[real]), rows, order)
            rows.ref_logprobs = _scatter(torch.cat(references[real]), rows, order)
        self._check_finite(rows, {"log-probability": rows.old_logprobs, "value": rows.values})
        entropy_sums = torch.stack([e.sum() for e in entropies[: len(parts)]]).tolist() if parts else []
        sums = [float(sum(entropy_sums)), chosen, float(len(rows.sampled[0]))]
        entropy, chosen, tokens = distributed.all_reduce_sum(sums, rows.input_ids.device)
        metrics = {"policy/entropy_avg": entropy / max(chosen, 1.0)}
        if chosen < tokens:
            metrics["policy/forced_tokens"] = (tokens - chosen) / tokens
        return metrics, Forward(rows, parts[0], out) if keep else None

    @torch.no_grad()
    def logprobs(self, rows: TokenBatch) -> Tensor:
        """Return the log-probabilities [N, T] of the sampled tokens of ``rows`` under the present weights, with 0
        elsewhere. All processes call this together."""
        parts = self.microbatches(rows) if len(rows) else []
        read = []
        for number in range(self.strategy.rounds(len(parts), rows.input_ids.device)):
            part = rows.take(parts[number]) if number < len(parts) else placeholder(rows.input_ids.device)
            with self.policy.active() as model:
                read.append(self.strategy.call(partial(self._read, model, part))[1])
        if not parts:
            return torch.zeros_like(rows.old_logprobs)
        return _scatter(torch.cat(read[: len(parts)]), rows, torch.cat(parts))

    def _reference_logprobs(self, rows: TokenBatch) -> Tensor:
        """Return :meth:`reference_logprobs`. Processes that share the reference's weights call this together."""
        holder = self.strategy if self.reference is None else self.frozen
        return holder.call(lambda: self.reference_logprobs(rows))

    def microbatches(self, rows: TokenBatch, index: Tensor | None = None) -> list[Tensor]:
        """Return the indices of ``rows`` that each forward reads, of those in ``index``, or by default of all rows."""
        index = torch.arange(len(rows)) if index is None else index
        most_rows = self.args.per_device_train_batch_size
        return rows.microbatches(index, most_rows, self.most_tokens, tree_limits(base_of(self.model)))

    # -- learning -------------------------------------------------------------------------------------------------

    def accumulate(
        self, rows: TokenBatch, index: Tensor, forward: Forward | None = None, totals: Totals | None = None
    ) -> Metrics:
        """Add the gradient of the loss over the minibatch ``index`` of ``rows``, micro-batch by micro-batch.

        Every micro-batch is weighted by its tokens. The result does not depend on how the minibatch is cut. ``totals``
        are those of a larger minibatch of which ``index`` is a part; by default those of ``index``. Before any step,
        ``forward`` is what :meth:`annotate` returned; it is reused if the minibatch is all of its rows. All
        processes call this together, even with an empty ``index``.

        Returns:
            The statistics of the minibatch, over all processes.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        args = self.args
        totals = Totals.of(rows, index, args) if totals is None else totals
        microbatches: list[MicroBatch] = []
        device = rows.input_ids.device
        if forward is not None and (forward.rows is not rows or len(index) < len(rows)):
            forward = None
        parts = self.microbatches(rows, index) if forward is None else [forward.index]
        rounds = self.strategy.rounds(len(parts), device)
        for number in range(rounds):
            last = number + 1 == rounds
            if number >= len(parts):
                with self.policy.active():
                    self.strategy.backward(self.strategy.call(lambda: self._zero_loss(device, rows.critic_only)), last)
                continue
            microbatch = rows.take(parts[number])
            if forward is None:
                out = self.strategy.call(partial(self.forward, microbatch, entropies=args.entropy_coef != 0))
            else:
                out = forward.output
            loss, measures = micro_batch_loss(microbatch, out, totals, args, self.objective)
            with self.policy.active():  # the adapter must stay on, because backward may recompute activations
                self.strategy.backward(loss, last)
            microbatches.append((microbatch, out.logprobs.detach(), measures))
        return self._summed(microbatches)

    @property
    def rounded(self) -> bool:
        """Whether forwards are rounded to half precision."""
        return self.mixed_precision or rounds(base_of(self.model))

    def _summed(self, microbatches: list[MicroBatch]) -> Metrics:
        """Return the statistics of a minibatch, summed over its micro-batches and all processes."""
        # all measures are read at once, after the last backward pass, so that the device is waited for once
        stacked = [torch.stack(list(measures.values())) for *_, measures in microbatches]
        numbers = iter(torch.cat(stacked).tolist() if stacked else [])
        sums: Metrics = {}
        for rows, logprobs, measures in microbatches:
            for key in measures:
                sums[key] = sums.get(key, 0.0) + next(numbers)
            if not math.isfinite(sums["loss"]):
                self._report_not_finite(rows, logprobs, sums)
        total: Metrics = {}
        for part in distributed.all_gather(sums):
            for key, number in part.items():
                total[key] = total.get(key, 0.0) + number
        return total

    def _report_not_finite(self, rows: TokenBatch, logprobs: Tensor, sums: Metrics) -> NoReturn:
        """Raise an error that names the rows with a non-finite log-probability or advantage, or what made the loss."""
        spread = _scatter(logprobs, rows, torch.arange(len(rows)))
        self._check_finite(rows, {"log-probability": spread, "advantage": rows.advantages})
        by = "" if math.isfinite(sums["policy_loss"]) else f" by objective {self.args.objective}"
        raise NonFiniteError(f"policy {self.name!r}: the loss{by} is {sums['loss']} on {'; '.join(rows.labels[:4])}")

    def _zero_loss(self, device: torch.device, critic_only: bool) -> Tensor:
        """Return a loss of 0 through everything that is trained."""
        # a process without further micro-batches needs it, because sharded processes must run equally many forwards,
        # and reduce the gradients of the same parameters
        out = self.forward(placeholder(device, critic_only))
        policy = torch.zeros((), device=device) if critic_only else out.logprobs.sum()
        return 0.0 * (policy if out.values is None else policy + out.values.sum())

    def step(self) -> float:
        """Clip this policy's gradients, step its optimizer and clear the gradients.

        Returns:
            The gradient norm before clipping.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite. The weights are unchanged.
        """
        return self.trained.step()

    def save(self, folder: Path) -> None:
        """Save the policy as a plain ``from_pretrained`` folder, with its tokenizer, and its critic in a folder of it.

        The weights must be whole: the caller is inside of ``strategy.whole()``.
        """
        self.policy.save(folder)
        self.critic.save(folder)

    def load(self, folder: Path) -> None:
        """Load what :meth:`save` wrote. All processes call this together.

        Raises:
            CheckpointError: a file cannot be read, or it is not of this learner.
        """
        load_everywhere(self.model, self.adapter, folder)
        self.critic.load(folder)

    def try_saving(self) -> None:
        """Save everything but weights, as a checkpoint will, into a folder that is removed.

        Raises:
            ValueError: the policy or its critic cannot be saved.
        """
        try_saving(f"policy {self.name!r}", self.model, self.adapter, self.tokenizer)
        if self.critic.model is not None:
            try_saving(f"the value model of policy {self.name!r}", self.critic.model)

    def _check_vocabulary(self, rows: TokenBatch) -> None:
        """Check that the other models that read the policy's ids have them: the value model and the reference."""
        read = rows if rows.critic is None else rows.critic
        readers = [("value model", self.critic.model, read)]
        if self.args.kl_coef != 0:
            readers.append(("reference", self.reference, rows))
        for name, model, ids in readers:
            if model is None or not len(rows):
                continue
            if why := beyond(model, int(ids.input_ids.max()), max(ids.tree.lengths)):
                raise ValueError(
                    f"policy {self.name!r}: {name}: {why}; pass a {name} with the policy's tokenizer and a context as "
                    "long, or lower response_length"
                )

    def _check_finite(self, rows: TokenBatch, named: dict[str, Tensor]) -> None:
        for what, values in named.items():
            bad = (~torch.isfinite(values)).any(1)
            if bool(bad.any()):
                labels = [label for label, is_bad in zip(rows.labels, bad.tolist(), strict=True) if is_bad]
                raise NonFiniteError(f"policy {self.name!r}: a {what} is not finite at {'; '.join(labels[:4])}")


def check_mixed_precision(given: str) -> bool:
    """Return whether the run uses mixed precision in bfloat16, from accelerate's ``mixed_precision``.

    Raises:
        ValueError: it is another kind of mixed precision.
    """
    if given not in ("no", "bf16"):
        raise ValueError(f"mixed_precision: expected 'no' or 'bf16', got {given!r}; change it for the launcher")
    return given == "bf16"


def _scatter(flat: Tensor, rows: TokenBatch, order: Tensor) -> Tensor:
    """Put the values [M] of the sampled tokens of ``rows``, in ``order`` [N], back to [N, T], with zeros elsewhere."""
    row, column = rows.take(order).sampled
    full = flat.new_zeros(rows.sampled_mask.shape)
    full[order.to(row.device)[row], column] = flat
    return full


def _is_quantized(module: Any) -> bool:
    return getattr(module, "is_quantized", False)  # transformers sets it on quantised models only


def _check_device(name: str, model: Any, device: torch.device) -> None:
    """Check that a quantised model is on its ``device``, because it stays where it was loaded."""
    actual = base_of(model).device
    if (actual.type, actual.index or 0) != (device.type, device.index or 0):
        raise ValueError(
            f"policy {name!r}: its quantised weights are on {actual} and cannot move, and it is trained on {device}; "
            f"load its model with device_map={{'': '{device}'}}"
        )
