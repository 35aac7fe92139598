"""Servers of strangers: every answer ends in a value or in one line that names the server, and no exchange has no
end."""

import json
import logging
import re
import socket
import sqlite3
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from maporl import http_client
from maporl.config.schema import ApiSection
from maporl.engines.base import Request
from maporl.engines.openai import ApiFailure, OpenAIEngine, is_whole
from maporl.engines.transcript import Transcript
from maporl.errors import ConfigError
from maporl.hosts import proxy_of
from maporl.http_client import LONGEST_PAUSE, MOST_BYTES, HttpClient, HttpFailure, seconds_of, shown_url
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import RemoteServer, VLLMFailure
from maporl.storage.disk_cache import DiskCache
from maporl.types import Ask, Example, Stop
from maporl.verifier.client import VerifierClient, VerifierFailure
from maporl.verifier.encoding import chat_of
from maporl.verifier.section import VerifierSection
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.request import Draw, TokenRequest

pytestmark = pytest.mark.usefixtures("impatient")
KEY = "sk-0123456789-abcdefghijklmnop"
FOREVER = object()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(http_client, "BACKOFF", lambda state: 0.0)


class Stranger:
    """A server of raw bytes: ``script`` has one entry a request, the last one for ever. It remembers what it was asked.

    An entry is a list of pieces, which are sent one after the other, and the connection is then closed. :data:`FOREVER`
    repeats the piece before it. ``slow`` is the number of seconds between pieces.
    """

    def __init__(self, *script, slow=0.0):
        self.script, self.slow, self.asked, self.lock = list(script), slow, [], threading.Lock()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection:
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(65536)
            head, _, body = asked.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            while length and len(body) < int(length[1]):
                body += connection.recv(65536)
            with self.lock:
                self.asked.append((head.decode(), body))
                entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                entry = entry(body) if callable(entry) else entry
            with suppress(OSError):  # the client has gone, as it should
                self._send(connection, entry)

    def _send(self, connection, pieces):
        for number, piece in enumerate(pieces):
            while piece is FOREVER:
                connection.sendall(pieces[number - 1])
                time.sleep(self.slow)
            connection.sendall(piece)
            time.sleep(self.slow)


