"""Errors that a user can act on. Imports nothing."""


class UserError(Exception):
    """Something the user did, or the surroundings of the run, and not a fault of this library.

    The command line prints its message as one line and ends with ``exit_status``; other exceptions keep their trace.
    """

    exit_status = 1
