"""A learner holds one policy and everything that trains it: critic, reference, optimizer, scheduler.

``PPOv2Trainer`` has one learner; ``maporl.MultiAgentPPOTrainer`` has one per policy. Several learners may live on one
base model, each with its own adapter.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel, get_scheduler
from trl.trainer import disable_dropout_in_model

from trl_ext import maths
from trl_ext.chat import Tokenizer
from trl_ext.losses import Totals, micro_batch_loss
from trl_ext.measures import Metrics
from trl_ext.objectives import OBJECTIVES, Objective
from trl_ext.ppov2_config import PPOv2Config
from trl_ext.rows import TokenRows
from trl_ext.value_head import ValueHead

CRITICS = ("head", "adapter", "model", "none")


class NonFiniteError(RuntimeError):
    """A reward, log-probability, value or loss was NaN or infinite; the last checkpoint is untouched."""


@dataclass
class PolicyOutput:
    """What one forward says of the M action tokens of some rows, in row-major order: each [M]."""

    logprobs: Tensor
    values: Tensor | None
    entropies: Tensor | None


def base_of(model: Any) -> Any:
    """The Hugging Face model itself: PEFT injects its layers in place, so calling the base runs the active adapter."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trunk_of(model: Any) -> nn.Module:
    """The transformer below the head, which returns hidden states."""
    base = base_of(model)
    return getattr(base, base.base_model_prefix)


