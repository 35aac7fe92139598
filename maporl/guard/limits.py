"""What a server takes from those who connect to it. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a server. Sizes are in bytes, and times in seconds.

    Args:
        connections: the most connections at once. They are at most half of the files that the process may open, so that
            the other half is left for what else it does.
        by_peer: the most connections from one address other than this machine.
        seconds: a head must have arrived within this, and then a body.
        idle: a connection is closed after so long without a request.
        head: the largest head of a request.
        body: the largest body.
        held: the bytes that all bodies in progress may have together.
    """

    connections: int = 1024
    by_peer: int = 256
    seconds: float = 10.0
    idle: int = 30
    head: int = 2**16
    body: int = 8 * 2**20
    held: int = 256 * 2**20
