"""Read models, adapters and heads, and refuse weights that are not all there.

transformers and PEFT give random numbers to every tensor that a file lacks, and only warn. A damaged file would then be
evaluated, or trained on, as if it were the model. Code that comes with a model is never run.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import accelerate.utils.other
import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from trl_ext.errors import UserError, one_line, retold
from trl_ext.models.adapters import base_state, changes_base, fitted, initialisation, leave_meta, narrow_as_saved
from trl_ext.models.adapters import fault as adapter_fault
from trl_ext.models.attention import fault
from trl_ext.models.forward import base_of
from trl_ext.process import hub
from trl_ext.process.random_states import forked_rng, number_of

ADAPTER_OPTIONS, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_LAYERS = 1000
"""The largest models have about 130. Building millions of layers would take hours, before any weight is missed."""
MOST_LABELS = 100_000
"""Classifiers have a few, or tens of thousands. transformers makes a name for each before anybody can look at the
number."""
MOST_CONFIG_BYTES = 2**24
"""The ``config.json`` of a model with names for its labels and exceptions for its layers has a tenth of it."""
_LAYERS = re.compile(r"(?:num|n|encoder|decoder)_(?:\w+_)?layers?")
"""The keys with which a ``config.json`` sets a number of layers."""
SHOWN = 3
"""Most tensors that a message names."""


# accelerate asks of every model that is saved, or given to a Trainer, whether it is an engine of DeepSpeed. Where
# DeepSpeed is installed, it imports it to ask. That takes seconds and prints a warning on machines without a GPU. No
# model can be an engine before DeepSpeed is imported.
setattr(accelerate.utils.other, "is_deepspeed_available", lambda: "deepspeed" in sys.modules)  # noqa: B010


class WeightsError(UserError, ValueError):
    """Weights that cannot be read, or do not fit their model: some are missing, left over, misshapen or not finite."""


def _readable(source: str | Path) -> AbstractContextManager[None]:
    """Turn whatever a library raises for a damaged file into one line; that may be nearly every kind of error."""
    return retold(Exception, lambda error: WeightsError(_one_line(error, source)), but=WeightsError, cause=True)


def read_pretrained(kind: Any, source: str | Path, **options: Any) -> Any:
    """Return ``kind.from_pretrained(source)``: a configuration, a tokenizer, or what ``options`` ask for.

    No code from ``source`` is run. Without ``trust_remote_code=False``, transformers would ask on the terminal.

    Raises:
        WeightsError: it cannot be read, or its ``config.json`` is absurdly large (:func:`check_bounds`). The message is
            one line.
    """
    with _readable(source), hub.asking(source):
        if "config" not in options:
            check_bounds(source)
        return kind.from_pretrained(source, trust_remote_code=False, **options)


def check_bounds(source: str | Path) -> None:
    """Check that a model's ``config.json`` asks for nothing that takes minutes or all memory to read or to build.

    It is looked at before transformers reads it, which makes lists of as many labels and layers as the file says.

    Args:
        source: the folder, or the name on the hub. One without a ``config.json`` is not looked at.

    Raises:
        WeightsError: the file is larger than :data:`MOST_CONFIG_BYTES`, or it sets more than :data:`MOST_LABELS` labels
            or :data:`MOST_LAYERS` layers, at any depth.
        ValueError: it is not JSON.
        RecursionError: it nests too deeply.
    """
    file = _config_file(source)
    if file is None:
        return
    left = [_json_of(file, source)]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            for key, value in part.items():
                labels = len(value) if key in ("id2label", "label2id") and isinstance(value, dict) else 0
                if key in ("num_labels", "num_classes") and isinstance(value, int):
                    labels = value
                if labels > MOST_LABELS:
                    raise WeightsError(f"{source}: its config.json sets {key} to {labels:,}, more than {MOST_LABELS:,}")
                if isinstance(value, int) and value > MOST_LAYERS and _LAYERS.fullmatch(key):
                    raise WeightsError(f"{source}: its config.json sets {key}={value}; at most {MOST_LAYERS} are built")
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        left += [value for value in inner if isinstance(value, dict | list)]


def _json_of(file: Path, source: str | Path) -> Any:
    """Return the JSON value of a file that describes a model, which may be a stranger's."""
    size = file.stat().st_size
    if size > MOST_CONFIG_BYTES:
        raise WeightsError(f"{source}: its {file.name} has {size:,} bytes; at most {MOST_CONFIG_BYTES:,} are read")
    return json.loads(file.read_bytes())


