"""The report of a running run, served to this machine, with a seat at the table for the person who looks at it."""

import errno
import hashlib
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from maporl.errors import RunError
from maporl.hosts import host_of, is_loopback
from maporl.report.dialogues import shown
from maporl.report.page import about, as_json, render
from maporl.report.read import Run, RunReader

MOST = 1000
"""How many dialogues of training a page gets: the newest."""
SHARE = 0.1
"""The largest share of the time that goes into reading the run for a page: training needs the machine more than its
spectators."""
MOST_CONNECTIONS = 64
"""Connections at once. For a further one the oldest is closed; a page that is still there opens another."""
LONGEST_ANSWER = 2**16
"""The most bytes that an answer typed into the page may have."""
Answer = tuple[HTTPStatus, bytes, str]
"""The answer to a request: status, content, and kind of content."""
TEXT, JSON = "text/plain; charset=utf-8", "application/json"


class PageSeat:
    """A seat for a person at the page: ``read`` waits until the person has typed an answer there."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._asked: dict[str, Any] = {}
        self._number = 0
        self._answer: str | None = None
        self._lines: list[str] = []
        self.closed = False

    def show(self, text: str) -> None:
        """Tell the person ``text`` together with the next question."""
        self._lines.append(text)

    def read(self, prompt: str) -> str:
        """Ask, and wait for the answer.

        Raises:
            EOFError: the seat was closed.
        """
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
        """The question that waits for an answer: its number, who is asked, and what was told before it. Empty while
        others speak; ``over`` once the seat is closed.
        """
        with self._turn:
            return {"over": True, "lines": self._lines} if self.closed else dict(self._asked)

    def submit(self, number: int, text: str) -> bool:
        """Answer question ``number``; returns False where another question, or none, is asked."""
        with self._turn:
            if not self._asked or number != self._number or self._answer is not None:
                return False
            self._answer = text
            self._turn.notify_all()
            return True

    def close(self) -> None:
        """End the game for the person; a ``read`` that waits raises EOFError."""
        with self._turn:
            self.closed = True
            self._turn.notify_all()


class LivePage(ThreadingHTTPServer):
    """Serves the page of the run in ``folder``, and beside it ``data`` and, for a person who plays, ``seat``.

    It answers this machine only, and only at its address, which has a secret token in it.

    Raises:
        RunError: the folder is not a run, or the port cannot be used.
    """

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, folder: str | Path, port: int = 8600, seat: PageSeat | None = None):
        self.reader, self.seat = RunReader(folder, keep=MOST), seat
        self.reader.read()  # refuses a folder that is not a run before anything listens
        self.token = secrets.token_urlsafe(12)
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
        self._open: dict[Any, None] = {}
        self._run: Run | None = None
        self._about: dict[str, Any] = {}
        self._state = ""
        self._next = 0.0

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def page(self) -> bytes:
        """The live page, which asks for its data."""
        return render({"title": self.reader.folder.resolve().name, "runs": []}, live=True).encode()

    def data(self, epoch: int, after: int) -> dict[str, Any]:
        """The page's data, with the dialogues that came after number ``after``. A page that has read another ``epoch``
        of the run gets all of them. ``seat`` says whether a person can play here, so that a page without a seat never
        asks for one.
        """
        with self._lock:
            state = hashlib.sha256(repr(_state(self.reader.folder)).encode()).hexdigest()[:16]
            began = time.monotonic()
            if self._run is None or (state != self._state and began >= self._next):
                self._run = self.reader.read()
                self._about, self._state = about([self._run]), state
                now = time.monotonic()
                self._next = now + (now - began) / SHARE
            if epoch != self.reader.epoch:
                after = -1
            dialogues = self._run.dialogues
            new = shown([one for one in dialogues if one.number > after])
            last = dialogues[-1].number if dialogues else -1
            return {
                **self._about,
                "dialogues": new,
                "epoch": self.reader.epoch,
                "last": last,
                "fresh": after == -1,
                "seat": self.seat is not None,
            }

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        self._open[request] = None
        for oldest in list(self._open)[:-MOST_CONNECTIONS]:
            self._open.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show the error, unless the page only went away while it was answered."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Return what changes with the run's files: the name, the size and the time of each."""
    files = []
    for path in sorted(folder.iterdir()):
        if (path.suffix in (".json", ".jsonl", ".yaml") and not path.name.startswith(".")) or path.name == "final":
            with suppress(OSError):  # a link that leads nowhere, or a file that was there a moment ago
                files.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    return files


class _Handler(BaseHTTPRequestHandler):
    server: LivePage
    server_version = "maporl"
    sys_version = ""
    timeout = 30

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: the terminal belongs to the person who plays."""

    def do_GET(self) -> None:
        self._route({"": self._page, "data": self._data, "seat": self._seat})

    def do_POST(self) -> None:
        self._route({"seat": self._say})

    def _route(self, routes: dict[str, Callable[[], Answer]]) -> None:
        path, _, query = self.path.partition("?")
        host = host_of(self.headers.get("Host", ""))
        _, token, name = (*path.split("/", 2), "", "")[:3]
        if host is None:
            answer = HTTPStatus.BAD_REQUEST, b"expected a host and a port in the header Host", TEXT
        elif not is_loopback(host):  # another site's name that was made to point here
            answer = HTTPStatus.FORBIDDEN, b"this page is served at 127.0.0.1 only", TEXT
        elif name not in routes or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            answer = (
                HTTPStatus.NOT_FOUND,
                b"nothing is served at this address; use the one that maporl has printed",
                TEXT,
            )
        else:
            self.query = dict(parse_qsl(query))
            try:
                answer = routes[name]()
            except (RunError, OSError) as error:
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode("utf-8", "replace"), TEXT
        self._send(*answer)

    def _page(self) -> Answer:
        return HTTPStatus.OK, self.server.page(), "text/html; charset=utf-8"

    def _data(self) -> Answer:
        values = [self.query.get(name, "-1") for name in ("epoch", "after")]
        epoch, after = (int(k) if re.fullmatch(r"-?[0-9]{1,9}", k) else -1 for k in values)
        return HTTPStatus.OK, as_json(self.server.data(epoch, after)), JSON

    def _seat(self) -> Answer:
        if self.server.seat is None:
            return HTTPStatus.NOT_FOUND, b"this page has no seat; start maporl play --page", TEXT
        return HTTPStatus.OK, json.dumps(self.server.seat.asked()).encode(), JSON

    def _say(self) -> Answer:
        seat, length = self.server.seat, self.headers.get("Content-Length", "")
        kind = self.headers.get("Content-Type", "").split(";")[0].strip()
        if seat is None or kind != "application/json":  # forms of other sites cannot send that
            return HTTPStatus.FORBIDDEN, b"expected JSON that this page has sent", TEXT
        if not re.fullmatch(r"[0-9]{1,6}", length) or int(length) > LONGEST_ANSWER:
            self.close_connection = True  # what it sends is not read
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"an answer has at most 65536 bytes", TEXT
        try:
            body = json.loads(self.rfile.read(int(length)))
            number, text = int(body["number"]), str(body["text"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return HTTPStatus.BAD_REQUEST, b'expected {"number": N, "text": "..."}', TEXT
        if not text.strip():
            return HTTPStatus.BAD_REQUEST, b"an answer has at least one character", TEXT
        if not seat.submit(number, text):
            return HTTPStatus.CONFLICT, b"this question is no longer asked", TEXT
        return HTTPStatus.OK, b"{}", JSON

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",  # the address has the token in it
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
