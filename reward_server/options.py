"""How the server listens and what it refuses; the command line is made from these fields. Imports no torch."""

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from maporl.config.schema import TOKEN_VARIABLE
from maporl.hosts import is_loopback
from maporl.text import read_users_text
from trl_ext.errors import UserError
from trl_ext.ppo.options import option

SHORTEST_TOKEN = 16


class ServerError(UserError, ValueError):
    """Options that the server cannot start with."""

    exit_status = 2


def read_token(file: Path | None) -> str | None:
    """The token in ``file``; without a file, the token in the environment, or None without that one too.

    Raises:
        ServerError: ``file`` cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = read_users_text(file).strip()
    except (OSError, UnicodeError) as error:
        raise ServerError(f"--token-file {file}: cannot be read ({type(error).__name__})") from error
    if not token:
        raise ServerError(f"--token-file {file}: is empty; expected the token on one line")
    return token


def must_be_free(host: str, port: int) -> None:
    """Check that a server can listen on a port, before it loads models. Port 0 takes any that is free.

    Raises:
        ServerError: the port is taken, may not be used, or the host is not an address of this machine.
    """
    try:
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=False
        ):
            pass
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        what = "is taken, perhaps by another server" if taken else f"cannot be listened on ({error.strerror or error})"
        remedy = "stop it, or choose another --port" if taken else "choose another --host or --port"
        raise ServerError(f"--host {host} --port {port}: the port {what}; {remedy}") from None


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, who may ask it, and its bounds. Sizes are upper bounds; times are in seconds.

    Raises:
        ServerError: a value is outside its range, or others can reach ``host`` without a ``token``.
    """

    host: str = option("127.0.0.1", "Address to listen on; any but loopback needs a token.")
    port: int = 8501
    token: str | None = option(
        None, f"Holds the bearer token; default: ${TOKEN_VARIABLE}.", name="--token-file", read=read_token
    )
    batch_tokens: int | None = option(None, "Tokens of one forward.", show_default="16384 on a GPU, else 1024")
    """Padding is counted."""
    queue_items: int = option(8192, "Chats that may wait before others get 429.")
    chat_tokens: int | None = option(None, "Longer chats are refused.", show_default="the model's context")
    body_bytes: int = option(8 * 2**20, "Larger requests are refused.")
    body_seconds: float = option(10.0, "A request must have arrived within this.")
    answer_seconds: float = option(120.0, "Requests not answered within this get 429.")
    drain_seconds: int = option(30, "Time that requests in progress get after SIGTERM.")

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ServerError(f"--port: expected 0 to 65535, got {self.port}")
        for name in ("batch_tokens", "queue_items", "body_bytes", "body_seconds", "answer_seconds", "drain_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ServerError(f"--{name.replace('_', '-')}: expected above 0, got {value}")
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not self.token.isascii()):
            raise ServerError(
                f"token: expected at least {SHORTEST_TOKEN} ASCII characters, got {len(self.token)}; make one with "
                "'python -c \"import secrets; print(secrets.token_urlsafe(32))\"'"
            )
        if self.token is None and not is_loopback(self.host):
            raise ServerError(
                f"--host {self.host}: others can reach this address, so a token is needed; set {TOKEN_VARIABLE} or "
                "--token-file, or listen on 127.0.0.1"
            )
