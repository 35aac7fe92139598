"""Move what a resumed run no longer uses out of its way, under another name. Nothing is deleted. Imports no torch.

A run that resumes from an older checkpoint leaves a branch behind: later checkpoints, records and results. They become
``NAME.abandoned``. A damaged checkpoint becomes ``checkpoint-N.damaged``. No command reads files of these names.
"""

from collections.abc import Iterator
from itertools import count
from os.path import lexists
from pathlib import Path

from trl_ext.files.atomic import flush, replace_file
from trl_ext.files.jsonl import DamagedRecord, whole_lines

ABANDONED, DAMAGED = "abandoned", "damaged"


def set_aside(path: Path, why: str) -> Path:
    """Rename ``path`` to ``NAME.WHY``, or to ``NAME.WHY-2`` and so on if that exists, and return the new path.

    Raises:
        OSError: the file or folder cannot be renamed.
    """
    names = (f"{path.name}.{why}" + (f"-{number}" if number > 1 else "") for number in count(1))
    target = next(path.with_name(name) for name in names if not lexists(path.with_name(name)))
    path.rename(target)
    flush(path.parent)
    return target


def set_records_aside(file: Path, step: int) -> Path | None:
    """Move the records after ``step`` from a JSONL file to the end of ``FILE.abandoned``.

    The other lines do not change, but a last line that a crash has cut off is removed.

    Returns:
        The file that the records were moved to, or None if nothing was moved.

    Raises:
        DamagedRecord: a line that is not the last one is damaged, or has no step.
        OSError: a file cannot be read or written.
    """
    for left in file.parent.glob(f".partial-*-{file.name}*"):  # of a process that was killed while it did this
        left.unlink()
    earlier: list[str] = []
    later: list[str] = []
    content, start = file.read_bytes(), 0
    for end, its_step in _steps(file):
        (earlier if its_step <= step else later).append(content[start:end].strip().decode() + "\n")
        start = end
    aside = file.with_name(f"{file.name}.{ABANDONED}")
    if later:
        # a process that is killed between the two writes leaves the lines in both files, and never in neither
        replace_file(aside, (aside.read_text(encoding="utf-8") if aside.exists() else "") + "".join(later))
    if "".join(earlier).encode() != content:
        replace_file(file, "".join(earlier))
    return aside if later else None


def check_records(file: Path) -> None:
    """Check that :func:`set_records_aside` can read every line of ``file``, if the file exists.

    Raises:
        DamagedRecord: a line that is not the last one is damaged, or has no step.
    """
    if file.exists():
        for _ in _steps(file):
            pass


def _steps(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the position after each line of a JSONL file, and its record's step."""
    for number, (end, record) in enumerate(whole_lines(file), 1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise DamagedRecord(f"{file}: record {number} has no 'step'; repair it, or remove its line")
        yield end, record["step"]
