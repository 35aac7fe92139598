"""Errors that a user can act on. Imports nothing."""


class UserError(Exception):
    """An error that the user or the environment of the run caused, and not a fault of this library.

    The command line prints its message as one line and ends with ``exit_status``. Other exceptions keep their
    traceback.
    """

    exit_status = 1
