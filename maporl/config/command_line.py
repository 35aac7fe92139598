"""What every command of every program here shares: options from dataclasses, and one line for a user's mistake.

An option is declared once, as a field of the dataclass that the code behind the command takes. :func:`command` reads
the fields, so that the command line can neither miss an option nor disagree about a default. Imports no torch.
"""

import atexit
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer

from maporl.errors import ConfigError, UserError, is_own, lacking
from maporl.text import printable
from trl_ext.files.atomic import NO_ROOM
from trl_ext.process.interruptions import TERMINATED, Interrupted, Terminated, leave_soon
from trl_ext.process.messages import tell


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn ``function`` into a command that typer can register.

    A parameter whose annotation is a dataclass becomes one option for each field, and ``function`` is given the
    dataclass, built from what the user typed. The other parameters are typer's own. All of it runs inside
    :func:`known_errors`. If ``function`` has a parameter ``quiet`` and the user sets it, standard output is silent.

    A field's type is the option's type. A field whose default is a tuple becomes an option that may be given several
    times. A class's own fields come before the fields that it inherits. :func:`trl_ext.ppo.options.option` declares a
    field, with:

    - ``help``: the option's help text.
    - ``name``: the option's name, if it is not the field's name with dashes.
    - ``show_default``: the text that the help page shows in place of the default.
    - ``read``: a function of one argument that turns the option's value into the field's value. The option then has
      the type of that argument.
    """
    signature = inspect.signature(function)
    built: dict[str, Any] = {p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)}

    @wraps(function)
    def run(**options: Any) -> None:
        with known_errors(options.get("quiet", False)):
            options = with_home(options)
            for name, kind in built.items():
                options[name] = kind(**{field.name: _read(field, options.pop(field.name)) for field in fields(kind)})
            function(**options)

    parameters: list[Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in built:
            parameters += _options(built[parameter.name])
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    # typer reads both
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def with_home(value: Any) -> Any:
    """Return what a user typed with the home folder in every word that begins with ``~/``, as ``--output=~/runs``.

    Shells write it only where such a word stands alone.
    """
    if isinstance(value, dict):
        return {name: with_home(part) for name, part in value.items()}
    if isinstance(value, list):
        return [with_home(part) for part in value]
    known = isinstance(value, str | Path) and str(value).startswith("~/")
    return type(value)(os.path.expanduser(value)) if known else value


@contextmanager
def known_errors(quiet: bool = False) -> Iterator[None]:
    """Turn a user's mistake into one line on standard error and an exit status; every other error keeps its trace.

    With ``quiet``, nothing is shown of what the block prints on standard output.

    Raises:
        SystemExit: with the status of a :class:`UserError`, 2 for a package of maporl that is missing, 1 for a full
            disk and for a file that the system refuses, 130 after Ctrl-C, and 143 after SIGTERM.
    """
    with redirect_stdout(StringIO()) if quiet else nullcontext():
        try:
            yield
        except (Interrupted, Terminated) as stopped:  # the run has already said where it is saved
            sys.exit(TERMINATED if isinstance(stopped, Terminated) else 130)
        except UserError as error:
            _fail(error, error.exit_status)
        except ModuleNotFoundError as error:  # an extension that another one is built on
            if not is_own(error):
                raise
            _fail(ConfigError(f"this command needs {lacking(error)}"), ConfigError.exit_status)
        except OSError as error:
            if error.errno not in NO_ROOM and error.filename is None:
                raise
            _fail(error, 1)


class PrintableFormatter(logging.Formatter):
    """Formats log records with their control characters made visible (:func:`maporl.text.printable`)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``."""
        return printable(super().format(record))


def log_requests() -> None:
    """Let a server write its log to standard error."""
    log = logging.StreamHandler()
    log.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log])


class Messages(logging.Handler):
    """Writes log records to standard error, each on a line of its own also while a progress bar of tqdm is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``. What cannot be written ends no run: logging says so, as of its own handlers."""
        try:
            tell(self.format(record))
        except Exception:
            self.handleError(record)


def run_program(app: Callable[..., Any], **options: Any) -> None:
    """Run the typer ``app`` as the whole program: nothing of this process goes on after it.

    A run that a signal has stopped is saved by then, and the process ends within seconds, whatever hangs.
    """
    printable_messages()
    ends: list[int] = []
    atexit.register(_leave, os.getpid(), ends)  # before a library registers anything, so that it is the last
    try:
        app(**options)
    except SystemExit as end:
        if isinstance(end.__context__, Interrupted | Terminated):
            leave_soon(int(end.code or 0))
        ends.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _leave(process: int, ends: list[int]) -> None:
    """End the process before the interpreter takes itself apart, which takes a second after torch was loaded.

    Threads of libraries that run on would be killed meanwhile, in the middle of C++, which ends the process with
    "terminate called without an active exception".
    """
    if ends and os.getpid() == process:
        logging.shutdown()
        with suppress(OSError, ValueError):
            print(end="", flush=True)
        os._exit(ends[0])


def printable_messages() -> None:
    """Make control characters visible in what Python itself prints: warnings, log records and traces.

    They quote texts of servers, data sets and configurations. Programs call this once, before their commands.
    """
    formatted = warnings.formatwarning

    def trace(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))

    def warning(*parts: Any, **named: Any) -> str:
        return printable(formatted(*parts, **named))

    sys.excepthook, warnings.formatwarning = trace, warning
    logging.lastResort = Messages(logging.WARNING)  # type: ignore[assignment]  # of records that nobody else handles
    logging.lastResort.setFormatter(PrintableFormatter())


def _fail(error: Exception, status: int) -> NoReturn:
    typer.echo(printable("\n".join([f"error: {error}", *getattr(error, "__notes__", ())])), err=True)
    sys.exit(status)


def _options(kind: type) -> list[Parameter]:
    """Return one keyword parameter, annotated for typer, for each field of the dataclass ``kind``."""
    depth = {name: n for n, parent in reversed([*enumerate(kind.__mro__)]) for name in inspect.get_annotations(parent)}
    hints = get_type_hints(kind)
    return [_option(field, hints[field.name]) for field in sorted(fields(kind), key=lambda field: depth[field.name])]


def _option(field: Field, hint: Any) -> Parameter:
    default = Parameter.empty if field.default is MISSING else field.default
    if "read" in field.metadata:
        (hint,) = (p.annotation for p in inspect.signature(field.metadata["read"]).parameters.values())
    elif isinstance(default, tuple):
        hint, default = list[get_args(hint)[0]] | None, [*default] or None  # type: ignore[misc]
    name = field.metadata.get("name", f"--{field.name.replace('_', '-')}")
    show = field.metadata.get("show_default", True)
    option = typer.Option(name, help=field.metadata.get("help"), show_default=show)
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])


def _read(field: Field, value: Any) -> Any:
    """Return the value of ``field`` for the value of its option."""
    if "read" in field.metadata:
        return field.metadata["read"](value)
    return tuple(value or ()) if isinstance(field.default, tuple) else value
