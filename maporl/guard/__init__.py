"""Protects the servers of this process from untrusted clients.

A server gives its ASGI application to :class:`Guard`, which looks at the head of each request before its body is read,
and listens by :func:`maporl.guard.connections.guarded_server`, which bounds connections, their times and their heads.
:func:`read_json` reads what came. Nothing here knows what the server is for::

    limits = Limits(body=2**20)
    app = Guard(app, limits, Door(enter=lambda scope, headers: check_host(headers)))
    guarded_server(app, limits, host="127.0.0.1", port=8000).run()

Listening needs ``uvicorn`` (extra ``server``). Nothing here imports torch.
"""

from maporl.guard.limits import Limits as Limits
from maporl.guard.requests import Budget as Budget
from maporl.guard.requests import Denied as Denied
from maporl.guard.requests import Door as Door
from maporl.guard.requests import Guard as Guard
from maporl.guard.requests import check_host as check_host
from maporl.guard.requests import check_token as check_token
from maporl.guard.requests import error_body as error_body
from maporl.guard.requests import read_json as read_json
