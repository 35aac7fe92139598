"""Write and read checkpoints. They are atomic, contain no pickles, and load with plain ``from_pretrained``.

``checkpoint-N/`` holds these files:

- ``policies/NAME/`` for each policy: a model or PEFT folder with its tokenizer, and in folders of their own,
  ``critic/`` and ``optimizer/``, what only training needs. vLLM takes every safetensors file beside a model for its
  weights. Plain ``from_pretrained`` loads it, unless it has a folder ``shards/``: each process has then written there
  what it holds of a policy with all weights trained (:mod:`trl_ext.sharding.shards`), and an export makes plain folders
  of it. The state of the optimizer is in shards in any case (:mod:`trl_ext.sharding.optimizer_files`).
- ``others/NAME/`` for everything else that learns.
- ``rng.safetensors`` and ``state.json``.
- ``MANIFEST.json``: every file with its SHA-256.

A checkpoint is written under a hidden name and renamed when it is complete.
"""

import json
import random
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from trl_ext.files.atomic import NoSpace, new_folder
from trl_ext.files.checkpoints import discard
from trl_ext.files.manifest import CheckpointError, write_manifest
from trl_ext.files.paths import below
from trl_ext.learning.learner import Learner
from trl_ext.process import distributed
from trl_ext.process.devices import accelerators
from trl_ext.sharding.optimizer_files import OPTIMIZER
from trl_ext.sharding.shards import SHARDS, ShardWriter

# -- the folder ---------------------------------------------------------------------------------------------------


class Saved(Protocol):
    """An object besides the learners that changes during a run, and therefore belongs in a checkpoint."""

    def save(self, folder: Path) -> None:
        """Write the object's state into ``folder``, which exists."""
        ...

    def load(self, folder: Path) -> None:
        """Read the state that :meth:`save` wrote into ``folder``."""
        ...


class Saving(Protocol):
    """The policies of a run on their way into a checkpoint."""

    def done(self) -> bool:
        """Return whether :meth:`finish` would not wait for what this process writes."""
        ...

    def finish(self) -> dict[Path, str]:
        """Wait until everything is written, by all processes. Return the SHA-256 of files that are known already."""
        ...


class Policies(Protocol):
    """The learners of a run, here or in other processes."""

    def begin_saving(self, folder: Path) -> Saving:
        """Begin to write every policy into ``folder/NAME``. Training may go on as soon as this returns."""
        ...

    def load(self, folder: Path) -> None:
        """Load every policy from ``folder/NAME``."""
        ...


class Learners(dict[str, Learner]):
    """Learners by name, which are in this process, and in part in the others that train together with it."""

    def begin_saving(self, folder: Path) -> Saving:
        """Begin to write every policy into ``folder/NAME``. All processes call this together."""
        return _SavingLearners(self, folder)

    def load(self, folder: Path) -> None:
        """Load every policy from ``folder/NAME``. All processes call this together.

        Raises:
            CheckpointError: a policy is missing, or its files are not those of its learner.
        """
        names = sorted(p.name for p in folder.iterdir())
        if missing := [name for name in self if name not in names]:
            raise CheckpointError(f"{folder.parent}: holds policies {names}, but this run has a policy {missing[0]!r}")
        for name, learner in self.items():
            load_learner(learner, below(folder, name))


class _SavingLearners:
    """Writes shards in a thread, and everything else at once."""

    def __init__(self, learners: Mapping[str, Learner], folder: Path):
        if distributed.is_main():
            for name in learners:
                place = below(folder, name)
                shutil.rmtree(place, ignore_errors=True)  # of a process that died while it wrote
                (place / OPTIMIZER).mkdir(parents=True)
        distributed.barrier()  # the other processes write into these folders too
        writer = ShardWriter()
        for name, learner in learners.items():
            save_learner(learner, below(folder, name), writer)
        self._digests: dict[Path, str] = {}
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._write, args=(writer,), name=f"writes {folder}")
        self._thread.start()

    def _write(self, writer: ShardWriter) -> None:
        try:
            self._digests = writer.write()
        except Exception as error:  # finish raises it in the thread that trains
            self._failed = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> dict[Path, str]:
        self._thread.join()
        written: list[tuple[dict[Path, str], Exception | None]] = distributed.all_gather((self._digests, self._failed))
        if (failed := next((error for _, error in written if error is not None), None)) is not None:
            raise failed
        return {path: digest for digests, _ in written for path, digest in digests.items()}


def write_checkpoint(target: Path, policies: Policies, state: dict, others: Mapping[str, Saved] | None = None) -> None:
    """Write a checkpoint to ``target`` atomically. All processes call this together. See :class:`CheckpointWriter`.

    Raises:
        CheckpointError: ``target`` exists, or the disk is full, or a process does not see the folder.
    """
    CheckpointWriter(target, policies, state, others).finish()


