"""The report of a run that goes on, served on loopback; and a seat at the table for whoever looks at it."""

import errno
import hashlib
import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from maporl.report.page import as_json, payload, render
from maporl.report.read import RunError, read_run

MOST = 1000
"""Dialogues of a page that is sent again whenever the run has grown."""
LONGEST_ANSWER = 2**16
"""Bytes of an answer that is typed into the page."""


class PageSeat:
    """A seat whose answers come from the page: ``read`` waits until somebody has typed one."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._asked: dict[str, Any] = {}
        self._number = 0
        self._answer: str | None = None
        self._lines: list[str] = []
        self.closed = False

    def show(self, text: str) -> None:
        """What the person is told before the next question to them."""
        self._lines.append(text)

    def read(self, prompt: str) -> str:
        """The next answer; raises EOFError once the page's server is closed."""
        with self._turn:
            self._number += 1
            self._asked = {"number": self._number, "prompt": prompt.strip(" >"), "lines": self._lines}
            self._lines, self._answer = [], None
            self._turn.wait_for(lambda: self._answer is not None or self.closed)
            self._asked = {}
            if self._answer is None:
                raise EOFError
            return self._answer

    def asked(self) -> dict[str, Any]:
        """What is asked right now; empty while others speak."""
        with self._turn:
            return dict(self._asked)

    def say(self, number: int, text: str) -> bool:
        """Answer question ``number``; False where that is not what is asked."""
        with self._turn:
            if not self._asked or number != self._number or self._answer is not None:
                return False
            self._answer = text
            self._turn.notify_all()
            return True

    def close(self) -> None:
        with self._turn:
            self.closed = True
            self._turn.notify_all()


class LivePage(ThreadingHTTPServer):
    """Serves ``/`` and ``/data`` of the run in ``folder``, and with a ``seat`` ``/seat``, to this machine alone."""

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 8600, seat: PageSeat | None = None):
        self.folder, self.seat = Path(folder), seat
        read_run(folder)  # what is no run is refused before anything listens
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OverflowError:
            raise RunError(f"--port {port}: expected a number from 0 to 65535") from None
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            what = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges"
            raise RunError(f"port {port} {what}; choose another with --port, or 0 for any that is free") from None
        self._lock = threading.Lock()
        self._known: tuple[str, bytes] = ("", b"")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def page(self) -> bytes:
        return render([read_run(self.folder)], live=True).encode()

    def data(self) -> tuple[str, bytes]:
        """(a name for this state of the folder, the page's data)."""
        with self._lock:
            state = hashlib.sha256(repr(_state(self.folder)).encode()).hexdigest()[:16]
            if state != self._known[0]:
                self._known = (state, as_json(payload([read_run(self.folder)], MOST)))
            return self._known


def _state(folder: Path) -> list[tuple[str, int, int]]:
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".json", ".jsonl", ".yaml") or path.name == "final"
    )
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    server_version = "maporl"
    sys_version = ""
    timeout = 30

    def log_message(self, *arguments: Any) -> None:
        """Nothing: the terminal is for the person."""

    def do_GET(self) -> None:
        routes: dict[str, Callable[[], None]] = {"/": self._page, "/data": self._data, "/seat": self._seat}
        self._route(routes)

    def do_POST(self) -> None:
        self._route({"/seat": self._say})

    def _route(self, routes: dict[str, Callable[[], None]]) -> None:
        own = {f"127.0.0.1:{self.server.server_port}", f"localhost:{self.server.server_port}"}
        if self.headers.get("Host") not in own:  # another site's name that was made to point here
            return self._send(HTTPStatus.FORBIDDEN, b"this page is for 127.0.0.1 alone")
        answer = routes.get(self.path.split("?")[0])
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, b"there is / and /data")
        try:
            answer()
        except (RunError, OSError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode())
        return None

    def _page(self) -> None:
        self._send(HTTPStatus.OK, self.server.page(), "text/html; charset=utf-8")

    def _data(self) -> None:
        tag, content = self.server.data()
        if self.headers.get("If-None-Match") == f'"{tag}"':
            return self._send(HTTPStatus.NOT_MODIFIED, b"")
        return self._send(HTTPStatus.OK, content, "application/json", ETag=f'"{tag}"')

    def _seat(self) -> None:
        seat = self.server.seat
        if seat is None:
            return self._send(HTTPStatus.NOT_FOUND, b"nobody plays here; start maporl play --page")
        return self._send(HTTPStatus.OK, json.dumps(seat.asked()).encode(), "application/json")

    def _say(self) -> None:
        seat, length = self.server.seat, self.headers.get("Content-Length", "")
        if (
            seat is None or self.headers.get("Content-Type") != "application/json"
        ):  # forms of other sites cannot send that
            return self._send(HTTPStatus.FORBIDDEN, b"expected JSON, from this page")
        if not length.isdigit() or int(length) > LONGEST_ANSWER:
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"an answer has at most 65536 bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
            number, text = int(body["number"]), str(body["text"])
        except (ValueError, KeyError, TypeError):
            return self._send(HTTPStatus.BAD_REQUEST, b'expected {"number": N, "text": "..."}')
        if not text.strip():
            return self._send(HTTPStatus.BAD_REQUEST, b"an answer has at least one character")
        taken = seat.say(number, text)
        return self._send(HTTPStatus.OK if taken else HTTPStatus.CONFLICT, b"{}", "application/json")

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
