"""What strangers do to each server of the project, without its token. After each attack it answers as before."""

import json
import random
import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import httpx2
import pytest

pytest.importorskip("fastapi")

from hostile_runs import write_run
from served_verifiers import serving

from maporl import Arithmetic
from maporl.guard import Limits, connections, read_json
from maporl.report import live
from maporl.serving import gateway
from maporl.serving import server as api_server
from maporl.serving.routes import error_in
from maporl.serving.wire import Refused
from maporl.types import Utterance
from reward_server.scorers import LabelScorer

CHATS = {"chats": [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]], "references": ["2"]}
CHAT = {"model": "ann", "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def reward_server(folder):
    with serving([LabelScorer(Arithmetic(largest=9), "toy_sum")], body_seconds=0.5, body_bytes=2**20) as url:
        yield url, f"{url}/v1/score", CHATS


@contextmanager
def programs_server(folder):
    server = gateway.Gateway()
    with answered(server.open(["ann"])) as session:
        yield server.root, f"{session.base_url}/chat/completions", CHAT


@contextmanager
def answered(session):
    """A dialogue in which everybody says "ok"."""
    over = threading.Event()

    def answer():
        while not over.is_set():
            for call in session.take():
                call.answer(Utterance(0, "ann", "p", 0, 0, [], "ok"))
            time.sleep(0.001)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield session
    finally:
        over.set()
        thread.join()
        session.close()


@contextmanager
def live_page(folder):
    page = live.LivePage(write_run(folder / "run"), 0)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{page.server_port}", f"{page.url}data", None
    finally:
        page.shutdown()
        page.server_close()
        thread.join()


class Ok:
    """The owner of an address at which everybody says "ok"."""

    name, agents, ignored, ignored_by, inside = "ok", ("ann",), (), "--ignore", 0
    count_tokens = None

    def put(self, call):
        call.answer(Utterance(0, "ann", "p", 0, 0, [], "ok"))

    def count(self, code, why):
        pass


@contextmanager
def api(folder):
    app = api_server.application(Ok(), None)
    running = connections.guarded_server(app, api_server.LIMITS, error_in(Refused.body), port=0, lifespan="off")
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield url, f"{url}/v1/chat/completions", CHAT
    finally:
        running.should_exit = True
        thread.join()


SERVERS = {"api": api, "reward server": reward_server, "programs' server": programs_server, "live page": live_page}


@pytest.fixture(scope="module", params=SERVERS)
def served(request, tmp_path_factory):
    """A server that holds at most 20 connections: its address, what can be asked there, and how."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections.resource, "getrlimit", lambda _: (40, 40))
        for module in (gateway, api_server):
            patch.setattr(module, "LIMITS", Limits(seconds=0.5, body=2**20))
        patch.setattr(live, "MOST_CONNECTIONS", 20)
        patch.setattr(live._Handler, "timeout", 0.5)
        with SERVERS[request.param](tmp_path_factory.mktemp("served")) as server:
            yield server


def works(served):
    """Whether a right request is answered, over a connection of its own."""
    _, url, body = served
    answer = httpx2.post(url, json=body, timeout=20) if body else httpx2.get(url, timeout=20)
    return answer.status_code == 200


def connected(served):
    return socket.create_connection(("127.0.0.1", int(served[0].rpartition(":")[2])), timeout=10)


def sent(served, *parts, pause=0.0):
    """What comes back for ``parts``, until the server closes the connection. Empty if it was closed without a word."""
    received = b""
    with connected(served) as connection, suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        while piece := connection.recv(65536):
            received += piece
    return received


def status_in(received):
    """The status of an answer. Python's own server answers what names no version of HTTP with a page alone."""
    return int(re.search(rb"\AHTTP/1\.[01] (\d{3})|Error code: (\d{3})", received).expand(rb"\1\2"))


def test_connections_that_say_nothing_leave_room_for_others(served):
    with ExitStack() as held:
        silent = [held.enter_context(connected(served)) for _ in range(60)]
        assert works(served)
        for one in silent[:30]:  # the oldest were closed for the newest
            with suppress(ConnectionError):
                one.recv(65536)


@pytest.mark.parametrize(("parts", "statuses"), [
    ([b""], {408}),
    ([b"POST /x HTTP/1.1\r\nHost: localhost\r\n"], {408}),
    ([b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "] + [b"a" * 65536] * 40, {400, 431}),
    ([b"GET / HTTP/1.1\r\nHost: localhost\r\n"] + [b"X: %d\r\n" % n * 2000 for n in range(40)], {400, 431}),
    ([b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], {400, 414, 431}),
    ([b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"], {400}),
    ([b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"], {403}),
    ([b"GET / HTTP/1.1\r\nHost: [::1\r\nConnection: close\r\n\r\n"], {400}),
    ([b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"], {404, 410}),
    ([b"GET /d/1.wrong/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"], {404, 410}),
    ([b"POST /d/1.%ff%00/v1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"], {404, 408, 410}),
], ids=["nothing", "half a head", "an endless header", "endless headers", "a long address", "TLS", "another host",
        "half a host", "another path", "a wrong secret", "no text"])  # fmt: skip
def test_what_is_no_right_request_is_refused_or_let_go(served, parts, statuses):
    """A connection may also be closed without a word, such as while it still sends."""
    began = time.monotonic()
    received = sent(served, *parts)
    assert time.monotonic() - began < 5
    assert not received or status_in(received) in statuses, received[:200]
    assert b"Traceback" not in received and works(served)


def test_a_head_that_drips_is_let_go(served):
    began = time.monotonic()
    sent(served, b"GET / HTTP/1.1\r\n", *[b"X: y\r\n"] * 8, pause=0.1)
    assert time.monotonic() - began < 5 and works(served)


HOSTILE = {
    "a number that no double holds": b'{"reward": 1%s}' % (b"0" * 400),
    "a number of 5,000 digits": b'{"reward": 1%s}' % (b"0" * 5000),
    "infinity": b'{"reward": 1e400, "chats": NaN}',
    "900 levels": b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    "100,000 levels": b"[" * 100_000,
    "a list": b"[1, 2]",
    "no JSON": b"{",
    "no text": b'{"model": "\xff"}',
    "nothing": b"",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    ("served", "path"),
    [
        ("reward server", "score"),
        *[("programs' server", path) for path in ("chat/completions", "responses", "reward")],
        *[("api", path) for path in ("chat/completions", "responses", "messages")],
    ],
    indirect=["served"],
)
def test_hostile_bodies_get_an_error_object(served, path, body):
    url = served[1].replace("chat/completions", path)
    answer = httpx2.post(url, content=body, headers={"content-type": "application/json"}, timeout=20)
    assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], answer.text
    assert works(served)


@pytest.mark.parametrize("body", [b"x" * (2**20 + 1), [b"x" * 2**16] * 40, [b"{"]], ids=["large", "in parts", "short"])
@pytest.mark.parametrize("served", ["api", "reward server", "programs' server"], indirect=True)
def test_bodies_that_are_too_large_or_never_end(served, body):
    address = served[1].removeprefix(served[0]).encode()
    whole = isinstance(body, bytes)
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % address
    head += b"Content-Length: %d\r\n\r\n" % len(body) if whole else b"Transfer-Encoding: chunked\r\n\r\n"
    parts = [body] if whole else [b"%x\r\n%s\r\n" % (len(part), part) for part in body]
    received = sent(served, head, *parts)
    assert not received or status_in(received) in (408, 413), received[:200]
    assert works(served)


def changed(rng, value):
    """``value`` with something else in one place."""
    odd = [None, True, 5, -1, 0.5, "", "x", "\ud83d", [], {}, [[]], [5], {"a": 1}, "9" * 30, {"type": "text"}]
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(odd)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    if isinstance(value, list):
        return [changed(rng, one) if place == key else one for place, one in enumerate(value)]
    return {name: changed(rng, one) if name == key else one for name, one in value.items()}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RIGHT = {
    "chat/completions": {
        **CHAT,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "stop": ["a"], "n": 1, "stream": True,
        "stream_options": {"include_usage": True}, "max_tokens": 5, "logprobs": False,
    },
    "responses": {
        "model": "ann", "instructions": "be", "max_output_tokens": 5, "tools": [{**TOOL["function"], "type": "function"}],
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
    },
    "reward": {"rewards": {"ann": 1.0}},
}  # fmt: skip


def test_no_json_makes_the_programs_server_fail():
    """JSON with something else in one to three places is answered or refused, never with a 5xx."""
    rng, statuses = random.Random(0), []
    with answered(gateway.Gateway().open(["ann"])) as session, httpx2.Client(timeout=20) as client:
        for number in range(600):
            path = rng.choice(list(RIGHT))
            body = RIGHT[path]
            for _ in range(rng.randrange(4)):
                body = changed(rng, body)
            answer = client.post(f"{session.base_url}/{path}", content=json.dumps(body))
            statuses.append(answer.status_code)
            assert answer.status_code < 500, (number, body, answer.text)
    assert {200, 400, 404} <= set(statuses)


@pytest.mark.parametrize(("text", "value"), [
    ('{"a": "\\ud83d x"}', {"a": "\ufffd x"}), ('{"\\ud83d": ["\\ud83d\\ude00"]}', {"\ufffd": ["\U0001f600"]}),
    ("18", 18), ('"a\\u0000"', "a\0"),
])  # fmt: skip
def test_halves_of_characters_are_replaced_in_json(text, value):
    assert read_json(text) == value


def test_clients_that_leave_and_clients_that_wait(served):
    """A client that goes in the middle of its body, or before its answer, is nobody's error."""
    address = served[1].removeprefix(served[0]).encode()
    for body in (b'{"model"', json.dumps(served[2]).encode()):
        for _ in range(30):
            with connected(served) as connection:
                head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % (address, len(json.dumps(served[2]))) + body)
    assert works(served)
