"""Errors that a user can act on, with the exit status of a command that meets them. Imports no torch.

An error that belongs to one part is declared beside it (``maporl.rewards.base.RewardFailure``, ...); here are those that many
parts raise.
"""

from trl_ext.errors import UserError

__all__ = ["ConfigError", "RunError", "UserError"]


class ConfigError(UserError, ValueError):
    """A configuration that cannot run: says what, where, what was got, what was expected, and what to do."""

    exit_status = 2


class RunError(UserError, RuntimeError):
    """The folder is not a run, or it cannot be read; names the file and the line."""
