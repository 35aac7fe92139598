"""Which host a request names, this machine or another one, and whether it goes through a proxy."""

import ipaddress
import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from maporl.errors import ConfigError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


def host_of(header: str) -> str | None:
    """Return the host in a ``Host`` header, in small letters and without brackets and port. None: it is malformed.

    >>> host_of("LOCALHOST:8501"), host_of("[::1]:80"), host_of("[::1"), host_of("a@b")
    ('localhost', '::1', None, None)
    """
    match = _HOST.fullmatch(header.strip())
    return None if match is None else (match[1] or match[2]).lower()


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is ``localhost`` or a loopback address. Any other name may stand for any address.

    >>> [is_loopback(host) for host in ("localhost", "127.8.9.1", "::1", "example.org", "10.0.0.1")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_of(url: str) -> str | None:
    """Return the proxy through which a request to ``url`` goes, or None.

    The environment names proxies (``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY``, in capitals or not) and the hosts
    that are reached without one (``NO_PROXY``, which may hold networks such as ``10.0.0.0/8`` too). No proxy can reach
    a server of this machine by the name that this machine has for itself, so loopback addresses are never asked through
    one. All clients ask this function, because libraries differ in these rules.

    >>> proxy_of("http://127.0.0.1:8000/v1"), proxy_of("http://[::1]"), proxy_of("http://0.0.0.0:80")
    (None, None, None)
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # no address, which the client says
        return None
    if is_this_machine(host):
        return None
    named = getproxies()
    proxy = named.get({"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)) or named.get("all")
    if not proxy or proxy_bypass(host if port is None else f"{host}:{port}") or _in_networks(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def past_proxies() -> dict[str, str]:
    """Return ``NO_PROXY``, in both writings, as the environment has it and with the loopback address.

    With these variables, programs of others reach servers of this machine past the proxies of the environment too.
    """
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if listed.strip() != "*" and "127.0.0.1" not in [host.strip() for host in listed.split(",")]:
        listed = ",".join(filter(None, (listed, "127.0.0.1")))
    return {"NO_PROXY": listed, "no_proxy": listed}


def is_this_machine(host: str) -> bool:
    """Return whether ``host`` can only be this machine: a loopback address, or the address of no host, as servers print
    it.

    >>> [is_this_machine(host) for host in ("0.0.0.0", "::", "api.localhost", "::ffff:127.0.0.1", "10.0.0.1", "")]
    [True, True, True, True, False, False]
    """
    name = host.lower().rstrip(".")
    if is_loopback(name) or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_unspecified or mapped.is_loopback


def _in_networks(host: str) -> bool:
    """Return whether ``host`` is an address in one of the networks of ``NO_PROXY``."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    for entry in listed.split(","):
        try:
            if "/" in entry and ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False


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
        raise ConfigError(f"{what}: url: {host} is another machine; set network: true if agents may send it anything")


def check_urls(urls: Iterable[str]) -> None:
    """Check that all ``urls`` are addresses of servers.

    Raises:
        ValueError: one of them is not ``http://HOST:PORT``.
    """
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"urls: expected http://HOST:PORT, got {url!r}")
