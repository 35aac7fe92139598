"""Writes an optimizer as versions before its shards did: whole tensors by the index of their parameter."""

import json
import shutil

import torch
from safetensors.torch import save_file


def write_whole_tensors(optimizer, folder, **more):
    """Write ``optimizer.safetensors`` and ``optimizer.json`` into ``folder``, which loses its folder ``optimizer``."""
    shutil.rmtree(folder / "optimizer")
    content, tensors, numbers = optimizer.state_dict(), {}, {}
    for index, entries in content["state"].items():
        for key, value in entries.items():
            where = tensors if isinstance(value, torch.Tensor) else numbers
            where[f"{index}.{key}"] = value
    save_file(tensors, folder / "optimizer.safetensors")
    record = {"numbers": numbers, "groups": content["param_groups"], **more}
    (folder / "optimizer.json").write_text(json.dumps(record))
