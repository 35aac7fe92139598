"""What a trainer does with checkpoints: it writes them, resumes from them, and leaves no two branches mixed."""

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from transformers import SchedulerType
from transformers.trainer_callback import ExportableState

from trl_ext.errors import ArgumentError
from trl_ext.files.atomic import flush
from trl_ext.files.checkpoints import (
    check_space,
    newest_whole,
    numbered_checkpoints,
    place_of,
    remove_old,
    set_later_aside,
    size_of,
)
from trl_ext.files.fingerprint import check_data, fingerprint, remember_data
from trl_ext.files.manifest import CheckpointError, verify
from trl_ext.files.set_aside import ABANDONED, DAMAGED, check_records, set_records_aside
from trl_ext.learning.arguments import check_options, deciding_options, is_longer
from trl_ext.learning.audit import Watch
from trl_ext.learning.checkpoint import CheckpointWriter, Saved, SavingLost, load_checkpoint, read_state
from trl_ext.learning.learners import Learning
from trl_ext.process import distributed
from trl_ext.process.messages import tell

COMPLETIONS = "completions.jsonl"
_KEPT = {"files": "files", "service": "a service (cluster.backend: tinker)"}
logger = logging.getLogger(__name__)


@runtime_checkable
class Remembers(Protocol):
    """A reward source that checks on resume whether the model behind it is the same."""

    def remembered(self) -> dict[str, str]:
        """Return what a checkpoint keeps."""
        ...

    def recall(self, kept: Mapping[str, str]) -> None:
        """Compare with what a checkpoint has kept, and raise if it must not differ."""
        ...