def http(content, status="200 OK", **headers):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    named = {"Content-Type": "application/json", "Content-Length": len(content), "Connection": "close", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return [f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + content]


def completion(text="4", stop="stop", **more):
    return {"choices": [{"message": {"content": text}, "finish_reason": stop}], "usage": {"prompt_tokens": 3}, **more}


def bomb(size):
    squeezed = zlib.compressobj(wbits=31)
    return squeezed.compress(b" " * size) + squeezed.flush()


DEEP = b"[" * 100_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PAGE = b"<html>\x1b[31m<b>503</b></html>"
NO_KEY = {"error": {"message": f"no such key: {KEY}"}}
BROKEN = {
    "a page": (http(PAGE, Content_Type="text/html"), r"not JSON: '<html>\u241b\[31m<b>503"),
    "nothing": (http(b""), "not JSON: ''"),
    "invalid UTF-8": (http(b'{"a": "\xff\xfe"}'), "not JSON"),
    "deep nesting": (http(DEEP), "not JSON"),
    "a huge integer": (http(b"9" * 10_000), "not JSON"),
    "compressed": (http(bomb(2**26), Content_Encoding="gzip"), r"answered compressed \(gzip\)"),
    "too much": ([HEAD + b"\r\n", b"x" * 65536, FOREVER], f"more than {MOST_BYTES:,} bytes"),
    "endless headers": ([HEAD, b"X-A: " + b"b" * 1000 + b"\r\n", FOREVER], "did not end its answer"),
    "closed in the middle": ([HEAD + b'Content-Length: 1000\r\n\r\n{"results"'], "did not end its answer"),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.6\r\n"], "did not end its answer"),
    "another status": (http(b"teapot\x00\x07", "418 I am"), r"answered 418 \('teapot\u2400\u2407'\)"),
    "a redirect to a file": (http(b"", "302 Found", Location="file:///etc/passwd"), "a redirect to file:///etc/passwd"),
    "an error": (http(NO_KEY, "401 No"), r"answered 401 .*no such key: \[the key\]"),
}


def _no_proxies(monkeypatch):
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROXY", raising=False)


HERE = ["http://127.0.0.1:8000/v1", "http://localhost", "https://LOCALHOST:1", "http://[::1]:8000", "http://127.8.9.1", "http://0.0.0.0:80",
        "http://[::ffff:127.0.0.1]/", "http://api.localhost:3/", "http://localhost.:3", "ws://127.0.0.1:1/ws"]  # fmt: skip
PROXIES = [  # the environment, an address, and its proxy
    ({"HTTP_PROXY": "http://p:1"}, "http://x.org", "http://p:1"),
    ({"http_proxy": "http://p:1"}, "http://x.org:80", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "https://x.org", None),
    ({"HTTPS_PROXY": "http://p:1"}, "https://x.org", "http://p:1"),
    ({"ALL_PROXY": "p:1"}, "https://x.org", "http://p:1"),
    ({"all_proxy": "http://p:1", "NO_PROXY": "x.org"}, "https://api.x.org", None),
    ({"ALL_PROXY": "http://p:1", "no_proxy": "*"}, "http://x.org", None),
    ({"ALL_PROXY": "http://p:1", "NO_PROXY": "y.org, 10.0.0.0/8"}, "http://10.2.3.4:5", None),
    ({"ALL_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "http://11.2.3.4:5", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "ws://x.org", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "http://127.0.0.1.x.org", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "http://localhost.x.org", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "http://x:999999", None),
    ({}, "http://x.org", None),
]  # fmt: skip


def test_no_proxy_stands_between_two_programs_of_a_machine(monkeypatch):
    for given, url, proxy in PROXIES:
        _no_proxies(monkeypatch)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert (url, proxy_of(url)) == (url, proxy)
        assert [proxy_of(here) for here in HERE] == [None] * len(HERE)


def test_servers_of_this_machine_are_asked_directly(monkeypatch, tmp_path):
    """By every client: of agents, verifiers and vLLM."""
    _no_proxies(monkeypatch)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    assert scores_of(Stranger(http({"results": [{"score": 0.25}] * 2}))) == [0.25, 0.25]
    assert vllm_at(Stranger(http(choice()))).sample([ASKED])[0].ids == [5, 6]
    assert client_of(Stranger(http({"a": 1}))).get("/") == {"a": 1}


def test_what_went_wrong_at_a_proxy_names_the_proxy_without_its_password(monkeypatch):
    _no_proxies(monkeypatch)
    refusals = [http(b"who are you", f"{status} No") for status in (407, 502, 403)]
    proxy = Stranger(*refusals, http(b"<html>"), http(b"<p>"), http({"a": 1}))
    address = proxy.url.replace("//", "//alice:correct-horse@")
    monkeypatch.setenv("HTTP_PROXY", address)
    client = HttpClient("http://judge.example.test:8000", 5.0)
    for said in ("answered 407", "answered 502", "answered 403"):
        with pytest.raises(HttpFailure, match=rf"^{said} through the proxy {proxy.url} of the environment") as caught:
            client.get("/x")
        assert "correct-horse" not in str(caught.value) and "NO_PROXY" in str(caught.value)
    with pytest.raises(HttpFailure, match="not JSON"):
        client.get("/x")
    with pytest.raises(HttpFailure, match=r"^answered through the proxy http://127.0.0.1:\d+ of .* not JSON"):
        client.get("/x")
    assert client.get("/x") == {"a": 1}
    assert proxy.asked[0][0].startswith("GET http://judge.example.test:8000/x HTTP/1.1")
    nobody = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{nobody.getsockname()[1]}")
    nobody.close()
    with pytest.raises(HttpFailure, match=r"^cannot be reached through the proxy http://127.0.0.1:\d+ of the"):
        HttpClient("http://judge.example.test", 5.0).get("/x")
    monkeypatch.setenv("HTTP_PROXY", "gopher://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"judge\.example\.test: cannot be asked through the proxy gopher"):
        HttpClient("http://judge.example.test", 5.0)


def client_of(server, seconds=5.0):
    return HttpClient(server.url, seconds, KEY, "THE_KEY")


@pytest.mark.parametrize("name", BROKEN)
def test_a_worthless_answer_is_one_line_without_the_key(name):
    pieces, message = BROKEN[name]
    with pytest.raises(HttpFailure, match=message) as caught:
        client_of(Stranger(pieces)).post("/x", {"a": 1})
    told = str(caught.value)
    assert told.isprintable() and len(told) < 500 and KEY not in told


DRIPS = {
    "body": [HEAD + b"Content-Length: 1000000\r\n\r\n", b" ", FOREVER],
    "header": [HEAD, b"X", FOREVER],
    "continue": [b"HTTP/1.1 100 Continue\r\n\r\n", FOREVER],
    "chunks": [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", FOREVER],
}


@pytest.mark.parametrize("drip", DRIPS)
def test_a_byte_now_and_then_is_no_answer(drip):
    began = time.monotonic()
    with pytest.raises(HttpFailure, match=r"no whole answer within 0.5 s"):
        client_of(Stranger(DRIPS[drip], slow=0.05), seconds=0.5).post("/x", {})
    assert time.monotonic() - began < 30


def test_more_requests_than_a_server_answers_at_once_do_not_lose_their_time_in_a_queue():
    server = Stranger(http({}), slow=0.3)
    client = client_of(server, seconds=30.0)
    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(lambda _: client.post("/x", {}), range(200))) == [{}] * 200


def test_no_key_goes_to_another_server_and_the_place_is_told():
    other = Stranger(http({}))
    server = Stranger(http(b"", "307 Elsewhere", Location=f"{other.url}/v1"))
    with pytest.raises(HttpFailure, match=rf"answered 307, a redirect to {other.url}/v1; redirects are not followed"):
        client_of(server).post("/x", {})
    assert not other.asked and f"authorization: bearer {KEY}" in server.asked[0][0].lower()


def test_a_key_that_straddles_the_cut_is_not_shown_in_part():
    for spaces in (150, 190, 760, 790):
        with pytest.raises(HttpFailure) as caught:
            client_of(Stranger(http(b"a" + b" " * spaces + KEY.encode(), "400 No"))).post("/x", {})
        assert KEY[:6] not in str(caught.value)


def test_a_password_in_an_address_is_sent_and_not_shown():
    server = Stranger(http(b"no", "403 No"))
    login = server.url.replace("//", "//alice:correct-horse@")
    client = HttpClient(login, 5.0)
    with pytest.raises(HttpFailure) as caught:
        client.get("/x")
    assert "authorization: basic" in server.asked[0][0].lower()
    assert "correct-horse" not in f"{caught.value} {client.url}"
    assert shown_url("http://a:b@h/x@y") == "http://h/x@y"
    for key in ("sk-\u00e9", "a\nb", "a\x00b"):
        with pytest.raises(ConfigError, match="the environment variable THE_KEY holds no key") as wrong:
            HttpClient("http://h", 1.0, key, "THE_KEY")
        assert key not in str(wrong.value)


def test_no_server_is_waited_for_longer_than_a_minute():
    far, past = "Fri, 31 Dec 2199 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:59 GMT"
    for value in ("99999999999", "1e300", "inf", "9" * 5000, far):
        assert seconds_of(value) == LONGEST_PAUSE, value[:20]
    for value in ("", "-5", "-inf", "nan", "\u00b2", past, "Fri, 31 Dec 99999999999999 23:59:59 GMT", "Mon, 99 Zzz -1"):
        assert seconds_of(value) == 0.0, value
    soon = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    assert seconds_of("2") == 2.0 and 0 < seconds_of(soon) <= 30


# -- verifier servers ---------------------------------------------------------------------------------------------

CHATS = [chat_of(f"{n}", f"Answer: {n}") for n in range(2)]


def scores_of(server, chats=CHATS, **section):
    """The scores that a client gets for two chats."""
    section = VerifierSection(urls=(server.url,), retries=0, timeout=5.0, **section)
    return VerifierClient(section, section.urls).scores(chats, ["0", "1"])


SCORES = ["0.5", True, None, {}, -0.1, 1.5, 10**400, float("nan"), float("inf")]
RESULTS = [{"results": [{"score": score}, {"score": 0.5}]} for score in SCORES] + [
    {"results": [{"error": [1]}, {"score": 0.5}]}, {}, [], None, {"results": {}}, {"results": [0.5]}, {"results": [{"score": 1}] * 3},
    {"error": {"code": [], "message": {}}},
]  # fmt: skip


@pytest.mark.parametrize("found", RESULTS, ids=lambda found: repr(found)[:30])
def test_wrong_scores_name_the_server(found):
    server = Stranger(http(found))
    with pytest.raises(VerifierFailure, match=rf"verifier server {server.url}: (expected |could not score)") as caught:
        scores_of(server)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_probabilities_without_their_places_are_refused(tiny, tmp_path):
    tiny()[1].save_pretrained(tmp_path)
    vllm = {"chats": [chat_of("1+1=", "2"), chat_of("1+1=", "3")], "api": "vllm", "model": str(tmp_path)}
    good = {"index": 0, "probs": [0.25]}
    for wrong in (good, {"probs": [0.1]}, {"index": [1], "probs": [0.1]}, 3, {"index": True}):
        with pytest.raises(VerifierFailure, match="expected data on the inputs 0 to 1, got none on 1"):
            scores_of(Stranger(http({"data": [good, wrong]})), **vllm)
    assert scores_of(Stranger(http({"data": [{"index": 1, "probs": [0.5]}, good]})), **vllm) == [0.25, 0.5]


# -- agents behind an API -----------------------------------------------------------------------------------------


@pytest.fixture
def asking(tmp_path, monkeypatch):
    """``asking(server, count=1, **section)``: the texts that an engine gives for ``count`` requests."""
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def ask(server, count=1, **section):
        engine = engine_at(server, 5, **{"concurrency": 1, "cache": True, **section})
        return [reply.text for reply in engine.generate(_requests(count), Decoding(1.0))]

    return ask


def engine_at(server, tokens=64, stops=(), **section):
    section = {"base_url": server.url, "retries": 0, "cache": False, **section}
    return OpenAIEngine({"bob": ApiSection("m", **section)}, tokens, stops)


def _requests(count):
    requests = []
    for n in range(count):
        transcript = Transcript()
        transcript.messages.append({"role": "user", "content": f"{n}+1= \ud800"})
        requests.append(Request(Ask("bob", []), Example(str(n), "", ""), 0, 0, transcript, f"request {n}"))
    return requests


WORTHLESS = {
    "an error": {"error": {"message": f"overloaded {KEY}"}},
    "no choices": {"choices": []},
    "null choices": {"choices": None},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "no reason": {"choices": [{"message": {"content": "4"}}]},
    "no reason yet": completion("4", None),
    "a call that a filter removed": {"choices": [{"finish_reason": "MALFORMED_FUNCTION_CALL"}]},
    "a list": [1],
    "no text": completion(None),
    "a number": completion(5),
    "another end": completion("4", 7),
    "an endless end": completion("4", "x" * 1000),
    "a reason that nobody knows": completion("4", "someday"),
    "an error beside": completion("4", error={"code": 1}),
    "a flood": completion("x" * 1001),
    "a part without text": completion([{"type": "text"}]),
    "a part that is a number": completion([5]),
    "a mapping": completion({"text": "x"}),
}


@pytest.mark.parametrize("name", WORTHLESS)
def test_a_broken_answer_is_asked_again_and_never_cached(asking, tmp_path, name, monkeypatch):
    server = Stranger(http(WORTHLESS[name]))
    said = rf"request 0: no answer from {server.url} \(model 'm', up to 0 retries\): "
    with pytest.raises(ApiFailure, match=said) as caught:
        asking(server)
    assert str(caught.value).isprintable() and KEY not in str(caught.value) and len(server.asked) == 1
    server.script = [http(WORTHLESS[name]), http(completion("7"))]
    assert asking(server, retries=1) == ["7"] == asking(server) and len(server.asked) == 3
    assert json.loads(server.asked[0][1])["messages"][0]["content"].startswith("0+1=")


TEXT, THOUGHT = {"type": "text", "text": "Answer: 5"}, {"type": "thinking", "thinking": [{"text": "so"}]}
SILENT = [  # the message, why it ended, its text, its stop, and why it has no text
    ({"content": "5"}, "stop", "5", Stop.EOS, None),
    ({"reasoning": "so"}, "length", "", Stop.LENGTH, "length"),
    ({"reasoning": "so"}, "stop", "", Stop.EOS, "thinking"),
    ({"content": None, "reasoning_content": "so"}, "stop", "", Stop.EOS, "thinking"),
    ({"content": "", "reasoning_content": "so"}, "stop", "", Stop.EOS, "thinking"),
    ({"content": None, "refusal": "I will not."}, "stop", "I will not.", Stop.FILTERED, "refusal"),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "stop", "No.", Stop.FILTERED, "refusal"),
    ({"content": None}, "content_filter", "", Stop.FILTERED, "content_filter"),
    ({}, "content_filter", "", Stop.FILTERED, "content_filter"),
    (None, "content_filter", "", Stop.FILTERED, "content_filter"),
    ({}, "stop", "", Stop.EOS, "empty"),
    ({"content": ""}, "stop", "", Stop.EOS, "empty"),
    ({"content": None, "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls", "", Stop.EOS, "tool_calls"),
    ({"content": [TEXT]}, "stop", "Answer: 5", Stop.EOS, None),
    ({"content": [THOUGHT, TEXT]}, "stop", "Answer: 5", Stop.EOS, None),
    ({"content": ["Answer", {"type": "output_text", "text": ": 5"}, {"type": "image_url"}]}, "stop", "Answer: 5", Stop.EOS, None),
    ({"content": [THOUGHT]}, "length", "", Stop.LENGTH, "length"),
    ({"content": [THOUGHT]}, "stop", "", Stop.EOS, "thinking"),
    ({"content": []}, "stop", "", Stop.EOS, "empty"),
]  # fmt: skip


def test_answers_that_are_not_whole_are_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path))
    cut = completion("4", "insufficient_system_resource"), {"choices": [{"message": {"content": "4"}}]}
    server = Stranger(*map(http, cut), http({}, "500 No"), http(completion("47", "MAX_TOKENS")))
    engine = engine_at(server, retries=3, cache=True)
    for _ in range(2):
        [reply] = engine.generate(_requests(1), Decoding(1.0))
        assert (reply.text, reply.stop) == ("47", Stop.LENGTH)
    assert len(server.asked) == 4 and engine.metrics() == {
        "api/bob/requests": 1, "api/bob/cached": 1, "api/bob/no_text": 0, "api/bob/not_whole": 2,
        "api/bob/prompt_tokens": 3, "api/bob/completion_tokens": 0,
    }  # fmt: skip


def test_answers_without_text_do_not_end_a_run_and_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path))
    given = [{} if message is None else {"message": {"role": "assistant", **message}} for message, *_ in SILENT]
    choices = [{"finish_reason": entry[1], **own} for entry, own in zip(SILENT, given, strict=True)]
    server = Stranger(*(http({"choices": [choice]}) for choice in choices))
    engine = engine_at(server, concurrency=1, cache=True)
    with caplog.at_level(logging.WARNING):
        replies = engine.generate(_requests(len(SILENT)), Decoding(1.0))
    assert [(r.text, r.stop, r.no_text) for r in replies] == [tuple(entry[2:]) for entry in SILENT]
    reasons = [entry[4] for entry in SILENT if entry[4] is not None]
    assert engine.metrics()["api/bob/no_text"] == len(reasons) == 15
    assert len(caplog.records) == len(set(reasons))
    assert "(refusal). Such an answer is the words of the refusal" in caplog.text
    server.script = [http({}, "500 No")]  # all but the empty ones were kept
    again = engine_at(server, concurrency=1, cache=True)
    asked = list(zip(_requests(len(SILENT)), [entry[4] for entry in SILENT], strict=True))
    kept, reasons = zip(*(one for one in asked if one[1] != "empty"), strict=True)
    assert [reply.no_text for reply in again.generate(list(kept), Decoding(1.0))] == list(reasons)
    with pytest.raises(ApiFailure):
        again.generate([next(request for request, reason in asked if reason == "empty")], Decoding(1.0))


