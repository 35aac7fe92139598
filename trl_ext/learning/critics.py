"""Critics: where the values of a policy's tokens come from. A new critic is a class here and a place in ``CRITICS``."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from trl_ext.errors import retold
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.policy import Policy, load_everywhere, save_weights
from trl_ext.models.adapters import adapter_parameters, copy_adapter
from trl_ext.models.forward import base_of, head_width, states_of
from trl_ext.models.randomness import recomputes
from trl_ext.models.weights import WeightsError, load_tensors
from trl_ext.ppo.batch import TokenBatch
from trl_ext.ppo.options import PPOOptions
from trl_ext.ppo.value_bins import ValueBins


class ValueHead(nn.Module):
    """The linear map ``V = W h + b`` in float32, whatever the precision of the hidden states.

    It may have several outputs, for example one for each turn. It starts at zero, so that the first advantages are the
    returns rather than noise. With ``value_loss: hl_gauss`` each output is the logits of ``bins`` bins, and the first
    values are the middle of their range.
    """

    def __init__(self, hidden_size: int, outputs: int = 1, args: PPOOptions | None = None):
        super().__init__()
        bins = None if args is None else ValueBins.of(args)
        self.bins = 1 if bins is None else bins.count
        self.linear = nn.Linear(hidden_size, outputs * self.bins, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor, output: Tensor | None = None) -> Tensor:
        """Return the values [M] of hidden states [M, H], or their logits [M, B] over B bins.

        ``output`` [M] picks each row's output, such as its turn. By default output 0 is taken.
        """
        with torch.autocast(hidden.device.type, enabled=False):  # ZeRO-3 keeps the weights in the model's dtype
            values = linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())
        if self.bins > 1:
            values = values.view(len(hidden), -1, self.bins)
        if output is None:
            return values[:, 0]
        return values[torch.arange(len(hidden), device=output.device), output]


def attention_of(named: Mapping[str, nn.Parameter], where: str) -> list[nn.Parameter]:
    """Return those of a critic's trained parameters that belong to attention, which ``critic_freeze`` leaves as they
    are.

    Args:
        named: what a critic's trunk trains, by names that say the module, as ``layers.0.self_attn.q_proj.weight``.
        where: the critic, in errors.

    Raises:
        ValueError: none of them belongs to attention, or all do.
    """
    inside = re.compile(r"(attn|attention)(?!.*norm)", re.IGNORECASE)
    attention = [p for name, p in named.items() if any(inside.search(part) for part in name.split(".")[:-1])]
    if not attention:
        raise ValueError(
            f"{where}: critic_freeze: attention found no attention among what it trains, such as "
            f"{next(iter(named), None)!r}; remove critic_freeze"
        )
    if len(attention) == len(named):
        raise ValueError(
            f"{where}: critic_freeze: attention would leave nothing but the head to learn; name MLP modules in the "
            "adapter's target_modules too, or remove critic_freeze"
        )
    return attention


def freeze_attention(model: nn.Module, where: str) -> None:
    """Let the attention of a critic's trunk learn nothing (:func:`attention_of`)."""
    for parameter in attention_of({n: p for n, p in model.named_parameters() if p.requires_grad}, where):
        parameter.requires_grad_(False)


CRITIC = "critic"
"""The folder in a policy's folder that holds its critic. vLLM takes every safetensors file beside a model for its
weights."""
HEAD = "value_head.safetensors"


