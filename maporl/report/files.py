"""Reads single files of a run's folder, which are untrusted input: anybody may have changed them. No torch."""

import json
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from maporl.config.imports import extension
from maporl.config.safe_yaml import read_yaml_file
from maporl.errors import RunError, one_line
from maporl.evaluation.metrics import Evaluation
from maporl.text import visible
from trl_ext.errors import retold
from trl_ext.files.jsonl import DamagedRecord


def is_there(file: Path) -> bool:
    """Return whether a run has ``file``. Something else of that name is an error, so that nobody waits for a pipe.

    Raises:
        RunError: it is a link that leads nowhere, a folder or another thing than a file, or it cannot be looked at.
    """
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        if file.is_symlink():
            raise RunError(f"{file}: is a link that leads nowhere; put the file there, or remove the link") from None
        return False
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise RunError(f"{file}: expected a file, got {'a folder' if stat.S_ISDIR(mode) else 'a device or a pipe'}")
    return True


def read_config(file: Path) -> dict[str, Any]:
    """Return the values of a run's configuration; empty if it is missing.

    Raises:
        RunError: it cannot be read, or a value that a page puts into a sentence is of another kind.
    """
    if not is_there(file):
        return {}
    try:
        content = read_yaml_file(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunError(f"{file}: cannot be read: {one_line(error)}") from None
    content = content if isinstance(content, dict) else {}
    try:
        _TOLD.validate_python(content, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise RunError(f"{file}: {visible(where)}: {fault['msg']}, got {fault['input']!r:.60}") from None
    if content.get("agents") is not None:
        content["agents"] = {str(name): section or {} for name, section in content["agents"].items()}
    return content


MOST_CHARACTERS = 20_000
"""The most that is read of a file of sentences. A run writes shorter ones."""


def read_lines(file: Path) -> list[str]:
    """Return the lines of a small text file; none if it is missing."""
    if not is_there(file):
        return []
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(MOST_CHARACTERS).splitlines()


_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Tiny(TypedDict, total=False):
    layers: _Count


class _Api(TypedDict, total=False):
    model: str


class _Agent(TypedDict, total=False):
    tiny: _Tiny | None
    api: _Api | None


class _Sources(TypedDict, total=False):
    sources: dict[str, _Number] | None


class _Temperature(TypedDict, total=False):
    temperature: _Number | None


class _WarmStart(TypedDict, total=False):
    steps: _Count


class _Told(TypedDict, total=False):
    """The values of a configuration that a page puts into sentences. Older versions had fewer of them, or none."""

    updates: _Count | None
    agents: dict[Any, _Agent | None] | None
    reward: _Sources | None
    ppo: _Temperature | None
    evaluation: _Temperature | None
    warm_start: _WarmStart | None


_TOLD = TypeAdapter(_Told)


def _json(file: Path) -> Any:
    """The content of a JSON file; None if it is missing."""
    if not is_there(file):
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedRecord(f"{file}: cannot be read: {error}") from None


def unlike(what: str, then: str = "", kind: type[Exception] = DamagedRecord) -> AbstractContextManager[None]:
    """Turn the errors of reading a record that has another form into one, which says what it is not and why."""
    other = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
    return retold(other, lambda error: kind(f"{what} ({error!r:.200}){then}"))


def read_crossplay(file: Path) -> Any:
    """Return the cross-play in a run's folder (:class:`maporl.CrossPlay`), if it names the run. A copied or renamed
    folder may hold that of another run.

    Raises:
        RunError: the file cannot be read.
        DamagedRecord: it is not a cross-play.
    """
    if (content := _json(file)) is None:
        return None
    with unlike(f"{file}: is not a cross-play", "; write it again, or remove it"):
        play = extension("maporl.studies.crossplay.result:CrossPlay", "cross-play").from_json(content)
        named = any(Path(name).name == file.resolve().parent.name for name in play.runs)
        return play if named else None


def read_evaluation(file: Path) -> Evaluation | None:
    """Return the evaluation in a file; None if it is missing.

    Raises:
        RunError: the file cannot be read.
        DamagedRecord: it is not an evaluation.
    """
    if (content := _json(file)) is None:
        return None
    if not isinstance(content, dict) or not content.get("turns") or "flips" not in content:
        raise DamagedRecord(f"{file}: has no 'turns' and 'flips'; it was not written by this version of maporl")
    with unlike(f"{file}: is not an evaluation", " of this version of maporl"):
        return Evaluation.from_json(content)