def openai_error(param, message, code="unsupported_parameter"):
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


LONGER = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
ONE = "Unsupported value: 'temperature' does not support 0.5 with this model. Only the default (1) value is supported."
EXTRA = {"detail": [{"type": "extra_forbidden", "loc": ["body", "top_p"], "msg": "Extra inputs are not permitted"}]}
REFUSED = [  # what is refused, with which status, and what is sent instead
    (openai_error("max_tokens", LONGER), "400 Bad", {"max_tokens"}, {"max_completion_tokens": 64}),
    ({"object": "error", "message": LONGER, "param": None, "code": 400}, "400 Bad", {"max_tokens"}, {"max_completion_tokens": 64}),
    (openai_error("temperature", ONE, "unsupported_value"), "400 Bad", {"temperature"}, {}),
    ({"error": "invalid temperature: only 1 is allowed for this model"}, "400 Bad", {"temperature"}, {}),
    (b"`temperature` is deprecated for this model.", "400 Bad", {"temperature"}, {}),
    (EXTRA, "422 Bad", {"top_p"}, {}),
    ([{"error": {"message": EXTRA, "code": 400}}], "400 Bad", {"top_p"}, {}),
    (openai_error("stop", "Unsupported parameter: 'stop' is not supported with this model."), "400 Bad", {"stop"}, {}),
]  # fmt: skip
PLAIN = {"max_tokens": 64, "temperature": 0.5, "top_p": 0.9, "stop": [";"]}


