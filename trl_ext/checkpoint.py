"""Checkpoints: whole or absent, no pickles, loadable by plain ``from_pretrained``.

``checkpoint-N/`` holds, for each policy, ``policies/NAME/`` (a model or PEFT folder with its tokenizer, the critic's
head and the optimizer's state), ``others/NAME/`` for whatever else learns, ``rng.safetensors`` and ``state.json``. It
is written under a hidden name and renamed when complete; ``MANIFEST.json`` lists every file with its SHA-256.
"""

import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from trl_ext import distributed
from trl_ext.atomic import new_folder
from trl_ext.chat import Tokenizer
from trl_ext.errors import UserError
from trl_ext.learner import Learner
from trl_ext.sharding import State

MANIFEST = "MANIFEST.json"
logger = logging.getLogger(__name__)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or of another run."""


# -- the folder ---------------------------------------------------------------------------------------------------


class Saved(Protocol):
    """Anything else that changes while a run goes on."""

    def save(self, folder: Path) -> None:
        """Write everything into ``folder``, which exists."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`."""
        ...


def write_checkpoint(
    target: Path, learners: dict[str, Learner], state: dict, others: Mapping[str, Saved] | None = None
) -> None:
    """Write ``target`` atomically: a reader sees the whole checkpoint or none of it. Never overwrites.

    All processes call this together and the main one writes; what is written does not depend on how many there are.
    """
    if distributed.is_main() and target.exists():
        raise CheckpointError(f"{target}: a checkpoint of that name exists already; nothing was overwritten")
    if distributed.is_main():
        for left in target.parent.glob(".partial-checkpoint-*"):  # by a run that was killed; never a checkpoint
            shutil.rmtree(left)
    try:
        with new_folder(target, distributed.is_main()) as partial:
            for name, learner in learners.items():
                save_learner(learner, partial / "policies" / name)
            if distributed.is_main():
                _complete(partial, state, others or {})
    except Exception as error:
        if not out_of_space(error):
            raise
        raise CheckpointError(
            f"{target}: no space to write it ({error}); it was removed, older checkpoints are whole. Free some, lower "
            "save_total_limit, and resume"
        ) from error
    distributed.barrier()


def out_of_space(error: BaseException) -> bool:
    """Whether a write failed because a disk is full, or a quota or limit is reached."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # safetensors has an error of its own, with the system's message
    return getattr(error, "errno", None) in full or any(os.strerror(n) in str(error) for n in full)


def _complete(partial: Path, state: dict, others: Mapping[str, Saved]) -> None:
    for name, other in others.items():
        (partial / "others" / name).mkdir(parents=True)
        other.save(partial / "others" / name)
    tensors, numbers = random_state()
    save_file(tensors, partial / "rng.safetensors")
    state = {**state, "rng": numbers}
    (partial / "state.json").write_text(json.dumps(state, indent=1))
    files = {str(p.relative_to(partial)): _digest(p) for p in sorted(partial.rglob("*")) if p.is_file()}
    (partial / MANIFEST).write_text(json.dumps(files, indent=1))


def read_checkpoint(folder: Path, learners: dict[str, Learner], others: Mapping[str, Saved] | None = None) -> dict:
    """Verify ``folder``, put its weights, optimizers and random states in place, and return its ``state.json``."""
    verify(folder)
    for name, learner in learners.items():
        if not (folder / "policies" / name).is_dir():
            found = sorted(p.name for p in (folder / "policies").iterdir())
            raise CheckpointError(f"{folder}: holds policies {found}, but this run has a policy {name!r}")
        load_learner(learner, folder / "policies" / name)
    for name, other in (others or {}).items():
        other.load(folder / "others" / name)
    state = json.loads((folder / "state.json").read_text())
    set_random_state((load_file(folder / "rng.safetensors"), state["rng"]))
    return state


def verify(folder: Path) -> None:
    """Raise ``CheckpointError`` unless every file of ``folder`` is as its manifest says."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST}, so this is not a whole checkpoint; use another one")
    for name, digest in json.loads((folder / MANIFEST).read_text()).items():
        path = folder / name
        if not path.is_file() or _digest(path) != digest:
            raise CheckpointError(f"{folder}: {name} is missing or damaged; use another checkpoint")


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted((p for p in found if (p / MANIFEST).is_file()), key=lambda p: int(p.name.split("-")[1]))


def newest_whole(folders: list[Path]) -> Path:
    """The last of ``folders`` that is undamaged; those passed over are named in a warning."""
    for folder in reversed(folders):
        try:
            verify(folder)
        except CheckpointError as error:
            logger.warning("%s; going on from an older one", error)
        else:
            return folder
    raise CheckpointError(f"{folders[-1].parent}: every checkpoint is damaged ({len(folders)} found); start anew")


def remove_old(output_dir: Path, keep: int | None) -> None:
    """Honour ``save_total_limit``: remove the oldest checkpoints beyond ``keep``."""
    if keep is not None and keep > 0:
        for folder in list_checkpoints(output_dir)[:-keep]:
            shutil.rmtree(folder)


