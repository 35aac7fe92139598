"""Which servers an adapter may connect to: those on this machine, unless the configuration says otherwise."""

from typing import Any
from urllib.parse import urlsplit

from maporl.errors import ConfigError
from maporl.hosts import is_loopback


def check_address(what: str, url: Any, network: bool) -> None:
    """Check that ``url`` is an address over HTTP, and on this machine unless ``network`` is true.

    Raises:
        ConfigError: it is not. The message begins with ``what``.
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        host = None if parts is None else parts.hostname
    except ValueError:  # such as brackets without an address in them
        parts = host = None
    if parts is None or not host or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{what}: url: expected an address, as http://localhost:8000, got {url!r:.80}")
    if not (network or is_loopback(host)):
        raise ConfigError(
            f"{what}: url: {host} is another machine; add network: true if agents may send it what they like"
        )
