"""Liger's kernels for a model's norms, activations and rotations, on accelerators.

Outside of matrix products and attention a model of transformers makes many small operations that read and write all
activations. Each of these kernels does several of them at once. The kernels that take the place of the output head and
the loss are left out, because a policy's loss needs the log-probability of each token.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import TrainingArguments
from transformers.integrations.liger import apply_liger_kernel

from trl_ext.models.forward import base_of
from trl_ext.process.devices import accelerator

LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_liger(args: TrainingArguments) -> None:
    """Check before models load that ``args.use_liger_kernel`` can have an effect.

    Raises:
        ValueError: the package or an accelerator is missing, or ``liger_kernel_config`` asks for Liger's losses or is
            set without ``use_liger_kernel``.
    """
    config = args.liger_kernel_config or {}
    if not isinstance(config, dict):
        raise ValueError(f"liger_kernel_config: expected names of kernels with true or false, got {config!r}")
    if config and not args.use_liger_kernel:
        raise ValueError("liger_kernel_config: would do nothing without use_liger_kernel; set it, or leave both out")
    if wanted := sorted(name for name in LOSSES if config.get(name)):
        raise ValueError(
            f"liger_kernel_config: {', '.join(wanted)} would do nothing, because a policy's loss needs the "
            "log-probability of each token; leave it out: logits_chunk saves the memory of logits"
        )
    if args.use_liger_kernel and find_spec("liger_kernel") is None:
        raise ValueError("use_liger_kernel: the package liger-kernel is not installed; pip install liger-kernel")
    if args.use_liger_kernel and (args.use_cpu or accelerator() is None):
        raise ValueError("use_liger_kernel: its kernels run on accelerators only; leave it out on a CPU")


def use_liger(model: Any, config: dict[str, bool] | None) -> None:
    """Let ``model`` compute by Liger's kernels, which is done in place. It may have adapters.

    Liger also changes the architecture's module in transformers, for all models of the process. Classes are put back
    here. Functions, which the model calls by their names, go to Liger for tensors on an accelerator only, because
    models begin their lives on a CPU.

    Args:
        model: a model of transformers, with or without a PEFT wrapper.
        config: which kernels, by the names of Liger's functions. By default all but those of losses.

    Raises:
        ValueError: Liger has no kernels for the architecture.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = base_of(model).config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        kinds = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        lacking = f"Liger {version('liger-kernel')} has no kernels for {kind!r}"
        raise ValueError(f"use_liger_kernel: {lacking}; leave it out, or use one of: {kinds}")
    module = sys.modules[type(base_of(model)).__module__]
    before = dict(vars(module))
    apply_liger_kernel(model, LOSSES | (config or {}))
    for name, plain in before.items():
        kernel = getattr(module, name)
        if kernel is not plain:
            back = isinstance(plain, type | _OnAccelerators)
            setattr(module, name, plain if back else _OnAccelerators(kernel, plain))


@dataclass(frozen=True)
class _OnAccelerators:
    """A function of tensors that a kernel computes, if they are on an accelerator."""

    kernel: Callable[..., Any]
    plain: Callable[..., Any]

    def __call__(self, first: Tensor, *arguments: Any, **options: Any) -> Any:
        return (self.plain if first.device.type == "cpu" else self.kernel)(first, *arguments, **options)