class Resuming:
    """The part of :class:`trl_ext.trainer.loop.PPOLoop` that writes checkpoints and resumes from them.

    Everything that can be known to fail later is checked at the start, before anything is loaded or renamed. Only the
    main process reads and renames, and the others are told.
    """

    args: Any
    state: Any
    train_dataset: Any
    eval_dataset: Any
    learning: Learning
    folder: Path
    episodes: int
    accelerator: Any
    callback_handler: Any
    control: Any
    watch: Watch
    learners: Mapping[str, Any]
    home: Any
    _saving: CheckpointWriter | None = None
    _determine_best_metric: Any  # of transformers' Trainer

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict:
        """Hook: return what ``state.json`` of a checkpoint records. An override adds to it."""
        counts = {"global_step": self.state.global_step, "episodes": self.episodes}
        rewards = {name: record for name, source in self.remembering().items() if (record := source.remembered())}
        more: dict[str, Any] = {"rewards": rewards} if rewards else {}
        more |= {"audit": self.watch.state(), "best": [self.state.best_metric, self.state.best_global_step]}
        more["callbacks"] = {name: callback.state()["attributes"] for name, callback in self._stateful().items()}
        more["weights"] = self.home.keeps
        return {"format": 1, **counts, "seed": self.args.seed, "options": self._deciding(), **more}

    def algorithms(self) -> dict[str, Any]:
        """Hook: return by name the options that decide the weights of learners and are not those of the trainer."""
        team = deciding_options(self.args)
        learned = {name: deciding_options(learner.args) for name, learner in self.learners.items()}
        changed = {name: {key: own[key] for key in own if own[key] != team.get(key)} for name, own in learned.items()}
        return {name: own for name, own in changed.items() if own}

    def _deciding(self) -> dict[str, Any]:
        return deciding_options(self.args) | {"algorithms": self.algorithms()}

    def remembering(self) -> dict[str, Remembers]:
        """Hook: return the reward sources that say which model is behind them, by name."""
        return {}

    def checkpoint_others(self) -> dict[str, Saved]:
        """Hook: return the objects besides the learners that a checkpoint holds, by name."""
        return {}

    def restore_state(self, state: dict) -> None:
        """Hook: restore what :meth:`checkpoint_state` recorded. An override begins with ``super().restore_state``."""
        self.state.global_step, self.episodes = state["global_step"], state["episodes"]
        self.watch.restore(state.get("audit", {}))
        self.state.best_metric, self.state.best_global_step = state.get("best", (None, None))
        for name, callback in self._stateful().items():
            vars(callback).update(state.get("callbacks", {}).get(name, {}))
        self.forget_samplers()
        sources = self.remembering()
        for name, record in state.get("rewards", {}).items():
            if name in sources:
                sources[name].recall(record)

    def _stateful(self) -> dict[str, ExportableState]:
        """Return the callbacks that have a state, such as how often nothing was better, by the names of their types."""
        return {type(one).__name__: one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)}

    def forget_samplers(self) -> None:
        """Hook: weights were loaded, which what samples from copies of the weights has not got yet."""

    def best_metric(self, names: Iterable[str]) -> str | None:
        """Return the name of the metric by which an evaluation is the best, without ``eval_``, or None.

        Raises:
            ArgumentError: it is not among ``names``, those of the metrics of an evaluation.
        """
        name = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if name and name not in (known := {other.removeprefix("eval_") for other in names}):
            raise ArgumentError(f"metric_for_best_model: expected one of {', '.join(sorted(known))}, got {name!r}")
        return name or None

    def note_best(self, metrics: Mapping[str, float]) -> None:
        """Note the present update if its evaluation is the best so far by ``metric_for_best_model``, and let it be
        saved if the best weights are wanted at the end.

        Raises:
            ArgumentError: the evaluation has no such metric.
        """
        if self.best_metric(metrics) is not None and self._determine_best_metric(metrics, None):
            self.control.should_save |= self.args.load_best_model_at_end

    def load_best(self) -> None:
        """Load the weights of the best evaluation, if ``load_best_model_at_end`` wants them. The last ones are saved.

        Raises:
            CheckpointError: their checkpoint is damaged, or a disk is full.
        """
        best, step = self.state.best_global_step, self.state.global_step
        if not self.args.load_best_model_at_end or not best or best == step:
            return
        if not distributed.broadcast_from_main(self._checkpoint_folder().exists()):
            self._save_checkpoint(None, None)
            self.finish_checkpoint()
        folder = self.folder / f"checkpoint-{best}"
        distributed.on_main(lambda: verify(folder))
        self.learning.load(folder / "policies")
        self.forget_samplers()
        self.state.best_model_checkpoint = str(folder)
        if distributed.is_main():
            found = f"{self.args.metric_for_best_model} {self.state.best_metric:.4g}"
            tell(f"{self.folder}: has the weights of update {best} of {step}, the best ({found})")

    def _save_checkpoint(self, model, trial) -> None:
        self.finish_checkpoint()  # main memory need not hold two
        state = self.checkpoint_state() | {"records": distributed.on_main(self._synced_records)}
        self._saving = CheckpointWriter(self._checkpoint_folder(), self.learning, state, self.checkpoint_others())
        self.finish_checkpoint(wait=not self.args.async_save)

    def _synced_records(self) -> dict[str, int]:
        """Return the bytes of the files with records, which are on the disk by now as the checkpoint will be."""
        files = [file for file in self.record_files() if file.exists()]
        for file in files:
            flush(file)
        return {file.name: file.stat().st_size for file in files}

    def finish_checkpoint(self, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one, and tell the callbacks. All processes call
        this.

        Without ``wait``, it is completed only if every process has written its part.

        Raises:
            CheckpointError: the disk is full, or a process does not see the folder.
        """
        if self._saving is None:
            return
        if not wait and distributed.all_reduce_max(int(not self._saving.done()), self.accelerator.device):
            return
        saving, self._saving = self._saving, None
        try:
            saving.finish()
        except SavingLost as error:
            logger.warning("%s", error)
            return
        if distributed.is_main():
            best = self.state.best_global_step if self.args.load_best_model_at_end else None
            remove_old(self.folder, self.args.save_total_limit, best)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _checkpoint_folder(self) -> Path:
        return self.folder / f"checkpoint-{self.state.global_step}"

    # -- the start ----------------------------------------------------------------------------------------------------

    def start_or_resume(self, wanted: str | bool | None) -> None:
        """Count the updates of the run, and load the checkpoint that is ``wanted``.

        ``wanted`` is a folder, or True for the newest whole checkpoint. None or False starts a new run. Everything that
        can be known to fail is checked before anything is loaded or renamed.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or its seed, its options or its data differ, or the
                output folder of a new run holds records of an earlier run.
        """
        args = self.args
        self.state.max_steps = args.num_total_batches
        self.state.num_train_epochs = math.ceil(args.total_episodes / (len(self.train_dataset) * args.num_generations))
        self.state.compute_steps(args, self.state.max_steps)
        self.state.train_batch_size = args.per_device_train_batch_size
        folder = distributed.on_main(lambda: self._checked(wanted))
        self.begin_run(folder is not None)
        if folder is None:
            return
        state = load_checkpoint(folder, self.learning, self.checkpoint_others())
        self.restore_state(state)
        if is_longer(state["options"], self._deciding()) and distributed.is_main():
            tell(
                f"{self.folder}: made longer, to {args.num_total_batches} updates in place of "
                f"{state['options']['num_total_batches']}; from update {self.state.global_step + 1} on the learning "
                f"rate is that of schedule {SchedulerType(args.lr_scheduler_type).value} over "
                f"{args.num_total_batches} updates",
            )
        why = DAMAGED if wanted is True else ABANDONED
        distributed.on_main(lambda: self._leave_branch(folder, why, state.get("records", {})))

    def _checked(self, wanted: str | bool | None) -> Path | None:
        """Return the verified checkpoint to resume from, or None if the run starts. The main process calls this."""
        if not wanted:
            if not self.state.global_step:
                self.must_be_new()
                self._check_space(self.learning.trained_bytes())
                remember_data(self.folder, self._fingerprints())
            return None
        existing = numbered_checkpoints(self.folder)
        if wanted is True and not existing:
            raise CheckpointError(f"{self.folder}: no whole checkpoint to resume from; start without resuming")
        folder = newest_whole(existing) if wanted is True else self._named(wanted)
        state = read_state(folder)
        if state["seed"] != self.args.seed:
            raise CheckpointError(f"{folder}: was made with seed {state['seed']}, this run has seed {self.args.seed}")
        if (kept := state.get("weights", "files")) != self.home.keeps:
            raise CheckpointError(
                f"{folder}: its weights are in {_KEPT[kept]}, and this run has them in {_KEPT[self.home.keeps]}; they "
                "cannot be moved: resume with the backend with which the run began, or begin another one"
            )
        check_options(folder, state["options"], self._deciding())
        if place := place_of(folder, self.folder):
            if place.name != f"checkpoint-{state['global_step']}":  # the run would write one of its number again
                raise CheckpointError(f"{place}: is of update {state['global_step']}; give it that number, and resume")
            for file in self.record_files():
                check_records(file)
        else:
            self.must_be_new()
        self._check_space(size_of(folder))
        data = self._fingerprints()
        remember_data(self.folder, check_data(folder.parent, data) | data)
        return folder

    def _check_space(self, size: int) -> None:
        if self.args.save_strategy != "no":
            check_space(self.folder, size)

    def _named(self, wanted: str) -> Path:
        folder = Path(wanted) if Path(wanted).is_dir() else self.folder / wanted
        verify(folder)
        return folder

    def _fingerprints(self) -> dict[str, dict]:
        return {name: fingerprint(rows) for name, rows in self.data_sets().items()}

    def _leave_branch(self, resumed: Path, why: str, lengths: Mapping[str, int]) -> None:
        """Set aside what the output folder holds of updates after the present one, and say so in one line."""
        step = self.state.global_step
        # the order matters: a process that is killed in between leaves a run that can resume from its newest checkpoint
        moved = self.set_results_aside() if step < self.state.max_steps else []
        moved += set_later_aside(self.folder, resumed, step, why)
        records = [set_records_aside(file, step) for file in self.record_files() if file.exists()]
        if place_of(resumed, self.folder):
            self._tell_gaps(resumed, lengths)
        if moved := [*moved, *filter(None, records)]:
            names = ", ".join(path.name for path in moved)
            logger.warning("%s: resumes after update %d; what came later was set aside: %s", self.folder, step, names)
        else:
            tell(f"{self.folder}: resumes after update {step}")

    def _tell_gaps(self, resumed: Path, had: Mapping[str, int]) -> None:
        """Warn if a file has lost records that it had when the checkpoint ``resumed`` was written."""
        for file in self.record_files():
            size = file.stat().st_size if file.exists() else 0
            if size < had.get(file.name, 0):
                logger.warning(
                    "%s: %d of the %d bytes that it had at %s are missing, and with them records of updates: figures "
                    "and pages of this run have a gap. Restore the file from a backup and resume again, if you have "
                    "one",
                    file, had[file.name] - size, had[file.name], resumed.name,
                )  # fmt: skip

    def begin_run(self, resumes: bool) -> None:
        """Hook: the run can begin, and no checkpoint is loaded yet. By default this does nothing.

        ``resumes`` is whether a checkpoint will be loaded.
        """

    def data_sets(self) -> dict[str, Any]:
        """Hook: return the data sets that must be the same when the run resumes, by the names that errors use."""
        sets = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        return {name: rows for name, rows in sets.items() if rows is not None}

    def record_files(self) -> list[Path]:
        """Hook: return the JSONL files in the output folder whose records have the number of an update as ``step``."""
        return [self.folder / COMPLETIONS]

    def set_results_aside(self) -> list[Path]:
        """Hook: rename what an earlier run wrote at its end, and return the new paths. By default there is nothing."""
        return []

    def must_be_new(self) -> None:
        """Hook: check that the output folder holds no records of an earlier run. An override ends with ``super()``'s.

        Raises:
            CheckpointError: it holds records or checkpoints.
        """
        if (self.folder / COMPLETIONS).exists():
            raise CheckpointError(f"{self.folder}: holds {COMPLETIONS} of an earlier run; choose another output_dir")
        if checkpoints := numbered_checkpoints(self.folder):
            raise CheckpointError(
                f"{self.folder}: holds {checkpoints[-1].name} of an earlier run, which would be mixed up with this "
                "one; pass resume_from_checkpoint=True to go on with it, or choose another output_dir"
            )
