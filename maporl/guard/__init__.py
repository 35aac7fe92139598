"""What stands between a server of this process and whoever can connect to it.

A server gives its ASGI application to :class:`Guard`, which looks at the head of each request before its body is read,
and listens by :func:`maporl.guard.connections.guarded_server`, which bounds connections, their times and their heads.
:func:`read_json` reads what came. Nothing here knows what the server is for::

    limits = Limits(body=2**20)
    app = Guard(app, limits, Door(enter=lambda scope, headers: check_host(headers)))
    guarded_server(app, limits, host="127.0.0.1", port=8000).run()

Listening needs ``uvicorn`` (extra ``server``). Nothing here imports torch.
"""

from maporl.guard.limits import Limits
from maporl.guard.requests import Budget, Denied, Door, Guard, check_host, check_token, error_body, read_json

__all__ = [
    "Budget",
    "Denied",
    "Door",
    "Guard",
    "Limits",
    "check_host",
    "check_token",
    "error_body",
    "read_json",
]
