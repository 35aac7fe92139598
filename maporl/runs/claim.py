"""Take the output folder for a run, so that no two runs share one and no run is overwritten."""

import dataclasses
from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_values
from maporl.config.imports import FINGERPRINTS
from maporl.config.parse import MOST_FAULTS, lasting
from maporl.config.safe_yaml import dump_yaml
from maporl.run import ResolvedRun
from maporl.storage.run_folder import RunExists, RunFolder, has_final
from maporl.tasks.base import tasks_by_name
from maporl.team.weights import begin_from
from maporl.training.args import changes, decisions_changed
from maporl.training.run_record import AFTER, CONFIG, evaluate_again, module_fingerprints, rest_of
from trl_ext.files.atomic import replace_file
from trl_ext.files.checkpoints import numbered_checkpoints
from trl_ext.files.fingerprint import check_data, fingerprint, remember_data
from trl_ext.files.lock import holds_something
from trl_ext.files.manifest import CheckpointError


def claim(folder: Path, run: ResolvedRun, resume: bool) -> None:
    """Take ``folder`` for a new run. With ``resume``, check that it holds this run and that its data are the same.

    The caller has the folder's :class:`~trl_ext.files.lock.RunLock`. A folder whose run was killed before its
    configuration was written counts as empty.

    Raises:
        RunExists: the folder of a new run is not empty.
        CheckpointError: the folder holds no run to resume, or a run of another configuration or of other data.
    """
    config = run.config
    if resume:
        must_hold_run(folder)
        saved = parse_config(read_values(folder / CONFIG), str(folder / CONFIG))
        loop = bool(config.stages)
        was, now = (lasting(dataclasses.asdict(one)) for one in (saved, config))
        changed = decisions_changed(was, now)
        if loop:  # its rounds are compared by their evaluations, and no checkpoint knows its batch
            changed += changes(_of_rounds(saved), _of_rounds(config))
        length = "loop.rounds" if loop else "updates"
        longer = (config.loop.rounds > saved.loop.rounds) if loop else config.updates > saved.updates
        changed = [line for line in changed if not (longer and line.startswith(f"{length} was "))]
        if changed:
            raise CheckpointError(
                f"{folder}: its run was started with another configuration ({'; '.join(changed[:MOST_FAULTS])}); "
                f"resume with the same one, in which {length} may be more and what decides no weights may "
                "change (docs/commands.md). To train with other options, start another run, in another "
                f"output_dir, {begin_from(folder, saved)}"
            )
        if longer:
            _make_room(folder, saved)
        elif has_ended(folder, config):
            return
    else:
        must_be_free(folder)
    tasks: dict[str, Any] = dict(tasks_by_name(run.task, run.held_out, run.curriculum))
    data = {name: fingerprint(task) for name, task in tasks.items()}
    modules = module_fingerprints(config)
    if resume:
        data = check_data(folder, data) | data
        check_data(folder, modules, FINGERPRINTS, "module")
        evaluate_again(folder, was, now)
    replace_file(folder / CONFIG, dump_yaml(lasting(dataclasses.asdict(config))))
    remember_data(folder, data)
    if modules:
        remember_data(folder, modules, FINGERPRINTS)


def _make_room(folder: Path, saved: Config) -> None:
    """Set aside what a run had at its end, because it is made longer. A loop goes on from its last round.

    Raises:
        CheckpointError: it has no checkpoint from which it could go on.
    """
    if not saved.stages and not numbered_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: cannot be made longer, because it has no checkpoint (training.save_steps was 0); start another "
            f"run, in another output_dir, {begin_from(folder, saved)}"
        )
    if has_final(folder):  # the trainer would do it too, and a process that is killed before must find no end
        RunFolder(folder).set_results_aside()


def has_ended(folder: Path, config: Config) -> bool:
    """Return whether the run in ``folder`` has its final weights, and their evaluation if it has one."""
    evaluated = not config.evaluation.questions or (folder / AFTER).exists()
    return evaluated and has_final(folder)


def must_hold_run(folder: Path) -> None:
    """Check that ``folder`` has the configuration of a run.

    Raises:
        CheckpointError: it has none, or an empty one.
    """
    if not (folder / CONFIG).is_file() or not (folder / CONFIG).stat().st_size:
        rest = rest_of(folder) - {CONFIG} if folder.is_dir() else set()
        remedy = f"restore it, or start in another folder; it holds {min(rest)}" if rest else "start without --resume"
        raise CheckpointError(f"{folder}: no {CONFIG}, so it holds no run to resume; {remedy}")


def must_be_free(folder: Path) -> None:
    """Check that a new run may have ``folder``.

    Raises:
        RunExists: it holds something.
    """
    file = folder / CONFIG
    unwritten = file.is_file() and not file.stat().st_size  # earlier versions could be killed before they wrote it
    if holds_something(folder) and not (unwritten and rest_of(folder) == {CONFIG}):
        other = "choose another folder (--set output_dir=...)"
        remedy = f"Go on with its run (--resume), or {other}" if file.is_file() else other.capitalize()
        raise RunExists(f"{folder}: exists and is not empty; nothing was overwritten. {remedy}")


def _of_rounds(config: Config) -> dict[str, Any]:
    """Return what the rounds of a loop may not change, and the updates of a run may."""
    return {
        "evaluation": dataclasses.asdict(config.evaluation),
        "questions of an update": config.questions_per_update(),
    }
