"""Errors that a user can act on, with the exit status of the command. Imports no torch.

An error of one part is declared in that part, such as ``maporl.rewards.base.RewardFailure``. This module has the errors
that many parts raise.
"""

from trl_ext.errors import UserError

__all__ = ["ConfigError", "RunError", "UserError"]


class ConfigError(UserError, ValueError):
    """A configuration cannot run. The message says what is wrong, where, what was expected, and what to do."""

    exit_status = 2


class RunError(UserError, RuntimeError):
    """A folder is not a run, or its run cannot be read. The message names the file and, if possible, the line."""
