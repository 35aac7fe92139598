"""Run a configuration: claim its folder, build the trainer, and train. ``maporl train`` calls this."""

import gc
import shlex
from pathlib import Path

from maporl.config import Config
from maporl.config.imports import extension
from maporl.evaluation.metrics import Evaluation
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player, trainer_of
from maporl.runs.claim import claim, must_be_free, must_hold_run
from maporl.storage.run_folder import FINAL, has_final
from maporl.training.run_record import AFTER, BEFORE, read_evaluation, record_evaluation, release
from trl_ext.errors import short_trace
from trl_ext.files.checkpoints import numbered_checkpoints
from trl_ext.files.lock import RunLock
from trl_ext.process import distributed
from trl_ext.process.messages import tell


@short_trace
def train(config: Config, resume: bool, quiet: bool = False) -> tuple[Evaluation | None, Evaluation | None]:
    """Run ``config`` to its end, and return the evaluations before and after training.

    A configuration with stages in its section ``loop`` is run in rounds (:mod:`maporl.loops.run`), and any other by
    PPO. An evaluation is None if evaluation is turned off.

    Args:
        config: the configuration.
        resume: whether to resume from the newest checkpoint, or from the last whole part of a loop. A run by PPO
            without a checkpoint starts again.
        quiet: whether to hide progress bars.

    Raises:
        RunExists: the output folder is not empty, and ``resume`` is false.
        CheckpointError: the output folder holds no run to resume, or a run of another configuration or of other data.
        FolderInUse: another process trains in the output folder.
        ConfigError: the configuration cannot run.
        RunError: a stage of a loop has nothing to train on.
    """
    run, folder = ResolvedRun(config), Path(config.output_dir)
    if config.stages:
        extension("maporl.loops.run:run_loop", "loop.stages")(config, resume, quiet)
        return _evaluations(folder)
    if not distributed.is_main():
        return _train(run, folder, resume, quiet=True)
    (must_hold_run if resume else must_be_free)(folder)  # before the lock, whose file is new
    with RunLock(folder):
        claim(folder, run, resume)
        return _train(run, folder, resume, quiet)


def _train(run: ResolvedRun, folder: Path, resume: bool, quiet: bool) -> tuple[Evaluation | None, Evaluation | None]:
    if resume and has_final(folder):
        if distributed.is_main():
            other = f"evaluate it with other options by: maporl eval {shlex.quote(str(folder))} KEY=VALUE"
            tell(f"{folder}: its run has ended; nothing is left to train; {other}")
        return _ended(run, folder)
    try:
        trainer = trainer_of(run, quiet=quiet)
        from_checkpoint = distributed.broadcast_from_main(resume and bool(numbered_checkpoints(folder)))
        if resume and not from_checkpoint:
            if distributed.is_main():
                tell(f"{folder}: has no checkpoint; the run starts again")
                trainer.run.set_results_aside()
            trainer.run.rewind(0)
        # what the libraries have made stays; looking through it for garbage would take a third of a second each time
        gc.freeze()
        try:
            trainer.train(resume_from_checkpoint=from_checkpoint)
        finally:
            gc.unfreeze()
    except Exception:
        if not resume and distributed.is_main():
            release(folder)
        raise
    return trainer.before, trainer.after


def _ended(run: ResolvedRun, folder: Path) -> tuple[Evaluation | None, Evaluation | None]:
    """Return the evaluations of a run that has its final weights. If the last one is missing, it is made now."""
    if run.held_out is not None and not (folder / AFTER).exists():
        player, section = loaded_player(run, folder / FINAL), run.config.evaluation
        evaluation = player.play_evaluation(run.held_out, section.questions, section.decoding, run.config.seed)
        record_evaluation(evaluation, folder / AFTER)
    return _evaluations(folder)


def _evaluations(folder: Path) -> tuple[Evaluation | None, Evaluation | None]:
    """Return the evaluations before and after training that a run's folder has."""
    files = [folder / BEFORE, folder / AFTER]
    before, after = (read_evaluation(file.read_text(), file) if file.exists() else None for file in files)
    return before, after