# -- one learner --------------------------------------------------------------------------------------------------


def save_policy(learner: Learner, folder: Path) -> None:
    """The policy as a plain ``from_pretrained`` folder (model, or PEFT adapter) with tokenizer and critic."""
    save_policy_weights(learner.model, learner.adapter, learner.tokenizer, folder)
    if learner.critic == "adapter":
        save_adapter(learner.model, str(learner.critic_adapter), folder / "critic")
    if isinstance(learner.value_model, PeftModel):
        save_adapter(learner.value_model, str(learner.value_model.active_adapter), folder / "critic")
    elif learner.value_model is not None:
        learner.value_model.save_pretrained(folder / "critic")
    if learner.value_head is not None:
        save_file(_contiguous(learner.value_head.state_dict()), folder / "value_head.safetensors")


def save_policy_weights(model: Any, adapter: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """A model, or one adapter of it, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        save_adapter(model, adapter, folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_adapter(model: Any, adapter: str, folder: Path) -> None:
    """One adapter as ``folder/adapter_config.json`` and weights, whatever its name (PEFT makes a subfolder of it)."""
    model.save_pretrained(folder, selected_adapters=[adapter])
    nested = folder / adapter
    if nested.is_dir():
        for path in nested.iterdir():
            os.replace(path, folder / path.name)
        nested.rmdir()


def save_learner(learner: Learner, folder: Path) -> None:
    """The policy, and what it takes to go on training it. All processes call this together; the main one writes."""
    state = learner.strategy.optimizer_state()
    with learner.strategy.whole():
        if distributed.is_main():
            save_policy(learner, folder)
    if distributed.is_main():
        more = {"scheduler": learner.scheduler.state_dict()}
        save_optimizer(state, learner.strategy.optimizer_groups(), folder, more)


def save_optimizer(state: State, groups: list[dict], folder: Path, more: dict[str, Any]) -> None:
    """An optimizer's ``state``, by number of the parameter, and its groups' options as safetensors and JSON; ``more`` goes
    beside."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, dict):  # bitsandbytes keeps its tensors here, some of them one for all parameters
                tensors |= {f"{index}.{key}/{name}": entry.clone() for name, entry in value.items()}
            elif isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value.contiguous()
            else:
                numbers[f"{index}.{key}"] = value
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps({"numbers": numbers, "groups": groups, **more}))


def read_optimizer(folder: Path) -> tuple[State, dict[str, Any]]:
    """What :func:`save_optimizer` wrote: the state, and the record with the groups' options and whatever was beside."""
    record = json.loads((folder / "optimizer.json").read_text())
    state: State = {}
    for name, value in [*load_file(folder / "optimizer.safetensors").items(), *record["numbers"].items()]:
        index, key = name.split(".", 1)
        entries = state.setdefault(int(index), {})
        if "/" in key:
            outer, key = key.split("/")
            entries = entries.setdefault(outer, {})
        entries[key] = value
    return state, record


def load_learner(learner: Learner, folder: Path) -> None:
    """Inverse of :func:`save_learner`, into the weights that ``learner`` already holds."""
    with learner.strategy.whole(write=True):
        load_weights(learner.model, learner.adapter, folder)
        if learner.critic == "adapter":
            load_weights(learner.model, learner.critic_adapter, folder / "critic")
        if learner.value_model is not None:
            active = learner.value_model.active_adapter if isinstance(learner.value_model, PeftModel) else None
            load_weights(learner.value_model, active, folder / "critic")
        if learner.value_head is not None:
            learner.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
    state, record = read_optimizer(folder)
    learner.strategy.load_optimizer_state(state, record["groups"])
    learner.scheduler.load_state_dict(record["scheduler"])


def load_weights(model: Any, adapter: Any, folder: Path) -> None:
    """Weights saved by :func:`save_policy_weights` into a model (or one of its adapters) that is already in memory."""
    if isinstance(model, PeftModel):
        result: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder)), adapter_name=adapter)
        if result.unexpected_keys:
            raise CheckpointError(
                f"{folder}: the adapter has weights that {adapter!r} lacks: {result.unexpected_keys[:3]}"
            )
        return
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())


# -- random states ------------------------------------------------------------------------------------------------


RandomState = tuple[dict[str, torch.Tensor], dict[str, Any]]


def random_state() -> RandomState:
    """The states of torch's, Python's and numpy's generators."""
    return _rng_tensors(), _rng_numbers()


def _rng_tensors() -> dict[str, torch.Tensor]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def _rng_numbers() -> dict:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    return {
        "python": [version, list(internal), following],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_random_state(state: RandomState) -> None:
    """Inverse of :func:`random_state`."""
    tensors, numbers = state
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    version, internal, following = numbers["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, position, has_gauss, gauss = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def _contiguous(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.contiguous() for key, value in state.items()}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
