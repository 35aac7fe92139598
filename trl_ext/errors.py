"""Errors that a user can act on. Imports nothing."""


class UserError(Exception):
    """An error that the user or the environment of the run caused, and not a fault of this library.

    The command line prints its message as one line and ends with ``exit_status``. Other exceptions keep their
    traceback.
    """

    exit_status = 1


def one_line(error: object, most: int | None = None) -> str:
    """Return what an error of a library says, for a message, in one line of at most ``most`` characters.

    >>> one_line(ValueError("no such\\n    file"), 10)
    'no such fi'
    """
    return " ".join(str(error).split())[:most]
