"""How the server listens and what it refuses; the command line is made from these fields. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from maporl.config.schema import TOKEN_VARIABLE
from maporl.guard.listening import ServerError as ServerError
from maporl.guard.listening import bound, check_reach, token_in
from trl_ext.ppo.options import option


def must_be_free(host: str, port: int) -> None:
    """Check that a server can listen on a port, before it loads models. Port 0 takes any that is free.

    Raises:
        ServerError: the port is taken, may not be used, or the host is not an address of this machine.
    """
    bound(host, port).close()


def read_token(file: Path | None) -> str | None:
    """Return the token in ``file``, or without a file that in the environment (:func:`token_in`)."""
    return token_in(file, TOKEN_VARIABLE)


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
        check_reach(self.host, self.token, TOKEN_VARIABLE)