@contextmanager
def _head_sees_only(head: nn.Module, keep: Tensor) -> Iterator[dict[str, Tensor]]:
    """Let the output head of a model see only the hidden states at ``keep`` [N, T], as one row [1, M, H].

    The model's own forward then does whatever else it does to logits (soft caps, scales), and logits of the whole
    vocabulary exist only for tokens that are trained on. Yields a dict that receives ``hidden`` [M, H].
    """
    seen: dict[str, Tensor] = {}

    def select(_module, arguments):
        seen["hidden"] = arguments[0][keep]
        return (seen["hidden"].unsqueeze(0), *arguments[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


class Learner:
    """One policy with its critic, reference, optimizer and scheduler.

    Args:
        name: names the policy in metrics, errors and checkpoints.
        model: a causal language model, or a ``PeftModel`` (possibly shared between learners).
        tokenizer: the policy's own tokenizer.
        args: the options; ``learning_rate`` may be overridden for this policy.
        critic: ``head`` (float32 linear head on the policy's own trunk), ``adapter`` (a second adapter on the same
            trunk, with a head), ``model`` (a trunk of its own, ``value_model`` or a copy) or ``none``.
        adapter: the adapter of ``model`` to train; needed where it has several.
        reference: ``None`` means adapters off for a ``PeftModel``, else a frozen copy (none at ``kl_coef`` 0).
        outputs: number of critic outputs (one per turn where asked).
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel | PeftModel,
        tokenizer: Tokenizer,
        args: PPOv2Config,
        *,
        critic: str = "head",
        value_model: nn.Module | None = None,
        adapter: str | None = None,
        reference: nn.Module | None = None,
        ref_adapter: str | None = None,
        outputs: int = 1,
        learning_rate: float | None = None,
    ):
        if critic not in CRITICS:
            raise ValueError(f"policy {name!r}: critic must be one of {', '.join(CRITICS)}, got {critic!r}")
        if critic == "adapter" and not isinstance(model, PeftModel):
            raise ValueError(f"policy {name!r}: critic 'adapter' needs a PEFT model; use 'head', or add a LoRA")
        if critic == "adapter" and args.gradient_checkpointing:
            raise ValueError(
                f"policy {name!r}: critic 'adapter' with gradient_checkpointing would recompute activations under the "
                "wrong adapter; use critic 'head' or turn gradient_checkpointing off"
            )
        self.name, self.tokenizer, self.args = name, tokenizer, args
        self._trainable: list[nn.Parameter] = []
        self.model: Any = model
        self.critic, self.ref_adapter = critic, ref_adapter
        self.adapter: Any = (adapter or model.active_adapter) if isinstance(model, PeftModel) else None
        self.learning_rate = args.learning_rate if learning_rate is None else learning_rate
        _quiet_dropout(model)
        self.value_model: Any = self._build_value_model(value_model)
        self.value_head = self._build_value_head(outputs)
        self.reference = self._build_reference(reference)
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._accelerator: Any = None
        self._first: tuple[TokenRows, PolicyOutput] | None = None
        self.critic_only = False
        """While true, the policy keeps its weights and only the critic learns (warm-up)."""
        if args.objective not in OBJECTIVES:
            raise ValueError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {args.objective!r}")
        self.objective: Objective = OBJECTIVES[args.objective]

    # -- building -------------------------------------------------------------------------------------------------

    def _build_value_model(self, value_model: Any) -> nn.Module | None:
        if self.critic != "model":
            return None
        if value_model is None:
            with self.active():
                value_model = copy.deepcopy(self.model)
            if isinstance(value_model, PeftModel):
                for other in set(value_model.peft_config) - {self.adapter}:
                    value_model.delete_adapter(other)
        _quiet_dropout(value_model)
        return value_model

    def _build_value_head(self, outputs: int) -> ValueHead | None:
        if self.critic == "none":
            return None
        if self.critic == "adapter":
            self.critic_adapter = f"{self.adapter}_critic"
            if self.critic_adapter not in self.model.peft_config:
                self.model.add_adapter(self.critic_adapter, copy.deepcopy(self.model.peft_config[self.adapter]))
        trunk = self.model if self.value_model is None else self.value_model
        if hasattr(trunk, "score"):  # a sequence-classification model brings its own head
            return None
        return ValueHead(trunk.config.get_text_config().hidden_size, outputs)

    def _build_reference(self, reference: nn.Module | None) -> nn.Module | None:
        if reference is None and not isinstance(self.model, PeftModel) and self.args.kl_coef != 0:
            reference = copy.deepcopy(self.model)
        if reference is not None:
            if reference is self.model:
                raise ValueError(
                    f"policy {self.name!r}: the reference is the policy itself; pass a separate copy, or None to have "
                    "one made"
                )
            reference.requires_grad_(False).eval()
        return reference

    def prepare(self, accelerator, updates: int, optimizer=None, scheduler=None) -> None:
        """Move to the device and make the optimizer and its schedule over ``updates`` updates."""
        self._accelerator = accelerator
        for module in (self.model, self.value_model, self.value_head, self.reference):
            if module is not None and not getattr(module, "is_quantized", False):
                module.to(accelerator.device)
        if self.args.gradient_checkpointing:
            kwargs = self.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
            for module in filter(None, (self.model, self.value_model)):
                base_of(module).gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
                base_of(module).enable_input_require_grads()
                base_of(module).train()  # transformers recomputes in training mode only; dropout is off everywhere
        with self.active():
            groups = self._parameter_groups()
        self._trainable = [p for group in groups for p in group["params"]]
        if optimizer is None:
            args = self.args
            optimizer = torch.optim.AdamW(
                groups,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
                fused=True,
            )
        self.optimizer = optimizer
        self.scheduler = scheduler or get_scheduler(
            self.args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=self.args.get_warmup_steps(updates),
            num_training_steps=updates,
            scheduler_specific_kwargs=cast(Any, self.args.lr_scheduler_kwargs) or None,
        )

    def _parameter_groups(self) -> list[dict]:
        named = list(self.model.named_parameters())
        policy = [p for n, p in named if p.requires_grad and (self.adapter is None or f".{self.adapter}." in n)]
        critic = [
            p for m in (self.value_model, self.value_head) if m is not None for p in m.parameters() if p.requires_grad
        ]
        if self.critic == "adapter":
            critic += [p for n, p in named if f".{self.critic_adapter}." in n]
        if not policy:
            raise ValueError(f"policy {self.name!r}: no parameter requires a gradient; load the adapter as trainable")
        groups = [{"params": policy, "lr": self.learning_rate}]
        if critic:
            rate = self.args.value_learning_rate
            groups.append({"params": critic, "lr": self.learning_rate if rate is None else rate})
        return groups

    # -- which adapter is on --------------------------------------------------------------------------------------

    @contextmanager
    def active(self, adapter: str | None = None) -> Iterator[Any]:
        """The Hugging Face model with this policy's adapter (or another of the same base) switched on."""
        wanted = adapter or self.adapter
        if wanted is not None and self.model.active_adapters != [wanted]:
            self.model.set_adapter(wanted)
            # PEFT lets only the active adapter learn; this learner's critic adapter learns in the same backward
            for parameter in self._trainable:
                parameter.requires_grad_(True)
        yield base_of(self.model)

    @contextmanager
    def reference_model(self) -> Iterator[Any]:
        """The weights this policy started from: a frozen copy, another adapter, or the base with adapters off."""
        if self.reference is not None:
            yield base_of(self.reference)
        elif self.ref_adapter is not None:
            with self.active(self.ref_adapter) as model:
                yield model
        elif isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                yield base_of(self.model)
        else:
            raise ValueError(
                f"policy {self.name!r}: no reference is kept, because all weights train and kl_coef is 0; set kl_coef "
                "above 0, or train a LoRA"
            )

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, rows: TokenRows, entropies: bool = False) -> PolicyOutput:
        """Log-probabilities and values of the action tokens of ``rows``, under the current weights."""
        read, keep = rows.predicting()
        targets = rows.input_ids[rows.action_mask]
        with self.active() as model:
            logits, hidden = _token_logits(model, read, keep, self._autocast)
        temperature = self.args.temperature
        logprobs = maths.token_logprobs(logits, targets, temperature)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.args.entropy_coef != 0):
            entropy = maths.token_entropies(logits, temperature) if entropies else None
        return PolicyOutput(logprobs, self._values(rows, hidden), entropy)

    def _values(self, rows: TokenRows, hidden: Tensor) -> Tensor | None:
        if self.critic == "none":
            return None
        read, keep = (rows.critic or rows).predicting()
        if self.critic == "head" and rows.critic is None:
            hidden = hidden.detach() if self.args.detach_critic or self.critic_only else hidden
        else:
            hidden = self._critic_states(read, keep)
        if self.value_head is None:
            return base_of(self.value_model).score(hidden).squeeze(-1).float()
        heads = rows.head.unsqueeze(1).expand_as(keep)[keep]
        return self.value_head(hidden, heads)

    def _critic_states(self, read: Tensor, keep: Tensor) -> Tensor:
        """Hidden states [M, H] of a forward of the critic's own: other weights, or other words than the policy's."""
        adapter = self.critic_adapter if self.critic == "adapter" else None
        apart = self.critic == "head" and (self.args.detach_critic or self.critic_only)
        detached = torch.no_grad() if apart else nullcontext()
        with self.active(adapter) if self.value_model is None else nullcontext(), self._autocast(), detached:
            trunk = trunk_of(self.model if self.value_model is None else self.value_model)
            return trunk(input_ids=read, use_cache=False).last_hidden_state[keep]

    def reference_logprobs(self, rows: TokenRows) -> Tensor:
        """Log-probabilities [M] of the action tokens under the reference, at the same temperature."""
        with self.reference_model() as model:
            logits, _ = _token_logits(model, *rows.predicting(), self._autocast)
        return maths.token_logprobs(logits, rows.input_ids[rows.action_mask], self.args.temperature)

    def _autocast(self):
        return self._accelerator.autocast() if self._accelerator is not None else nullcontext()

    @torch.no_grad()
    def annotate(self, rows: TokenRows) -> dict[str, float]:
        """Fill in ``logprobs``, ``values`` and ``ref_logprobs`` under the weights that sampled; returns statistics.

        The forward is the one of training, so that the first ratio of the first minibatch is 1. Where one forward holds
        all rows, it is kept, graph and all, and the first step of the update does not repeat it.
        """
        args = self.args
        largest = min(args.per_device_train_batch_size, args.local_rollout_forward_batch_size)
        keep = args.num_mini_batches == 1 and len(rows) <= largest and not args.gradient_checkpointing
        self._first = None
        logprobs, values, references, entropies = [], [], [], []
        order = rows.by_length()
        for part in order.split(self.args.local_rollout_forward_batch_size):
            piece = rows.take(part)
            with torch.set_grad_enabled(keep):
                out = self.forward(piece, entropies=True)
            self._first = (rows, out) if keep else None
            logprobs.append(out.logprobs.detach())
            entropies.append(cast(Tensor, out.entropies).detach())
            values.append(torch.zeros_like(logprobs[-1]) if out.values is None else out.values.detach())
            references.append(self.reference_logprobs(piece) if args.kl_coef != 0 else logprobs[-1])
        rows.logprobs = _scatter(torch.cat(logprobs), rows.action_mask, order)
        rows.values = _scatter(torch.cat(values), rows.action_mask, order)
        rows.ref_logprobs = _scatter(torch.cat(references), rows.action_mask, order)
        self._check_finite(rows, {"log-probability": rows.logprobs, "value": rows.values})
        return {"policy/entropy_avg": float(torch.cat(entropies).mean())}

    # -- learning -------------------------------------------------------------------------------------------------

    def accumulate(self, rows: TokenRows, index: Tensor) -> dict[str, float]:
        """Add the gradient of the PPO loss over the minibatch ``index`` (token mean), in micro-batches; statistics.

        Micro-batches are weighted by their tokens, so the result does not depend on how a minibatch is cut.
        """
        args = self.args
        totals = Totals.of(rows, index, args)
        sums: Metrics = {}
        first, self._first = self._first, None
        whole = first is not None and first[0] is rows and len(index) == len(rows)
        for part in rows.by_length(None if whole else index).split(args.per_device_train_batch_size):
            piece = rows.take(part)
            out = first[1] if whole and first is not None else self.forward(piece, entropies=args.entropy_coef != 0)
            loss, measures = micro_batch_loss(piece, out, totals, args, self.objective, self.critic_only)
            if not bool(torch.isfinite(loss)):
                self._check_finite(
                    piece,
                    {
                        "log-probability": _scatter(out.logprobs.detach(), piece.action_mask),
                        "advantage": piece.advantages,
                    },
                )
                raise NonFiniteError(
                    f"policy {self.name!r}: the loss is {float(loss)} on rows {'; '.join(piece.labels[:4])}"
                )
            with self.active():  # the adapter must stay on until backward has recomputed what it needs
                self._accelerator.backward(loss) if self._accelerator is not None else loss.backward()
            for key, value in measures.items():
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def step(self) -> float:
        """Clip this policy's gradients, step its optimizer, clear; returns the gradient norm before clipping."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        largest = self.args.max_grad_norm if self.args.max_grad_norm and self.args.max_grad_norm > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, largest))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"policy {self.name!r}: the gradient norm is {norm}; no step was taken")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_finite(self, rows: TokenRows, named: dict[str, Tensor]) -> None:
        for what, values in named.items():
            bad = (~torch.isfinite(values)).any(1)
            if bool(bad.any()):
                labels = [label for label, is_bad in zip(rows.labels, bad.tolist(), strict=True) if is_bad]
                raise NonFiniteError(f"policy {self.name!r}: a {what} is not finite at {'; '.join(labels[:4])}")


def starting_point(model: Any, adapter: str) -> str | None:
    """The name of a frozen copy of ``adapter`` as it is now, to serve as a reference; None where adapters off do.

    A fresh LoRA changes nothing (its B matrices are 0), so the model without it is where its training starts. One that
    is loaded or warm-started does.
    """
    weights = get_peft_model_state_dict(model, adapter_name=adapter)
    if all(not bool(w.any()) for name, w in weights.items() if "lora_B" in name or "lora_embedding_B" in name):
        return None
    name = f"{adapter}_start"
    kept = list(model.active_adapters)
    model.add_adapter(name, copy.deepcopy(model.peft_config[adapter]))
    set_peft_model_state_dict(model, weights, adapter_name=name)
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." in parameter_name:
            parameter.requires_grad_(False)
    model.set_adapter(kept[0])
    return name


def _token_logits(model: Any, input_ids: Tensor, keep: Tensor, autocast) -> tuple[Tensor, Tensor]:
    """Logits [M, V] and hidden states [M, H] at the positions ``keep`` [N, T]."""
    with _head_sees_only(model.get_output_embeddings(), keep) as seen, autocast():
        logits = model(input_ids=input_ids, use_cache=False).logits[0]
    return logits, seen["hidden"]


def _scatter(flat: Tensor, mask: Tensor, order: Tensor | None = None) -> Tensor:
    """[M] back to [N, T], zeros elsewhere; the rows of ``flat`` came in ``order`` (default: as they stand)."""
    order = torch.arange(mask.shape[0], device=mask.device) if order is None else order
    full = torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device)
    sorted_rows = torch.zeros_like(full)
    sorted_rows[mask[order]] = flat
    full[order] = sorted_rows
    return full


def _quiet_dropout(model: nn.Module) -> None:
    """No dropout anywhere: a ratio between two forwards must come from the weights alone."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
