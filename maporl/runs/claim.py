"""Take the output folder for a run, so that no two runs share one and no run is overwritten."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_yaml, to_yaml
from maporl.config.imports import FINGERPRINTS
from maporl.run import ResolvedRun
from maporl.storage.run_folder import RunExists, RunFolder, has_final
from maporl.tasks.base import tasks_by_name
from maporl.training.run_record import AFTER, CONFIG, module_fingerprints, rest_of
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
        saved = parse_config(read_yaml(folder / CONFIG), str(folder / CONFIG))
        # the run's folder and the user's own modules may have moved, and it may go on with other processes
        moved = _with_on_change(replace(saved, pythonpath=config.pythonpath, cluster=config.cluster), config)
        loop = bool(config.loop.stages)
        longer = config.loop.rounds > saved.loop.rounds if loop else config.updates > saved.updates
        if longer:
            rounds = replace(moved.loop, rounds=config.loop.rounds)
            moved = replace(moved, loop=rounds) if loop else replace(moved, updates=config.updates)
        begun = replace(moved, output_dir=config.output_dir)
        if begun != config:
            changed = first_change(begun, config)
            length = "loop.rounds" if loop else "updates"
            raise CheckpointError(
                f"{folder}: its run was started with another configuration ({changed}); resume with the same one, in "
                f"which {length} alone may be more. To train with other options, start another run, in another "
                f"output_dir, from its weights: agents.NAME.model={folder}/final/NAME"
            )
        if longer:
            _make_room(folder, loop)
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
        if moved != saved:
            replace_file(folder / CONFIG, to_yaml(moved))
    else:
        replace_file(folder / CONFIG, to_yaml(config))
    remember_data(folder, data)
    if modules:
        remember_data(folder, modules, FINGERPRINTS)


def _make_room(folder: Path, loop: bool) -> None:
    """Set aside what a run had at its end, because it is made longer. A loop goes on from its last round.

    Raises:
        CheckpointError: it has no checkpoint from which it could go on.
    """
    if not loop and not numbered_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: cannot be made longer, because it has no checkpoint (training.save_steps was 0); start another "
            f"run, in another output_dir, from its weights: agents.NAME.model={folder}/final/NAME"
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


def first_change(old: Config, new: Config) -> str:
    """Return the first line in which two configurations differ, as it was and as it is."""
    lines = zip(to_yaml(old).split("\n"), to_yaml(new).split("\n"), strict=False)
    pairs = [(a.strip(), b.strip()) for a, b in lines if a != b]
    return f"was {pairs[0][0]!r}, is {pairs[0][1]!r}" if pairs else "it has other keys"


def _with_on_change(saved: Config, config: Config) -> Config:
    """Return ``saved`` with what ``config`` says of another verifier: a run that stopped for one may go on with it."""
    was, now = saved.reward.verifier, config.reward.verifier
    if was is None or now is None:
        return saved
    return replace(saved, reward=replace(saved.reward, verifier=replace(was, on_change=now.on_change)))
