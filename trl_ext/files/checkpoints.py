"""The checkpoints in a run's folder: find them, choose the one to resume from, set aside and remove.

Imports no torch.
"""

import logging
import re
import shutil
from os.path import realpath
from pathlib import Path

from trl_ext.files.manifest import MANIFEST, CheckpointError, DamagedCheckpoint, verify
from trl_ext.files.set_aside import set_aside

logger = logging.getLogger(__name__)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return [folder for folder in numbered_checkpoints(output_dir) if (folder / MANIFEST).is_file()]


def numbered_checkpoints(output_dir: Path) -> list[Path]:
    """Return everything in ``output_dir`` that has the name of a checkpoint, complete or not, oldest first."""
    paths = [p for p in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", p.name)]
    return sorted(paths, key=_number)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def place_of(checkpoint: Path, output_dir: Path) -> Path | None:
    """Return the path of ``checkpoint`` among those in ``output_dir``, or None if it lies elsewhere."""
    return next((path for path in numbered_checkpoints(output_dir) if realpath(path) == realpath(checkpoint)), None)


def newest_whole(folders: list[Path]) -> Path:
    """Return the last of ``folders`` that is undamaged. A warning names each damaged checkpoint.

    Raises:
        CheckpointError: every checkpoint is damaged, or a newer one cannot be read or has a file that it should not
            have.
    """
    for folder in reversed(folders):
        try:
            verify(folder)
        except DamagedCheckpoint as error:
            logger.warning("%s; going on from an older one", error)
        else:
            return folder
    raise CheckpointError(
        f"{folders[-1].parent}: every checkpoint is damaged ({len(folders)} found); nothing was changed. Restore one "
        "from a backup, or start the run again in another folder"
    )


def set_later_aside(output_dir: Path, resumed: Path, step: int, why: str) -> list[Path]:
    """Rename the checkpoints in ``output_dir`` that a run would write again when it resumes from ``resumed``.

    The newest one is renamed first, so that a run that is killed in between can resume from the newest that is left.

    Args:
        output_dir: the run's folder.
        resumed: the checkpoint that the run resumes from.
        step: the number of its update.
        why: what the names of the others end with.

    Returns:
        The checkpoints under their new names.

    Raises:
        OSError: a checkpoint cannot be renamed.
    """
    later = [p for p in numbered_checkpoints(output_dir) if _number(p) >= step and realpath(p) != realpath(resumed)]
    return [set_aside(path, why) for path in reversed(later)]


def check_space(folder: Path, size: int) -> None:
    """Check that ``size`` bytes can be written into ``folder``, which exists.

    Quotas are not seen, and other programs may need the space later.

    Raises:
        CheckpointError: there is less space.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(
            f"{folder}: a checkpoint takes {size / 1e9:.2f} GB or more, but {free / 1e9:.2f} GB are free; free some "
            "space, or choose another output_dir"
        )


def size_of(checkpoint: Path) -> int:
    """Return the bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def remove_old(output_dir: Path, keep: int | None, best: int | None = None) -> None:
    """Remove the oldest checkpoints beyond the last ``keep`` (``save_total_limit``). None keeps all of them.

    The checkpoint of update ``best`` is one of those that are kept, and so is the last one. A checkpoint that cannot be
    removed stays, and a warning names it.
    """
    if keep is None or keep <= 0:
        return
    others = [folder for folder in list_checkpoints(output_dir) if _number(folder) != best]
    for folder in others[: -(keep if best is None else max(1, keep - 1))]:
        hidden = folder.with_name(f".partial-{folder.name}")  # half a checkpoint must not have a checkpoint's name
        try:
            folder.rename(hidden)
        except OSError as error:  # the new checkpoint is written, so the run can go on
            logger.warning("%s: could not be removed (%s); remove it by hand", folder, error)
        else:
            discard(hidden)


def discard(path: Path) -> None:
    """Remove a folder, or a link to one. A warning names what cannot be removed, because a run need not end for it."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s: could not be removed (%s); remove it by hand", path, error)