class CheckpointWriter:
    """Writes a checkpoint to ``target`` atomically, in two steps. All processes do each of them together.

    The constructor takes everything that belongs in the checkpoint, so that training may go on. :meth:`finish` makes
    the folder appear under its name. The shards of weights and optimizers are written in between. The content does not
    depend on the number of processes, apart from how it is cut into shards.

    Args:
        target: the new folder ``checkpoint-N``.
        policies: the policies.
        state: what ``state.json`` holds, besides the random states of numpy and Python.
        others: everything else that changes during the run, by name.

    Raises:
        CheckpointError: ``target`` exists, or the disk is full.
    """

    def __init__(self, target: Path, policies: Policies, state: dict, others: Mapping[str, Saved] | None = None):
        if distributed.is_main() and target.exists():
            raise CheckpointError(f"{target}: a checkpoint of that name exists already; nothing was overwritten")
        if distributed.is_main():
            for left in target.parent.glob(".partial-checkpoint-*"):  # incomplete, because its run was killed
                discard(left)
        self._open = ExitStack()
        with self._removed_if_it_fails():
            self._partial = self._open.enter_context(new_folder(target, distributed.is_main()))
            self._saving = policies.begin_saving(self._partial / "policies")
            if distributed.is_main():
                _save_rest(self._partial, state, others or {})

    def done(self) -> bool:
        """Return whether this process has written its part, so that :meth:`finish` would not wait for it."""
        return self._saving.done()

    def finish(self) -> None:
        """Wait until every process has written its part, and give the folder its name.

        Raises:
            CheckpointError: the disk is full, or a process does not see the folder.
        """
        with self._removed_if_it_fails():
            digests = self._saving.finish()
            if distributed.is_main():
                write_manifest(self._partial, digests)
            self._open.close()
        distributed.barrier()

    @contextmanager
    def _removed_if_it_fails(self) -> Iterator[None]:
        """Remove the unfinished folder if the block fails."""
        try:
            try:
                yield
            except BaseException:
                self._open.__exit__(*sys.exc_info())
                raise
        except NoSpace as error:
            raise CheckpointError(f"{error}; older ones are whole. Lower save_total_limit, and resume") from error


class SavingLost(CheckpointError):
    """A checkpoint that was being written in the background is lost, because a process that wrote it died.

    The run goes on.
    """


def _save_rest(partial: Path, state: dict, others: Mapping[str, Saved]) -> None:
    for name, other in others.items():
        place = below(partial / "others", name)
        place.mkdir(parents=True)
        other.save(place)
    tensors, numbers = random_state()
    save_file(tensors, partial / "rng.safetensors")
    state = {**state, "rng": numbers}
    (partial / "state.json").write_text(json.dumps(state, indent=1))


def load_checkpoint(folder: Path, policies: Policies, others: Mapping[str, Saved] | None = None) -> dict:
    """Load a verified checkpoint and return its ``state.json``.

    This loads weights, optimizers, schedulers, ``others`` and random states.

    Raises:
        CheckpointError: the checkpoint lacks a policy.
    """
    policies.load(folder / "policies")
    for name, other in (others or {}).items():
        other.load(below(folder / "others", name))
    state = read_state(folder)
    set_random_state((load_file(folder / "rng.safetensors"), state["rng"]))
    return state


def read_state(folder: Path) -> dict:
    """Return the content of a checkpoint's ``state.json``."""
    return json.loads((folder / "state.json").read_text())


# -- one learner --------------------------------------------------------------------------------------------------


def in_shards(learner: Learner) -> bool:
    """Return whether checkpoints hold a policy in shards.

    They do if all weights are trained, and processes share the weights or the checkpoint is written while training goes
    on. Adapters are small, and are always written at once as plain folders.
    """
    adapted = any(isinstance(model, PeftModel) for model in (learner.model, learner.critic.model))
    return not adapted and (learner.strategy.sharded or learner.args.async_save)


def save_learner(learner: Learner, folder: Path, writer: ShardWriter) -> None:
    """Save a policy with its optimizer and scheduler, so that training can continue.

    All processes call this together. What becomes shards goes to ``writer``, and the main process writes everything
    else here.
    """
    if in_shards(learner):
        writer.add(folder, learner.strategy.shards())
        if distributed.is_main():
            learner.tokenizer.save_pretrained(folder)
            learner.model.config.save_pretrained(folder)
    else:
        with learner.strategy.whole():
            if distributed.is_main():
                learner.save(folder)
    learner.trained.save(folder, in_shards(learner))


def load_learner(learner: Learner, folder: Path) -> None:
    """Load what :func:`save_learner` wrote into ``learner``, whose models are already in memory.

    Other processes under another strategy may have written it. All processes call this together.

    Raises:
        CheckpointError: a file cannot be read, or it is not of this learner.
    """
    if not (folder / SHARDS).is_dir():
        with learner.strategy.whole(write=True):
            learner.load(folder)
    learner.trained.load(folder)


# -- random states ------------------------------------------------------------------------------------------------


RandomState = tuple[dict[str, torch.Tensor], dict[str, Any]]


def random_state() -> RandomState:
    """Return the states of the random generators of torch, Python and numpy."""
    return _rng_tensors(), _rng_numbers()


def _rng_tensors() -> dict[str, torch.Tensor]:
    tensors = {"torch": torch.get_rng_state()}
    for device in accelerators():
        tensors[f"{device.type}.{device.index}"] = torch.get_device_module(device).get_rng_state(device)
    return tensors


def _rng_numbers() -> dict:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    return {
        "python": [version, list(internal), following],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_random_state(state: RandomState) -> None:
    """Restore the random states that :func:`random_state` returned."""
    tensors, numbers = state
    torch.set_rng_state(tensors["torch"])
    for device in accelerators():
        if (name := f"{device.type}.{device.index}") in tensors:
            torch.get_device_module(device).set_rng_state(tensors[name], device)
    version, internal, following = numbers["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, position, has_gauss, gauss = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
