"""How processes hold a learner's weights, gradients and optimizer state: the launcher's configuration decides.

A DeepSpeed configuration of accelerate means :class:`trl_ext.sharding.zero.Zero`, an FSDP configuration
:class:`trl_ext.sharding.fsdp.Sharded`, and neither :class:`trl_ext.sharding.holder.Holder`.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.sharding.fsdp import FSDP_TORCH, Sharded
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.zero import Zero


def build_optimizer(groups: list[dict], args: Any, kind: type[Holder]) -> torch.optim.Optimizer:
    """Build the optimizer ``args.optim`` over the parameter ``groups``.

    The names are those of ``transformers.training_args.OptimizerNames``.

    Raises:
        ValueError: the strategy ``kind`` cannot shard this optimizer's state.
    """
    if kind.sharded and args.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise ValueError(f"optim: {args.optim.value!r} has a state that {kind.__name__} cannot shard; use adamw_torch")
    from transformers import Trainer  # it imports datasets, which takes half a second

    optimizer, options = Trainer.get_optimizer_cls_and_kwargs(args)
    return optimizer(groups, **(options | {"weight_decay": args.weight_decay}))


def decayed(groups: list[dict], models: Iterable[nn.Module], weight_decay: float) -> list[dict]:
    """Return parameter ``groups`` of ``models``, cut into those that weight decay shrinks and those that it does not.

    It does not shrink norms and biases, by the names that ``transformers.Trainer`` leaves out.

    Without weight decay the groups stay whole.
    """
    if not weight_decay:
        return groups
    from transformers import Trainer

    shrunk: set[int] = set()
    for model in models:
        names = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]  # it reads nothing of itself
        shrunk |= {id(parameter) for name, parameter in model.named_parameters() if name in names}
    cut = []
    for group in groups:
        for decay in (weight_decay, 0.0):
            some = [p for p in group["params"] if (id(p) in shrunk) == bool(decay)]
            cut += [{**group, "params": some, "weight_decay": decay}] if some else []
    return cut


def check_bases(models: dict[str, Any], accelerator: Any) -> None:
    """Check that no base model is shared by policies if weights are sharded.

    Raises:
        WorldError: two policies are adapters of one base, which each policy's strategy would shard.
    """
    owners: dict[int, list[str]] = {}
    for name, model in models.items():
        owners.setdefault(id(base_of(model)), []).append(name)
    shared = next((names for names in owners.values() if len(names) > 1), None)
    if shared and strategy_of(accelerator).sharded:
        raise distributed.WorldError(
            f"policies {' and '.join(map(repr, shared))} are adapters of one base, which "
            f"{strategy_of(accelerator).__name__} would shard once for each; start without DeepSpeed or FSDP (every "
            "process then holds the base, and only adapters have gradients), or give each policy a separate model"
        )


def strategy_of(accelerator: Any, environment: Any = os.environ) -> type[Holder]:
    """Return the strategy that the launcher was configured for.

    Raises:
        WorldError: the launcher asks for DeepSpeed, but accelerate has turned it off; or it asks for FSDP, and torch is
            too old.
    """
    state = getattr(accelerator, "state", None)
    wanted = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if getattr(state, "deepspeed_plugin", None) is not None:
        return Zero
    if wanted:
        raise distributed.WorldError(
            "the launcher asks for DeepSpeed, which accelerate turns off with use_cpu: true; set training.use_cpu: "
            "false (a machine without accelerators trains on its CPU anyway; DS_ACCELERATOR=cpu tells DeepSpeed)"
        )
    # accelerate drops its FSDP plugin on CPUs and replicates the weights, so its environment is asked
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if torch.__version__ < FSDP_TORCH:
            raise distributed.WorldError(
                f"FSDP2 needs torch {FSDP_TORCH} or newer, got {torch.__version__}: torch 2.8 trains weights that a "
                "model's input and output share to other values, and 2.6 and 2.7 fail; update torch, or use a "
                "DeepSpeed configuration"
            )
        return Sharded
    return Holder
