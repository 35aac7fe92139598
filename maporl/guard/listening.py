"""Where a server listens, and who may ask it. Imports no torch."""

import errno
import os
import socket
from pathlib import Path

from maporl.hosts import is_loopback
from maporl.text import read_users_text
from trl_ext.errors import UserError

SHORTEST_TOKEN = 16


class ServerError(UserError, ValueError):
    """Options that a server cannot start with."""

    exit_status = 2


def token_in(file: Path | None, variable: str) -> str | None:
    """Return the token in ``file``. Without a file, return that in the environment, or None without that one too.

    Raises:
        ServerError: ``file`` cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(variable, "").strip() or None
    try:
        token = read_users_text(file).strip()
    except (OSError, UnicodeError) as error:
        raise ServerError(f"--token-file {file}: cannot be read ({type(error).__name__})") from error
    if not token:
        raise ServerError(f"--token-file {file}: is empty; expected the token on one line")
    return token


def check_reach(host: str, token: str | None, variable: str) -> None:
    """Check that a server that others can reach has a token, and that this is one.

    Raises:
        ServerError: it has none, or one that is too short.
    """
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii()):
        raise ServerError(
            f"token: expected at least {SHORTEST_TOKEN} ASCII characters, got {len(token)}; make one with "
            "'python -c \"import secrets; print(secrets.token_urlsafe(32))\"'"
        )
    if token is None and not is_loopback(host):
        raise ServerError(
            f"--host {host}: others can reach this address, so a token is needed; set {variable} or "
            "--token-file, or listen on 127.0.0.1"
        )


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port, so that a server can listen there once it has loaded its models. Port 0 takes
    any that is free.

    Raises:
        ServerError: the port is taken, may not be used, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once on sockets that name TCP
    held = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        taken = error.errno == errno.EADDRINUSE
        what = "is taken, perhaps by another server" if taken else f"cannot be listened on ({error.strerror or error})"
        remedy = "stop it, or choose another --port" if taken else "choose another --host or --port"
        raise ServerError(f"--host {host} --port {port}: the port {what}; {remedy}") from None
    return held