class Critic:
    """The critic of one policy. Its parts are None where it has none of them.

    Args:
        policy: the policy.
        args: the options.
        outputs: the number of outputs, such as one for each turn.
        value_model: a separate critic, if the caller has one.
        central_values: the function that returns a central critic's values of rows, if there is one.

    Raises:
        ValueError: the policy cannot have this critic, or ``value_model`` cannot be it.
    """

    kind: ClassVar[str]
    """Its name in options."""
    trunks: ClassVar[int] = 1
    """How many trunks a training forward runs, with the policy's."""
    gives_values: ClassVar[bool] = True

    model: Any = None
    """A trunk of its own."""
    adapter: str | None = None
    """A second adapter on the policy's trunk."""
    head: ValueHead | None = None

    def __init__(
        self,
        policy: Policy,
        args: PPOv2Config,
        outputs: int,
        value_model: nn.Module | None = None,
        central_values: Callable[[TokenBatch], Tensor] | None = None,
    ):
        self.policy, self.args, self.central_values = policy, args, central_values
        if (central_values is not None) != isinstance(self, CentralValues):
            raise ValueError(f"policy {policy.name!r}: critic 'central' and central_values go together; pass both")
        if args.critic_freeze != "none" and self.trunks == 1:
            raise ValueError(
                f"policy {policy.name!r}: critic_freeze: {args.critic_freeze} is for critics with a trunk of their "
                f"own, and critic {self.kind!r} has none; use critic: model, adapter or central, or remove it"
            )
        self.build(outputs, value_model)

    def build(self, outputs: int, value_model: Any) -> None:
        """Build the parts."""

    def values(self, rows: TokenBatch, hidden: Tensor) -> Tensor | None:
        """Return the values [M] at the sampled tokens of ``rows``, their logits [M, B], or None without a critic.

        ``hidden`` [M, H] are the hidden states of the policy's own forward there. A critic with other weights or
        another context runs its own forward, in the precision of the caller's autocast.
        """
        raise NotImplementedError

    def parameters(self) -> list[list[nn.Parameter]]:
        """Return what is trained, in groups. DeepSpeed flattens each group into one tensor of one dtype."""
        modules = [module for module in (self.model, self.head) if module is not None]
        return [[p for p in module.parameters() if p.requires_grad] for module in modules]

    def save(self, folder: Path) -> None:
        """Save the critic into the policy's ``folder``."""
        if (weights := self._weights()) is not None:
            save_weights(*weights, folder / CRITIC)
        if self.head is not None:
            (folder / CRITIC).mkdir(exist_ok=True)
            save_head(self.head, folder / CRITIC)

    def load(self, folder: Path) -> None:
        """Load the critic from the policy's ``folder``. All processes call this together.

        Raises:
            CheckpointError: a file cannot be read, or it is not of this critic.
        """
        if (weights := self._weights()) is not None:
            load_everywhere(*weights, folder / CRITIC)
        if self.head is not None:
            load_head(self.head, folder / CRITIC)

    def _weights(self) -> tuple[Any, str | None] | None:
        """Return the model, and its adapter, with the critic's own weights below the head."""
        return None

    def _head_of(self, hidden: Tensor, rows: TokenBatch) -> Tensor:
        assert self.head is not None
        return self.head(hidden, rows.head[rows.sampled[0]])


class HeadCritic(Critic):
    """A float32 linear head on the policy's own trunk."""

    kind = "head"

    def build(self, outputs: int, value_model: Any) -> None:
        self.head = ValueHead(head_width(self.policy.model), outputs, self.args)

    def values(self, rows: TokenBatch, hidden: Tensor) -> Tensor:
        detached = self.args.detach_critic or rows.critic_only
        if rows.critic is not None:
            with self.policy.active(), torch.no_grad() if detached else nullcontext():
                hidden = states_of(self.policy.model, rows)
        return self._head_of(hidden.detach() if detached else hidden, rows)


