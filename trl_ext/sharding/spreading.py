"""Bring a model's weights from the main process to the devices of all processes, part by part.

A machine with eight processes would otherwise hold each model eight times in main memory. The other processes may hold
a model on the meta device, without any memory, until they receive their part of it.
"""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from trl_ext.process import distributed


def place(module: nn.Module, device: torch.device) -> None:
    """Move a whole ``module`` to ``device``. If a process has it on the meta device, all receive the main process's.

    All processes call this together.
    """
    empty = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if distributed.all_reduce_max(int(empty), device):
        spread(module.modules(), device)
    else:
        module.to(device)


Received = dict[int, nn.Parameter]
"""Parameters on their device by the ``id`` of those that they replace."""


def spread(
    modules: Iterable[nn.Module],
    device: torch.device,
    masters: Collection[int] = (),
    received: Received | None = None,
) -> None:
    """Give the tensors of ``modules`` the main process's values on ``device``. Their children are left as they are.

    One tensor is sent at a time. All processes call this together. Parameters that are on the meta device are replaced,
    and those that share weights still share them afterwards.

    Args:
        modules: the modules, in the same order in every process.
        device: where the tensors go.
        masters: the ``id`` of each parameter that becomes float32.
        received: what earlier calls for the same model have received. It is added to.
    """
    received = {} if received is None else received
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in received:
                value = _from_main(parameter.detach(), device)
                value = value.float() if id(parameter) in masters else value
                if parameter.is_meta:
                    received[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                else:
                    parameter.data = value
                    received[id(parameter)] = parameter
            setattr(module, name, received[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, _from_main(buffer, device))


def parts(root: nn.Module, kinds: Collection[str]) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield every module whose class is named in ``kinds``, and at last ``root``, each with the modules that it owns.

    These are its own submodules and itself, without those of a part that came before.
    """
    taken: set[int] = set()
    for module in [*(m for m in list(root.modules()) if type(m).__name__ in kinds), root]:
        owned = [part for part in module.modules() if id(part) not in taken]
        taken |= set(map(id, owned))
        yield module, owned


def _from_main(value: Tensor, device: torch.device) -> Tensor:
    """Return the main process's ``value`` on ``device``. It is a new tensor unless it was there."""
    if value.is_meta and device.type != "meta" and distributed.rank() == 0:
        raise distributed.WorldError("a model's weights are on the meta device in the main process; load them there")
    tensor = torch.empty_like(value, device=device) if value.is_meta else value.to(device).contiguous()
    distributed.broadcast_weights([tensor])
    return tensor
