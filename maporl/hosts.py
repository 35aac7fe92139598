"""Which host a request names: this machine or another one."""

import ipaddress
import re

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


def host_of(header: str) -> str | None:
    """Return the host in a ``Host`` header, in small letters and without brackets and port. None: it is malformed.

    >>> host_of("LOCALHOST:8501"), host_of("[::1]:80"), host_of("[::1"), host_of("a@b")
    ('localhost', '::1', None, None)
    """
    found = _HOST.fullmatch(header.strip())
    return None if found is None else (found[1] or found[2]).lower()


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
