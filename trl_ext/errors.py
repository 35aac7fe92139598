"""Errors that a user can act on, and how they are shown. Imports nothing but Python's own modules."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

WHOLE = "MAPORL_TRACEBACK"
"""With any value of this environment variable, traces keep the frames of this library."""
NOT_USERS = {Path(__file__).resolve().parent, Path(os.__file__).resolve().parent}
"""The folders of code that is not the user's, besides those of installed packages. A package that is built on this one
adds its own."""

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class UserError(Exception):
    """An error that the user or the environment of the run caused, and not a fault of this library.

    The command line prints its message as one line and ends with ``exit_status``. In Python its trace has the lines of
    the user's code alone (:func:`short_trace`). Other exceptions keep their traceback.
    """

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows of the error: IPython calls this, and so no notebook's hooks need be changed."""
        if WHOLE not in os.environ:
            shorten(self)
        return "".join(traceback.format_exception(self)).splitlines()


class ArgumentError(UserError, ValueError):
    """An argument of a user, such as a function, does not fit its use. The message says what was expected."""


def short_trace(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Let a :class:`UserError` that leaves ``function`` have a trace without the lines of this library.

    What is called by users directly is decorated, and nothing else of the process is changed: ``sys.excepthook`` is the
    program's. With :data:`WHOLE` in the environment, traces are whole.
    """

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            if WHOLE not in os.environ:
                shorten(error)
            raise

    return called


def shorten(error: BaseException) -> None:
    """Leave only the frames of the user's code in the trace of ``error``, and only causes that have such frames."""
    error.__traceback__ = _users_frames(error.__traceback__)
    cause = _reason(error)
    while cause is not None and _users_frames(cause.__traceback__) is None:
        cause = _reason(cause)
    error.__cause__ = cause
    if cause is not None:
        shorten(cause)


def _reason(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` without the frames of this library, of Python and of installed packages."""
    if trace is None:
        return None
    rest = _users_frames(trace.tb_next)
    if not is_users(trace.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def is_users(file: str) -> bool:
    """Return whether a source file belongs neither to this library, nor to Python, nor to an installed package.

    What has no file, such as a cell of a notebook, is the user's.
    """
    path = Path(file)
    installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    return not (file.startswith("<frozen") or installed or any(path.is_relative_to(folder) for folder in NOT_USERS))


@contextmanager
def retold(
    errors: type[BaseException] | tuple[type[BaseException], ...],
    tell: Callable[[Any], BaseException],
    but: type[BaseException] | tuple[()] = (),
    cause: bool = False,
) -> Iterator[None]:
    """Turn errors of the block into what ``tell`` makes of them, such as one with the place and what to do.

    >>> with retold(KeyError, lambda error: ValueError(f"options: no {error}")):
    ...     {}["a"]
    Traceback (most recent call last):
    ValueError: options: no 'a'

    Args:
        errors: what is turned.
        tell: the error that is raised in its place.
        but: errors that leave the block as they are, because they say all this already.
        cause: whether the first error is shown above it.
    """
    try:
        yield
    except but:
        raise
    except errors as error:
        raise tell(error) from (error if cause else None)


def one_line(error: object, most: int | None = None) -> str:
    """Return what an error of a library says, for a message, in one line of at most ``most`` characters.

    What a terminal would obey, such as an escape, is shown as it is written in Python.

    >>> one_line(ValueError("no such\\n    file"), 10)
    'no such fi'
    >>> one_line("\\x1b[31mred")
    '\\\\x1b[31mred'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(str(error).split())[:most])
