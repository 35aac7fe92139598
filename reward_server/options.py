"""How the server listens and what it refuses. No torch."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from maporl.config.schema import TOKEN_VARIABLE
from trl_ext.errors import UserError

SHORTEST_TOKEN = 16


class ServerError(UserError, ValueError):
    """Options that the server cannot start with."""

    exit_status = 2


@dataclass(frozen=True)
class ServerOptions:
    """``host`` other than a loopback address needs a ``token``. Sizes are most allowed; times are seconds.

    ``batch_tokens``: tokens of one forward, padding included (None: 16384 on a GPU, 1024 elsewhere); ``queue_items``: chats that may wait, and then the server
    answers 429; ``body_bytes``, ``chat_tokens``: larger requests and chats are refused; ``body_seconds``: for a client to
    send a whole request; ``answer_seconds``: for the server to answer; ``drain_seconds``: for requests in progress when
    the server is asked to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8501
    token: str | None = None
    batch_tokens: int | None = None
    queue_items: int = 8192
    body_bytes: int = 8 * 2**20
    chat_tokens: int | None = None
    body_seconds: float = 10.0
    answer_seconds: float = 120.0
    drain_seconds: int = 30

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
        if self.token is None and not _is_loopback(self.host):
            raise ServerError(
                f"--host {self.host}: others can reach this address, so a token is needed; set {TOKEN_VARIABLE} or "
                "--token-file, or listen on 127.0.0.1"
            )


def read_token(file: Path | None) -> str | None:
    """The token in ``file``, else in the environment, else none."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"--token-file {file}: cannot be read ({type(error).__name__})") from error
    if not token:
        raise ServerError(f"--token-file {file}: is empty; expected the token on one line")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may stand for any address