def _config_file(source: str | Path) -> Path | None:
    """Return the ``config.json`` of a folder or of a name on the hub, or None where it cannot be had."""
    if Path(source).is_dir():
        file = Path(source) / "config.json"
        return file if file.is_file() else None
    try:
        with hub.asking(source):
            path = cached_file(str(source), "config.json", _raise_exceptions_for_missing_entries=False)
    except Exception:  # the hub does not have it or cannot be asked, which whoever reads the model says
        return None
    return None if path is None else Path(path)


def read_model(kind: Any, source: str | Path, new: str | None = None, **options: Any) -> Any:
    """Return the model in a folder or on the hub, after checking that the files hold exactly its tensors.

    Tied weights, and tensors that transformers itself knows to be superfluous, need no check.

    Args:
        kind: the class with ``from_pretrained``.
        source: the folder, or the name on the hub.
        new: the first part of the names of tensors that may be new, such as ``score`` for the head of a verifier that
            starts from a base model. The files may then also hold heads that this model lacks. None allows neither.
        options: further arguments of ``from_pretrained``. With ``config``, the folder's own ``config.json`` is not
            read.

    Raises:
        WeightsError: the model cannot be read, or tensors are missing, left over, misshapen or not finite.
    """
    asked = options.get("attn_implementation")
    if asked is not None and (why := fault(str(asked))):
        raise WeightsError(f"{source}: attn_implementation: {why}")
    if "config" not in options:
        _check_config(kind, source, chosen=asked is not None)
    # misshapen tensors are named here, and transformers would name them in its log only
    model, info = read_pretrained(
        kind, source, output_loading_info=True, use_safetensors=True, ignore_mismatched_sizes=True, **options
    )
    prefixes = {name.split(".")[0] for name in model.state_dict()} | {model.base_model_prefix}
    missing = [name for name in info["missing_keys"] if new is None or name.split(".")[0] != new]
    left_over = [name for name in info["unexpected_keys"] if new is None or name.split(".")[0] in prefixes]
    misshapen = [f"{name} {list(there)} for {list(wanted)}" for name, there, wanted in info["mismatched_keys"]]
    _refuse(source, missing, left_over, misshapen, _not_finite(dict(model.named_parameters())))
    return model


def has_weights_of(model: PreTrainedModel, source: str | Path) -> bool:
    """Return whether the safetensors files of a model, in a folder or in the cache of the hub, hold the weights of
    ``model``.

    Three rows of every tensor are compared, because reading all of a large model would take minutes. Training changes
    all matrices nearly everywhere. The result is False if the files cannot be found.
    """
    state, compared = base_state(model), 0
    for file in _weight_files(str(source)):
        with safe_open(file, "pt") as tensors:
            for name in state.keys() & set(tensors.keys()):
                if not _same_rows(tensors.get_slice(name), state[name]):
                    return False
                compared += 1
    return compared > 0


def _weight_files(source: str) -> list[str]:
    """Return the paths of a model's safetensors files. Nothing is downloaded."""
    options: dict[str, Any] = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    try:
        if single := cached_file(source, "model.safetensors", **options):
            return [str(single)]
        if (index := cached_file(source, "model.safetensors.index.json", **options)) is None:
            return []
        names = set(json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values())
        return [str(cached_file(source, name, local_files_only=True)) for name in sorted(names)]
    except (OSError, ValueError, KeyError):  # it is not a folder or in the cache, or is damaged
        return []