class AdapterCritic(Critic):
    """A second adapter on the policy's trunk, with a head."""

    kind, trunks = "adapter", 2

    def build(self, outputs: int, value_model: Any) -> None:
        """Add the adapter and the head.

        Raises:
            ValueError: the policy has no adapter, or recomputes activations.
        """
        policy = self.policy
        if not isinstance(policy.model, PeftModel):
            raise ValueError(f"policy {policy.name!r}: critic 'adapter' needs a PEFT model; use 'head', or add a LoRA")
        if self.args.gradient_checkpointing or recomputes(base_of(policy.model)):
            raise ValueError(
                f"policy {policy.name!r}: critic 'adapter' with gradient_checkpointing would recompute activations "
                "under the wrong adapter; use critic 'head', or turn gradient_checkpointing off, in the arguments and "
                "by model.gradient_checkpointing_disable()"
            )
        self.adapter = f"{policy.adapter}_critic"
        copy_adapter(policy.model, policy.adapter, self.adapter, trainable=True)
        if self.args.critic_freeze == "attention":
            policy.freeze(attention_of(self._trained(), f"policy {policy.name!r}: critic 'adapter'"))
        self.head = ValueHead(head_width(policy.model), outputs, self.args)

    def values(self, rows: TokenBatch, hidden: Tensor) -> Tensor:
        with self.policy.active(self.adapter):
            hidden = states_of(self.policy.model, rows)
        return self._head_of(hidden, rows)

    def parameters(self) -> list[list[nn.Parameter]]:
        return [*super().parameters(), list(self._trained().values())]

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return what the adapter trains, by name."""
        with self.policy.active(self.adapter):  # PEFT trains what it trains while the adapter is active
            named = adapter_parameters(self.policy.model, str(self.adapter))
            trained = {name: p for name, p in named.items() if p.requires_grad}
        with self.policy.active():
            return trained

    def _weights(self) -> tuple[Any, str | None]:
        return self.policy.model, self.adapter


class ModelCritic(Critic):
    """A separate trunk with a head: ``value_model``, which may be a sequence classifier, or a copy of the policy."""

    kind, trunks = "model", 2

    def build(self, outputs: int, value_model: Any) -> None:
        """Take or copy the model, and add a head if it has none.

        Raises:
            ValueError: ``value_model`` has another head than one ``score`` with ``outputs`` outputs.
        """
        name = self.policy.name
        self.model = self._copied() if value_model is None else value_model
        if self.args.critic_freeze == "attention":
            freeze_attention(self.model, f"policy {name!r}: critic 'model'")
        if not hasattr(self.model, "score"):
            if "Classification" in type(base_of(self.model)).__name__:
                raise ValueError(
                    f"policy {name!r}: value_model: {type(base_of(self.model)).__name__} has a head of another name "
                    "than 'score', which would not be read; pass its transformer, a language model, or an architecture "
                    "whose classifier has a score"
                )
            self.head = ValueHead(head_width(self.model), outputs, self.args)
        elif self.model.config.num_labels != (needed := self._labels(outputs)):
            raise ValueError(
                f"policy {name!r}: value_model has {self.model.config.num_labels} outputs for each token, and the "
                f"critic needs {needed}; load it with num_labels={needed}"
            )

    def _labels(self, outputs: int) -> int:
        """Return the outputs that a classifier has for each token: one value, or the logits of its bins."""
        bins = ValueBins.of(self.args)
        return outputs if bins is None else outputs * bins.count

    def _copied(self) -> Any:
        with self.policy.active():
            copied = self.policy.copied_model()
        if isinstance(copied, PeftModel):
            for other in set(copied.peft_config) - {self.policy.adapter}:
                copied.delete_adapter(other)
        return copied

    def values(self, rows: TokenBatch, hidden: Tensor) -> Tensor:
        hidden = states_of(self.model, rows)
        if self.head is not None:
            return self._head_of(hidden, rows)
        with torch.autocast(hidden.device.type, enabled=False):
            return base_of(self.model).score(hidden).squeeze(-1).float()

    def _weights(self) -> tuple[Any, str | None]:
        return self.model, self.model.active_adapter if isinstance(self.model, PeftModel) else None


class CentralValues(Critic):
    """A critic that several policies share. It learns for itself, so each policy only adds gradients to it."""

    kind, trunks = "central", 2

    def values(self, rows: TokenBatch, hidden: Tensor) -> Tensor:
        assert self.central_values is not None
        return self.central_values(rows)


class NoCritic(Critic):
    """No critic."""

    kind, gives_values = "none", False

    def values(self, rows: TokenBatch, hidden: Tensor) -> None:
        return None


CRITICS: dict[str, type[Critic]] = {
    critic.kind: critic for critic in (HeadCritic, AdapterCritic, ModelCritic, CentralValues, NoCritic)
}
"""Critics by the value of the option ``critic``."""


def save_head(head: nn.Module, folder: Path) -> None:
    """Save a critic's head in ``folder``."""
    save_file({key: value.contiguous() for key, value in head.state_dict().items()}, folder / HEAD)


def load_head(head: nn.Module, folder: Path) -> None:
    """Load the critic's head that was saved in ``folder``.

    Raises:
        CheckpointError: it cannot be read, or it is not a head of this shape.
    """
    with retold(WeightsError, lambda error: CheckpointError(str(error)), cause=True):
        load_tensors(head, folder / HEAD)
