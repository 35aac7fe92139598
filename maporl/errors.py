"""Errors that a user can act on, with the exit status of the command. Imports no torch.

An error of one part is declared in that part, such as ``maporl.rewards.base.RewardFailure``. This module has the errors
that many parts raise.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from trl_ext.errors import NOT_USERS, UserError
from trl_ext.errors import one_line as one_line

Run = TypeVar("Run")


NOT_USERS |= {Path(__file__).resolve().parent, Path(__file__).resolve().parents[1] / "reward_server"}


class ConfigError(UserError, ValueError):
    """A configuration cannot run. The message says what is wrong, where, what was expected, and what to do."""

    exit_status = 2


class RunError(UserError, RuntimeError):
    """A folder is not a run, or its run cannot be read. The message names the file and, if possible, the line."""


@dataclass(frozen=True)
class Fault:
    """A fault of a run that is found before it starts. The components of a run yield it (``check(run)``), and
    :func:`refuse` raises it.

    Args:
        key: the option, as the YAML file names it, such as ``branching.resample``.
        what: what is wrong with it: what it is, and what is expected.
        remedy: what to do.
        severity: "error" if the run cannot start, and "warning" if it works but is hardly ever what was meant.
    """

    key: str
    what: str
    remedy: str = ""
    severity: Literal["error", "warning"] = "error"

    @classmethod
    def of(cls, error: ValueError, severity: Literal["error", "warning"] = "error") -> "Fault":
        """Return what a part said when it refused something; its message begins with the option."""
        key, _, what = str(error).partition(": ")
        return cls(key, what, "", severity) if what else cls("configuration", key, "", severity)

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


def refused(build: Callable[[], object]) -> Iterator[Fault]:
    """Yield the errors with which a part refuses to be built, if it does."""
    try:
        build()
    except ValueError as error:
        yield from (Fault.of(ValueError(line)) for line in _lines(error))


def each(parts: Iterable[Callable[[Run], Iterable[Fault]]], run: Run) -> Iterator[Fault]:
    """Yield what each of ``parts`` says of a run. One that cannot be built is a fault, and the others are asked too."""
    for part in parts:
        try:
            yield from part(run)
        except UserError as error:
            yield from (Fault.of(ValueError(line)) for line in _lines(error))


def refuse(faults: Iterable[Fault], where: str = "") -> list[str]:
    """Return the warnings among ``faults`` as lines, if none of them is an error.

    Args:
        faults: what the parts of a run say.
        where: where the run comes from, with which the message of an error begins.

    Raises:
        ConfigError: some of them are errors. The message is the first one, and each of the others is a note, which the
            command line and a traceback show below it.
    """
    errors: list[str] = []
    warnings: list[str] = []
    try:
        for fault in faults:
            if fault.severity == "error":
                named = not where or str(fault).startswith(f"{where}: ")  # a part that knows where it is from says so
                errors.append(str(fault) if named else f"{where}: {fault}")
            else:
                warnings.append(f"warning: {fault}")
    except Exception as error:
        if not errors:
            raise
        if isinstance(error, UserError):  # what else is raised may follow from the errors before it
            errors += _lines(error)
    if errors:
        refusal = ConfigError(errors[0])
        for number, other in enumerate(errors[1:], 1):
            if not any(other in earlier for earlier in errors[:number]):  # a part may say again what another one said
                refusal.add_note(f"error: {other}")
        raise refusal from None
    return warnings


def _lines(error: Exception) -> list[str]:
    """Return what an error says, and what :func:`refuse` has noted below it."""
    return [str(error), *(note.removeprefix("error: ") for note in getattr(error, "__notes__", ()))]


def is_own(error: ModuleNotFoundError) -> bool:
    """Return whether the module that was not found is one of this distribution."""
    return str(error.name).partition(".")[0] in ("maporl", "reward_server", "trl_ext")


def lacking(error: ModuleNotFoundError) -> str:
    """Return which package is missing, and how to install it, for the end of a sentence."""
    if is_own(error):
        return f"{error.name}, which this copy of maporl lacks; install all of it: {install_command()}"
    return f"the package {error.name}; pip install {error.name}"


def install_command(extra: str | None = None) -> str:
    """Return the command that installs the packages of an extra, such as "quantized", or by default maporl itself.

    It names the place from which maporl was installed, which is the checkout, or the address that pip recorded. If none
    is recorded, it names the packages themselves: on an index, the name of maporl may be somebody else's.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # it takes longer to load than all errors
    from urllib.parse import unquote, urlsplit

    checkout, named = Path(__file__).parents[1], "" if extra is None else f"[{extra}]"
    source, required = None, None
    with suppress(PackageNotFoundError, ValueError):
        installed = distribution("maporl")
        required = installed.requires or ()
        source = json.loads(installed.read_text("direct_url.json") or "null")
    # in a checkout, Python may find what an install has left there
    if not source and (required is None or (checkout / "pyproject.toml").is_file()):
        source = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    if source and "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(source['url']).path)}{named}'"
    if not source and extra is None:
        return "pip install --force-reinstall, with the file or address from which it was installed"
    if not source:
        marker = f'extra == "{extra}"'
        needed = [one.partition(";")[0].strip() for one in required or () if marker in one.replace("'", '"')]
        return f"pip install {' '.join(map(repr, needed))}"
    vcs = f"{source['vcs_info']['vcs']}+" if "vcs_info" in source else ""
    return f"pip install 'maporl{named} @ {vcs}{source['url']}'"
