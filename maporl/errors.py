"""Errors that a user can act on, with the exit status of the command. Imports no torch.

An error of one part is declared in that part, such as ``maporl.rewards.base.RewardFailure``. This module has the errors
that many parts raise.
"""

import json
from pathlib import Path

from trl_ext.errors import UserError

__all__ = ["ConfigError", "RunError", "UserError", "install_command"]


class ConfigError(UserError, ValueError):
    """A configuration cannot run. The message says what is wrong, where, what was expected, and what to do."""

    exit_status = 2


class RunError(UserError, RuntimeError):
    """A folder is not a run, or its run cannot be read. The message names the file and, if possible, the line."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, such as "quantized".

    It names the place from which maporl was installed, because maporl may be on no package index. That is the checkout,
    or the address that pip recorded.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # it takes longer to load than all errors
    from urllib.parse import unquote, urlsplit

    try:
        source = json.loads(distribution("maporl").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        checkout = Path(__file__).parents[1]
        source = (
            {"url": checkout.as_uri(), "dir_info": {"editable": True}} if (checkout / "pyproject.toml").exists() else {}
        )
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(source['url']).path)}[{extra}]'"
    vcs = f"{source['vcs_info']['vcs']}+" if "vcs_info" in source else ""
    return f"pip install 'maporl[{extra}]{f' @ {vcs}' + source['url'] if source else ''}'"