def _sent(server):
    return [{k: v for k, v in json.loads(body).items() if k not in ("model", "messages")} for _, body in server.asked]


@pytest.mark.parametrize(("error", "status", "without", "instead"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_field_that_a_model_refuses_is_found_out_once_and_kept_to(error, status, without, instead, caplog):
    kept = {k: v for k, v in PLAIN.items() if k not in without} | instead
    server = Stranger(http(error, status), http(completion("5; 6")))
    engine = engine_at(server, stops=[";"])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (reply,) = engine.generate(_requests(1), Decoding(0.5, top_p=0.9))
            assert reply.text == ("5" if without == {"stop"} else "5; 6")
    assert _sent(server) == [PLAIN, kept, kept]
    (told,) = (record.getMessage() for record in caplog.records)
    option = "length_field: max_completion_tokens" if instead else f"leave_out: [{next(iter(without))}]"
    assert told.startswith(f"agents.bob.api: {server.url}: model 'm' refuses {next(iter(without))} (")
    assert option in told


def test_a_model_that_refuses_all_is_asked_once_for_each_field():
    refusals = {next(iter(without)): http(error, status) for error, status, without, _ in REFUSED}
    server = Stranger(*refusals.values(), http(completion("5")))
    engine = engine_at(server, stops=[";"])
    assert engine.generate(_requests(1), Decoding(0.5, top_p=0.9))[0].text == "5"
    assert _sent(server)[-1] == {"max_completion_tokens": 64} and len(server.asked) == 5


def test_what_the_configuration_says_is_sent_from_the_beginning():
    server = Stranger(http(completion("5")))
    engine = engine_at(server, length_field="max_completion_tokens", leave_out=["temperature", "top_p"])
    engine.generate(_requests(1), Decoding(0.5, top_p=0.9))
    assert _sent(server) == [{"max_completion_tokens": 64}]
    with pytest.raises(ValueError, match="temperature is set and left out"):
        ApiSection("m", temperature=0.5, leave_out=["temperature"])


@pytest.mark.parametrize(
    "error",
    [
        openai_error("max_tokens", "max_tokens is too large: 64. This model supports at most 16.", "invalid_value"),
        openai_error(None, "'max_tokens' or 'max_completion_tokens' is too large: 64. This model's maximum context length is 32.", None),
        openai_error("temperature", "Invalid 'temperature': expected a value between 0 and 2", "decimal_above_max_value"),
        openai_error("messages", "the temperature of this conversation is not supported"),
        openai_error("model", "The model 'm' does not exist", "model_not_found"),
        {"detail": [{"loc": ["body", "messages"], "msg": "Input should be a list", "input": {"temperature": 1}}]},
        {"error": {"message": {"temperature": 1}}},
        [1],
        b"\xff",
    ],
    ids=lambda error: str(error)[:40],
)  # fmt: skip
def test_what_is_refused_for_its_value_ends_the_request(error):
    server = Stranger(http(error, "400 Bad"))
    with pytest.raises(ApiFailure, match="answered 400"):
        engine_at(server, retries=2).generate(_requests(1), Decoding(0.5))
    assert len(server.asked) == 1


def test_a_field_that_the_configuration_chose_is_not_exchanged():
    server = Stranger(http(openai_error("max_tokens", LONGER), "400 Bad"))
    with pytest.raises(ApiFailure, match="Use 'max_completion_tokens' instead"):
        engine_at(server, length_field="max_tokens").generate(_requests(1), Decoding(0.5))


def test_a_prompt_that_a_filter_refuses_is_an_answer_without_text():
    refusal = openai_error("prompt", "The prompt triggered the content policy", "content_filter")
    (reply,) = engine_at(Stranger(http(refusal, "400 Bad"))).generate(_requests(1), Decoding(0.5))
    assert (reply.text, reply.stop, reply.no_text) == ("", Stop.FILTERED, "content_filter")


def test_answers_that_were_paid_for_are_kept_when_another_request_fails(asking):
    def answer(body):
        if b"2+1=" in body:
            return http(b"<html>", "500 No")
        return http(completion("ok"))

    server = Stranger(answer)
    with pytest.raises(ApiFailure, match=r"request 2: .* answered 500"):
        asking(server, count=5)
    paid = len(server.asked)
    server.script = [http(completion("later"))]
    assert asking(server, count=5)[:3] == ["ok", "ok", "later"]
    assert paid >= 3 and len(server.asked) == 6  # the one that failed is all that was asked twice


def test_an_answer_with_half_a_character_or_none_is_kept(asking):
    server = Stranger(http(completion("cut \ud800", "length")), http(completion("", "length")), http(completion("x")))
    assert asking(server) == ["cut \ufffd"] == asking(server) and len(server.asked) == 1


def test_a_cache_that_is_damaged_or_old_is_a_miss_and_said(asking, tmp_path, caplog):
    server = Stranger(http(completion("first")), http(completion("second")))
    assert asking(server) == ["first"] == asking(server)
    with sqlite3.connect(tmp_path / "api.sqlite") as db:
        [[text]] = db.execute("SELECT record FROM verdicts").fetchall()
        assert is_whole(json.loads(text))
        other = text.replace('"first"', '""'), text.replace('"stop"', "0", 1)
        for wrong in ("{", "5", "[" * 5000, '{"text": "x"}', b"\xff", *other):
            db.execute("UPDATE verdicts SET record = ?", (wrong,))
            db.commit()
            with caplog.at_level(logging.WARNING):
                assert asking(server, cache=True) == ["second"]
            assert "1 damaged records are dropped" in caplog.text
            caplog.clear()
    db.close()
    for content in (b"not a database, and long enough to be recognised " * 40, b""):
        (tmp_path / "api.sqlite").write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert asking(server) == ["second"] == asking(server)
    assert "is damaged" in caplog.text and len(list(tmp_path.glob("api.sqlite.damaged-*"))) == 1
    (tmp_path / "api.sqlite").unlink()
    with sqlite3.connect(tmp_path / "api.sqlite") as db:
        db.execute("CREATE TABLE verdicts (id INTEGER)")  # as another version might have had it
    db.close()
    assert asking(server) == ["second"] == asking(server)
    assert len(list(tmp_path.glob("api.sqlite.damaged-*"))) == 2


def test_a_cache_that_cannot_be_written_any_more_costs_no_answer(tmp_path, caplog):
    cache = DiskCache(tmp_path, "api")
    cache.put([("a", {"x": 1})])
    cache.path.unlink()
    cache.path.mkdir()
    with caplog.at_level(logging.WARNING):
        cache.put([("b", {"x": 1})])
        assert cache.get(["a"]) == {}
    assert "cannot be written" in caplog.text and "cannot be read" in caplog.text


# -- vLLM ---------------------------------------------------------------------------------------------------------


def choice(ids=(5, 6), logprobs=(-1.0, -2.0)):
    return {"choices": [{"finish_reason": "stop", "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}


def vllm_at(server, **section):
    return RemoteServer(server.url, VLLMSection(urls=[server.url], retries=0, timeout=5.0, **section))


ASKED = TokenRequest("base", [1], Draw(4), label="one")


@pytest.mark.parametrize(
    "found",
    [
        {}, [], {"choices": []}, {"choices": [5]}, choice(None), choice(logprobs=None), choice(logprobs=[-1.0]),
        choice([5, -6]), choice([5, True]), choice([5, "6"]), choice([5, 10**30]), choice(logprobs=[-1.0, float("nan")]),
        choice(logprobs=[-1.0, -(10**400)]), choice(logprobs=[-1.0, float("-inf")]), choice(logprobs=[-1.0, 3.0]),
        choice([5] * 9, [-1.0] * 9), {"error": {"message": "out of memory"}}, b"<html>",
    ],
    ids=lambda found: repr(found)[:40],
)  # fmt: skip
def test_a_wrong_completion_names_the_server(found):
    server = Stranger(http(found))
    with pytest.raises(VLLMFailure, match=rf"{server.url}: one, model 'base': .*(vLLM server|not JSON)"):
        vllm_at(server).sample([ASKED])


def test_a_vllm_server_gets_its_key_and_so_many_requests_at_a_time(monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    server = Stranger(*(http(choice([number, 6])) for number in range(8)))
    found = vllm_at(server, key_variable="THE_KEY", concurrency=1).sample([ASKED] * 8)
    assert [one.ids[0] for one in found] == list(range(8)), "one after the other"
    assert f"authorization: bearer {KEY}" in server.asked[0][0].lower()


def test_servers_of_other_things_are_told_from_vllm():
    for found in ({}, {"data": 5}, {"data": [{}]}, {"data": [5]}, [], "x"):
        server = Stranger(http({"version": "\u00b2.1.x"}), http(found))
        with pytest.raises(VLLMFailure, match=server.url):
            assert vllm_at(server).base
    for found in ({}, {"tokens": "abc"}, {"tokens": [1.5]}, []):
        server = Stranger(http(found))
        with pytest.raises(VLLMFailure, match=f"{server.url}: tokenising: its answer is not that of a vLLM server"):
            vllm_at(server).tokenize("m", "x")