def _same_rows(saved: Any, tensor: torch.Tensor) -> bool:
    """Return whether the first, the middle and the last row of a tensor are those of the file."""
    if list(saved.get_shape()) != list(tensor.shape):
        return False
    if tensor.dim() == 0:
        return bool(torch.equal(saved[...].to(tensor.dtype), tensor.detach().cpu()))
    rows = sorted({0, len(tensor) // 2, max(0, len(tensor) - 1)})
    return all(torch.equal(saved[row : row + 1].to(tensor.dtype), tensor[row : row + 1].detach().cpu()) for row in rows)


def _check_config(kind: Any, source: str | Path, chosen: bool) -> None:
    """Check that a model's configuration asks for no attention that cannot be used."""
    # A kind that is not installed does no harm where another one was chosen. Code of other repositories is refused in
    # any case.
    is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    config = read_pretrained(kind.config_class if is_model else AutoConfig, source)
    parts = [config, *(part for name, part in vars(config).items() if name in config.sub_configs and part is not None)]
    for part in parts:
        name = str(part._attn_implementation)
        if (why := fault(name)) and not (chosen and "/" not in name):
            raise WeightsError(
                f"{source}: its config.json sets attn_implementation={name!r:.80}: {why}; or remove the key in a copy "
                "of the folder"
            )


def add_adapter(model: Any, name: str, options: PeftConfig) -> PeftModel:
    """Add a new adapter to a model, or to the ``PeftModel`` that other adapters share.

    Its first weights depend on its name and on torch's seed, and not on what was drawn before. So a policy begins with
    the same weights in every process, whichever other policies that process holds.

    If the base is on the meta device, because this process will receive its weights, the adapter is on the CPU.
    Adapters are small, and every process reads those that are saved.

    Raises:
        WeightsError: its initialisation would change the base that other adapters share, or theirs has changed it.
    """
    _check_company(model, name, options, f"adapter {name!r}")
    options = fitted(options, base_of(model))
    with forked_rng():
        torch.manual_seed(number_of((torch.initial_seed(), name)) % 2**63)
        if isinstance(model, PeftModel):
            model.add_adapter(name, options)
        else:
            model = get_peft_model(model, options, adapter_name=name)
    leave_meta(model, name)
    return model


def _check_company(model: Any, name: str, options: PeftConfig, where: str) -> None:
    """Check that neither a new adapter nor one that a base has already changes the base's weights for the other."""
    others = {n: config for n, config in getattr(model, "peft_config", {}).items() if n != name}
    changing = [n for n, config in others.items() if changes_base(config)] + [name] * changes_base(options)
    if others and changing:
        raise WeightsError(
            f"{where}: the initialisation of {changing[0]!r} "
            f"({initialisation((others | {name: options})[changing[0]])}) changes the base's weights, which "
            f"{', '.join(map(repr, sorted((set(others) | {name}) - {changing[0]})))} would share; give each a base of "
            "its own, or convert it to a plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )


def read_adapter(model: Any, source: str, name: str, trainable: bool) -> PeftModel:
    """Add the adapter in a folder or on the hub to a model, or to the ``PeftModel`` that other adapters share.

    Raises:
        WeightsError: it cannot be read or used here, tensors are missing, left over, misshapen or not finite, or it
            changes the base that other adapters share.
    """
    _check_company(model, name, check_adapter_source(source), repr(source))
    options: dict[str, Any] = {"adapter_name": name, "is_trainable": trainable}
    if base_of(model).device.type == "meta":  # PEFT would warn that nothing is copied
        options |= {"low_cpu_mem_usage": True, "torch_device": "cpu"}
    with _readable(source), hub.asking(source), forked_rng():  # PEFT draws weights before it reads them
        if isinstance(model, PeftModel):
            model.load_adapter(source, **options)
        else:
            model = PeftModel.from_pretrained(model, source, **options)
    leave_meta(model, name)
    load_adapter_weights(model, name, source)
    return model


def check_adapter_source(source: str) -> PeftConfig:
    """Return an adapter's options, after checking that it can be used here. No weights are read.

    It has its weights as safetensors, not pickled, names no module for PEFT to import, and works on the layers of its
    base.

    Raises:
        WeightsError: it cannot be used.
    """
    with _readable(source):
        options = _json_of(_adapter_file(source, ADAPTER_OPTIONS), source)
        _adapter_file(source, ADAPTER_WEIGHTS)  # without it, PEFT would read pickled weights
        safe = isinstance(options, dict) and options.get("megatron_config") is None
        with hub.asking(source):
            config = PeftConfig.from_pretrained(source) if safe else None
    if config is None:
        raise WeightsError(
            f"{source!r} could not be loaded (its {ADAPTER_OPTIONS} is not a mapping, or names a module)"
        )
    if (why := adapter_fault(config)) is not None:
        raise WeightsError(f"{source!r} cannot be used: {why}")
    return config


def _adapter_file(source: str | Path, name: str) -> Path:
    """Return the path of an adapter's file: in its folder, or in the cache of the hub."""
    with hub.asking(source):
        return Path(str(cached_file(str(source), name)))


def load_adapter_weights(model: PeftModel, name: str, source: str | Path) -> None:
    """Load the weights in a folder or on the hub into the adapter ``name``, which exists.

    Raises:
        WeightsError: they cannot be read, or tensors are missing, left over, misshapen or not finite.
    """
    with _readable(source):
        weights = load_file(_adapter_file(source, ADAPTER_WEIGHTS))
    set_adapter_weights(model, name, weights, source)


def set_adapter_weights(model: PeftModel, name: str, weights: dict[str, torch.Tensor], source: str | Path) -> None:
    """Load ``weights``, which come from ``source``, into the adapter ``name``.

    Raises:
        WeightsError: tensors are missing, left over, misshapen or not finite.
    """
    # misshapen, or a module that is trained as a whole is missing
    with retold((RuntimeError, KeyError), lambda error: WeightsError(_one_line(error, source)), cause=True):
        result: Any = set_peft_model_state_dict(model, weights, adapter_name=name)
    # PEFT's list has the base model's tensors too, and tensors of an adapter that are never saved
    lacking = any(name in key.split(".") for key in result.missing_keys)
    saved = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) if lacking else {}
    missing = saved.keys() - weights.keys()
    _refuse(source, missing, result.unexpected_keys, [], _not_finite(weights))
    narrow_as_saved(model, name, weights.values())


def load_tensors(module: nn.Module, file: Path) -> None:
    """Load the tensors of a safetensors file into ``module``, which has exactly these.

    Raises:
        WeightsError: the file cannot be read, or tensors are missing, left over, misshapen or not finite.
    """
    weights = read_tensors(file)
    check_fit(module.state_dict(), weights, file)
    module.load_state_dict(weights)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        WeightsError: the file is missing or damaged, or a tensor is not finite.
    """
    with _readable(file):
        weights = load_file(file)
    _refuse(file, [], [], [], _not_finite(weights))
    return weights


def check_fit(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], source: str | Path) -> None:
    """Check that ``weights``, which come from ``source``, have the names and shapes of a model's ``own`` tensors.

    Raises:
        WeightsError: tensors are missing, left over or misshapen.
    """
    misshapen = [
        f"{name} {list(weights[name].shape)} for {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    _refuse(source, own.keys() - weights.keys(), weights.keys() - own.keys(), misshapen, [])


def _not_finite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors with NaN or infinite numbers."""
    # a sum is faster than a mask, and finds most are fine
    floating = {n: t for n, t in tensors.items() if t.is_floating_point() and t.device.type != "meta"}
    suspects = [name for name, tensor in floating.items() if not bool(torch.isfinite(tensor.sum(dtype=torch.float32)))]
    return [name for name in suspects if not bool(torch.isfinite(floating[name].float()).all())]


def _refuse(
    source: str | Path,
    missing: Collection[str],
    left_over: Collection[str],
    misshapen: Collection[str],
    not_finite: Collection[str],
) -> None:
    """Raise an error that names the first tensors of each kind, if there are any."""
    kinds = {
        "are missing": missing,
        "belong to no part of this model": left_over,
        "have another shape": misshapen,
        "hold NaN or infinite numbers": not_finite,
    }
    faults = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for what, names in kinds.items()
        if names
    ]
    if faults:
        raise WeightsError(
            f"{source}: its weights are not those of this model: of its tensors {'; '.join(faults)}; nothing is filled "
            "in with random numbers: copy or download the folder again, or use another one"
        )


def _one_line(error: Exception, source: str | Path) -> str:
    """Return the message for a library's ``error``, without its further paragraphs."""
    text = str(error).strip()
    if "custom code" in text or "trust_remote_code" in text:
        return (
            f"{source}: needs code from its own folder, and such code is never run here; use a model of an "
            "architecture that transformers has, or build it in Python and pass it on"
        )
    if missing := hub.not_cached(source, error):
        return missing
    first = one_line(" ".join(text.split("\n")[0 if "size mismatch" not in text else 1 :][:1]), 300)
    return f"{str(source)!r} could not be loaded ({type(error).__name__}: {first})"
