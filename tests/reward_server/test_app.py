"""The reward server over real sockets: what it answers, what it refuses, and that nothing takes it down."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import processes
import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi")


from served_verifiers import (
    free_port,
    serving,
    verifier_folder,  # noqa: F401  # fixtures
)

from maporl import Arithmetic
from maporl.cli.main import app as cli
from maporl.verifier.encoding import CHARACTERS_PER_TOKEN, chat_of
from maporl.verifier.model import Verifier
from reward_server import app as serving_app
from reward_server.options import ServerError, ServerOptions, read_token
from reward_server.schemas import MOST_CHATS
from reward_server.scorers import LabelScorer, VerifierScorer

TOKEN = "a-token-of-some-length"
RIGHT, WRONG = chat_of("1+1=", "2"), chat_of("1+1=", "3")
BODY = {"chats": [RIGHT], "references": ["2"]}


@pytest.fixture(scope="module")
def labels():
    with serving([LabelScorer(Arithmetic(largest=9), "toy_sum")], body_seconds=1.0, body_bytes=2**21) as url:
        yield url


def post(url, body, path="/v1/score", **more):
    return httpx2.post(f"{url}{path}", json=body, timeout=30, **more)


# -- answers ------------------------------------------------------------------------------------------------------


def test_each_chat_gets_a_score_or_an_error_of_its_own(labels):
    body = {"request_id": "r-1", "chats": [RIGHT, WRONG, RIGHT], "references": ["2", "2", None]}
    answer = post(labels, body)
    assert answer.status_code == 200
    found = answer.json()
    assert (found["request_id"], found["model"]) == ("r-1", "labels of toy_sum")
    assert [item["score"] for item in found["results"]] == [1.0, 0.0, None]
    assert found["results"][2]["error"]["code"] == "no_reference"


def test_what_supervisors_and_people_ask(labels):
    assert httpx2.get(f"{labels}/health").json() == {"status": "ok"}
    assert httpx2.get(f"{labels}/ready").json() == {"status": "ready"}
    assert httpx2.get(f"{labels}/v1/model").json()["kind"] == "labels"
    post(labels, BODY)
    metrics = httpx2.get(f"{labels}/metrics")
    assert (
        metrics.headers["content-type"].startswith("text/plain")
        and 'maporl_items_total{outcome="scored"}' in metrics.text
    )
    assert 'maporl_requests_total{path="/v1/score",status="200"}' in metrics.text
    schema = httpx2.get(f"{labels}/openapi.json").json()
    assert {"/v1/score", "/predict", "/health", "/ready", "/metrics", "/v1/model"} == set(schema["paths"])
    assert schema["paths"]["/v1/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_a_served_verifier_scores_as_in_this_process_and_says_what_it_is(verifier_folder):
    verifier = Verifier.load(verifier_folder, "cpu")
    chats = [chat_of(f"{n}+{n}=", str(n) * (1 + n % 7)) for n in range(40)]
    with serving([VerifierScorer(Verifier.load(verifier_folder, "cpu")) for _ in range(2)], batch_tokens=64) as url:
        found = post(url, {"chats": chats}).json()["results"]
        assert [item["score"] for item in found] == pytest.approx(verifier.score(chats), abs=1e-5)
        old = post(url, {"query_responses": chats[:3]}, "/predict")
        assert old.json() == {"result": pytest.approx(verifier.score(chats[:3]), abs=1e-5)}
        info = httpx2.get(f"{url}/v1/model").json()
        assert info["sha256"] == verifier.digest() and len(info["sha256"]) == 64
        assert (info["temperature"], info["longest_chat_tokens"]) == (1.7, 64)
        assert info["calibration"] == {"held_out": {"auc": 0.5}}
        long = chat_of("1+1=", "2" * 70)
        items = post(url, {"chats": [chats[0], long]}).json()["results"]
        assert items[0]["error"] is None and items[1]["error"]["code"] == "too_long"
        refused = post(url, {"query_responses": [chats[0], long]}, "/predict")
        assert refused.status_code == 422 and refused.json()["error"]["field"] == "query_responses.1"


# -- refusals -----------------------------------------------------------------------------------------------------

MALFORMED = {
    "not json": (b"{", 400, None),
    "invalid utf-8": (b'{"chats": "\xff"}', 400, None),
    "a list": (b"[]", 422, None),
    "no chats": (b"{}", 422, "chats"),
    "empty list": (b'{"chats": []}', 422, "chats"),
    "empty chat": (b'{"chats": [[]]}', 422, "chats.0"),
    "content of another type": (b'{"chats": [[{"role": "assistant", "content": 5}]]}', 422, "chats.0.0.content"),
    "unknown role": (b'{"chats": [[{"role": "judge", "content": "x"}]]}', 422, "chats.0.0.role"),
    "no answer": (b'{"chats": [[{"role": "user", "content": "x"}]]}', 422, "chats.0"),
    "lone surrogate": (b'{"chats": [[{"role": "assistant", "content": "\\ud800"}]]}', 422, "chats.0.0.content"),
    "unknown key": (b'{"chats": [[{"role": "assistant", "content": "x"}]], "chat": 1}', 422, "chat"),
    "wrong number of references": (b'{"chats": [[{"role": "assistant", "content": "x"}]], "references": []}', 422, "references"),
    "odd request id": (b'{"request_id": "a b", "chats": [[{"role": "assistant", "content": "x"}]]}', 422, "request_id"),
    "huge number": (b'{"chats": ' + b"9" * 10_000 + b"}", 400, None),
    "not a number": (b'{"chats": NaN}', 422, "chats"),
    "100,000 items": (json.dumps({"chats": [[]] * 100_000}).encode(), 413, "chats"),
    "5 MB": (b" " * 5 * 2**20, 413, None),
    "many messages": (json.dumps({"chats": [[{"role": "user", "content": ""}] * 64] * 300}).encode(), 413, "chats"),
    "many keys": (("{" + ",".join(f'"{n}":0' for n in range(100_000)) + "}").encode(), 422, None),
    "many keys in a message": (json.dumps({"chats": [[dict.fromkeys(map(str, range(99_999)))]]}).encode(), 422, "chats.0.0"),
    "deep and closed": (b'{"chats": ' + b"[" * 900_000 + b"]" * 900_000 + b"}", 400, None),
    "deep objects": (b'{"a":' * 300_000 + b"1" + b"}" * 300_000, 400, None),
    "a million wrong items in one chat": (b'{"chats": [[' + b"1," * 900_000 + b"1]]}", 422, "chats.0.0"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "status", "field"), MALFORMED.values(), ids=MALFORMED.keys())
def test_bad_requests_get_a_readable_4xx_naming_the_field(labels, raw, status, field):
    for path in ("/v1/score", "/predict"):
        answer = httpx2.post(f"{labels}{path}", content=raw, headers={"content-type": "application/json"}, timeout=30)
        assert 400 <= answer.status_code < 500
        error = answer.json()["error"]
        assert error["code"] and error["message"] and "Traceback" not in answer.text and len(answer.text) < 1000
        if path == "/v1/score":
            assert (answer.status_code, error["field"]) == (status, field)
    assert post(labels, BODY).json()["results"][0]["score"] == 1.0


def test_a_megabyte_of_text_is_that_chats_own_problem(labels):
    found = post(labels, {"chats": [chat_of("?", "x" * 2**20), RIGHT], "references": ["2", "2"]}).json()["results"]
    assert found[0]["error"]["code"] == "too_long" and found[1]["score"] == 1.0


def test_a_text_of_megabytes_is_refused_before_it_is_tokenised(verifier_folder):
    verifier = Verifier.load(verifier_folder, "cpu")
    encoded, encode = [], verifier.tokenizer.encode

    def counting(text, **options):
        encoded.append(len(text))
        return encode(text, **options)

    verifier.tokenizer.encode = counting
    most = 64 * CHARACTERS_PER_TOKEN
    with serving([VerifierScorer(verifier)]) as url:
        chats = [chat_of("1+1=", "2" * 7_900_000), chat_of("1" * most, "2"), chat_of("1", "2" * (most - 1)), RIGHT]
        items = post(url, {"chats": chats}).json()["results"]
    assert [item["error"] and item["error"]["code"] for item in items] == ["too_long", "too_long", "too_long", None]
    assert "7900004 characters and the verifier reads at most 64 tokens" in items[0]["error"]["message"]
    assert f"the chat has {most + 1} tokens" in items[2]["error"]["message"], "at the bound it is still tokenised"
    assert max(encoded) == most + len("<eos>")


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:1", 200), ("127.9.9.9", 200), ("[::1]:8501", 200),
    ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.nip.io", 403), ("10.0.0.1", 403), ("0.0.0.0", 403),
    ("[::1", 400), ("::1", 400), ("a b", 400), ("localhost@evil", 400), ("localhost:x", 400), ("", 400), ("[]", 400),
    ("[::ffff:10.0.0.1]", 403), ("[zz]", 400), ("\xff", 400),
])  # fmt: skip
def test_a_server_without_a_token_answers_to_names_of_this_machine_only(labels, host, status):
    """A website can make its own name point to 127.0.0.1. The browser sends that name as Host."""
    answer = raw(labels, b"GET /health HTTP/1.1\r\nHost: " + host.encode("latin-1") + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status}".encode()), answer
    assert b"Traceback" not in answer


def test_a_server_with_a_token_answers_to_every_name():
    with serving([LabelScorer(Arithmetic(largest=9), "toy_sum")], token=TOKEN) as url:
        headers = {"Authorization": f"Bearer {TOKEN}", "Host": "verifier.example.org"}
        assert post(url, BODY, headers=headers).status_code == 200


def test_requests_in_progress_hold_a_bounded_number_of_bytes():
    """Requests that wait keep their chats. What does not fit is refused, and what is answered makes room again."""
    scorer = Slow()
    with serving([scorer], body_bytes=20_000) as url:
        large = {"chats": [chat_of("1+1=", "2" + " " * 15_000)], "references": ["2"]}
        asked = [in_thread(post, url, {**large, "request_id": f"id-{n}"}) for n in range(40)]
        until(lambda: any(found for _, found in asked))
        scorer.let.set()
        for thread, _ in asked:
            thread.join()
        statuses = [found[0].status_code for _, found in asked]
        assert set(statuses) == {200, 429}, statuses
        assert all(found[0].headers["retry-after"] for _, found in asked if found[0].status_code == 429)
        client = httpx2.Client(base_url=url, timeout=30)
        for number in range(24):  # nothing keeps its bytes: what is answered, refused, or given up half way
            half = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 19000\r\n\r\n" + b" " * 15_000
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.sendall(half)
            assert client.post("/v1/score", json={**large, "references": []}).status_code == 422
            assert client.post("/v1/score", json={**large, "request_id": f"again-{number}"}).status_code == 200


def test_remembered_results_take_a_bounded_number_of_bytes(monkeypatch):
    monkeypatch.setattr(serving_app, "REMEMBERED_BYTES", 10 * serving_app.ITEM_BYTES)
    scorer = Slow()
    scorer.let.set()
    with serving([scorer]) as url:
        for name in ("a", "b", "c", "a", "c"):
            many = {"request_id": name, "chats": [RIGHT] * 4, "references": ["2"] * 4}
            assert post(url, many).status_code == 200
    assert sum(map(len, scorer.batches)) == 4 * 4, "the oldest was forgotten and scored again, the newest was not"


def test_unknown_paths_and_methods(labels):
    assert httpx2.get(f"{labels}/nowhere").json()["error"]["code"] == "not_found"
    answer = httpx2.get(f"{labels}/v1/score")
    assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_allowed"


def test_a_token_is_asked_for_everywhere_but_for_health(verifier_folder):
    with serving([LabelScorer(Arithmetic(largest=9), "toy_sum")], token=TOKEN) as url:
        for given in (None, "Bearer wrong", TOKEN, f"Basic {TOKEN}"):
            headers = {} if given is None else {"Authorization": given}
            for answer in (post(url, BODY, headers=headers), httpx2.get(f"{url}/metrics", headers=headers)):
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "unauthorized"
        assert post(url, BODY, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert httpx2.get(f"{url}/health").status_code == httpx2.get(f"{url}/ready").status_code == 200


def test_options_that_would_be_unsafe_or_cannot_work_are_refused(tmp_path, monkeypatch):
    for options, message in (
        ({"host": "0.0.0.0"}, "--host 0.0.0.0: others can reach this address, so a token is needed"),
        ({"host": "example.org"}, "a token is needed"),
        ({"token": "short"}, "token: expected at least 16 ASCII characters, got 5"),
        ({"port": 70_000}, "--port: expected 0 to 65535, got 70000"),
        ({"batch_tokens": 0}, "--batch-tokens: expected above 0, got 0"),
    ):
        with pytest.raises(ServerError, match=message):
            ServerOptions(**options)
    assert ServerOptions(host="0.0.0.0", token=TOKEN).host == "0.0.0.0" and ServerOptions(host="::1").token is None
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setenv("MAPORL_SERVER_TOKEN", "from-the-environment")
    assert (read_token(tmp_path / "token"), read_token(None)) == (TOKEN, "from-the-environment")
    with pytest.raises(ServerError, match=r"cannot be read \(FileNotFoundError\)"):
        read_token(tmp_path / "none")


def raw(url, *parts, pause=0.0, wait=5.0):
    """What comes back when ``parts`` are sent over a plain socket, ``pause`` seconds apart."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if b"}}" in received:
                break
        return received


@pytest.mark.slow
def test_idle_connections_and_a_crowd_leave_room_for_one_more(labels):
    host, port = labels.removeprefix("http://").split(":")
    with ExitStack() as idle:
        for _ in range(500):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=10))
        assert post(labels, {"chats": [RIGHT], "references": ["2"]}).status_code == 200
    with ThreadPoolExecutor(500) as crowd:
        answers = list(
            crowd.map(lambda _: post(labels, {"chats": [RIGHT, WRONG], "references": ["2", "2"]}), range(500))
        )
    assert {answer.status_code for answer in answers} <= {200, 429}
    scored = [[item["score"] for item in answer.json()["results"]] for answer in answers if answer.status_code == 200]
    assert scored and all(scores == [1.0, 0.0] for scores in scored)
    assert httpx2.get(f"{labels}/health").status_code == 200


# -- batching -----------------------------------------------------------------------------------------------------


class Slow(LabelScorer):
    """Scores when it is let, remembers its batches, and cannot bear one word."""

    def __init__(self):
        super().__init__(Arithmetic(largest=9), "toy_sum")
        self.let, self.batches = threading.Event(), []

    def score(self, payloads):
        assert self.let.wait(10)
        self.batches.append([answer for _, answer in payloads])
        if any("poison" in answer for _, answer in payloads):
            raise RuntimeError("out of memory")
        return [
            float("nan") if "nan" in answer else outcome
            for (_, answer), outcome in zip(payloads, super().score(payloads), strict=True)
        ]


def in_thread(function, *arguments):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)))
    thread.start()
    return thread, found


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_queue_answers_429_with_a_time_to_come_back_and_then_serves_again():
    scorer = Slow()
    with serving([scorer], queue_items=4) as url:
        first = in_thread(post, url, BODY)
        until(lambda: "maporl_requests" in httpx2.get(f"{url}/metrics").text)
        time.sleep(0.2)  # the first is being scored; four more may wait
        waiting = in_thread(post, url, {"chats": [RIGHT] * 4, "references": ["2"] * 4})
        until(lambda: "maporl_queue_items 4.0" in httpx2.get(f"{url}/metrics").text)
        refused = post(url, BODY)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        scorer.let.set()
        for thread, found in (first, waiting):
            thread.join()
            assert found[0].status_code == 200
        assert post(url, BODY).status_code == 200
        assert [len(batch) for batch in scorer.batches] == [1, 4, 1]  # what waited was scored together


def test_batches_are_of_like_lengths_within_the_budget_and_nothing_waits_for_ever():
    scorer = Slow()
    with serving([scorer], batch_tokens=4000) as url:
        first = in_thread(post, url, BODY)
        time.sleep(0.3)
        chats = [chat_of("?", text) for text in ("a" * 4000, "b" * 64, "c" * 80_000, "d" * 64, "e" * 3600, "f" * 2400)]
        rest = in_thread(post, url, {"chats": chats, "references": ["2"] * 6})
        until(lambda: "maporl_queue_items 6.0" in httpx2.get(f"{url}/metrics").text)
        scorer.let.set()
        for thread, found in (first, rest):
            thread.join()
            assert [item["error"] for item in found[0].json()["results"]] == [None] * len(found[0].json()["results"])
        assert ["".join(answer[0] for answer in batch) for batch in scorer.batches] == ["2", "ae", "bd", "c", "f"]


def test_one_chat_that_breaks_the_scorer_does_not_take_others_with_it():
    scorer = Slow()
    scorer.let.set()
    with serving([scorer]) as url:
        chats = [RIGHT, chat_of("?", "poison"), WRONG, chat_of("?", "nan")]
        found = post(url, {"chats": chats, "references": ["2"] * 4}).json()["results"]
        assert [item["score"] for item in found] == [1.0, None, 0.0, None]
        assert {found[1]["error"]["code"], found[3]["error"]["code"]} == {"scoring_failed"}
        assert "out of memory" not in json.dumps(found)


def test_a_request_that_is_sent_again_is_not_scored_again():
    scorer = Slow()
    with serving([scorer]) as url:
        body = {"request_id": "same", **BODY}
        asked = [in_thread(post, url, body) for _ in range(3)]
        time.sleep(0.3)
        scorer.let.set()
        for thread, found in asked:
            thread.join()
            assert found[0].json()["results"][0]["score"] == 1.0
        assert post(url, body).status_code == 200 and scorer.batches == [["2"]]
        other = post(url, {**body, "chats": [WRONG]})
        assert other.status_code == 409 and other.json()["error"]["field"] == "request_id"


def test_clients_that_leave_and_requests_that_take_too_long_free_the_queue():
    scorer = Slow()
    with serving([scorer], answer_seconds=0.5) as url:
        late = post(url, BODY)
        assert late.status_code == 429 and late.json()["error"]["code"] == "too_busy"
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{url}/v1/score", json={"chats": [WRONG], "references": ["2"]}, timeout=0.2)
        until(lambda: "maporl_queue_items 0.0" in httpx2.get(f"{url}/metrics").text)
        scorer.let.set()
        assert post(url, BODY).json()["results"][0]["score"] == 1.0
        assert scorer.batches[-1] == ["2"] and ["3"] not in scorer.batches


# -- fuzzing ------------------------------------------------------------------------------------------------------


def mutated(rng):
    """A request body that is somewhere between right and noise."""
    text = bytearray(json.dumps(rng.choice([
        BODY, {"chats": [RIGHT, WRONG], "references": ["2", None], "request_id": f"id-{rng.randrange(50)}"},
        {"query_responses": [RIGHT]}, {"chats": [[{"role": "system", "content": "\u00e9\U0001f600"}, *RIGHT]]},
    ])).encode())  # fmt: skip
    for _ in range(rng.choice([0, 1, 1, 2, 5, 20])):
        place = rng.randrange(len(text) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            text[place:place] = rng.choice(
                [b"\\ud800", b"\xff", b"\x00", b'"', b"[", b"{", b"null", b"1e999", b"-0", b"\\u0000", b"true"]
            )
        elif kind == 1:
            del text[place : place + rng.randrange(1, 9)]
        elif kind == 2 and place < len(text):
            text[place] = rng.randrange(256)
        else:
            text[place:place] = text[place : place + rng.randrange(40)]
    return bytes(text)


def fuzz(url, count):
    rng, statuses = random.Random(0), {}
    with httpx2.Client(timeout=30) as http:
        for _ in range(count):
            kind = rng.choice(["application/json"] * 8 + ["text/plain", "application/x-www-form-urlencoded", ""])
            path = rng.choice(["/v1/score"] * 3 + ["/predict", "/v1/model", "/%00", "/v1/score/"])
            answer = http.request(rng.choice(["POST"] * 6 + ["GET", "PUT", "PATCH"]), f"{url}{path}", content=mutated(rng),
                                  headers={"content-type": kind})  # fmt: skip
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.status_code >= 400:
                assert answer.json()["error"]["code"]
    return statuses


@pytest.mark.slow
def test_ten_thousand_mutated_requests_and_the_schema_find_no_5xx(labels, tmp_path):
    statuses = fuzz(labels, 10_000)
    assert sum(statuses.values()) == 10_000 and max(statuses) < 500 and {200, 422} <= statuses.keys()
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{labels}/openapi.json", "--checks",
         "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance",
         "--max-examples", "500", "--seed", "1"],
        capture_output=True, text=True, cwd=tmp_path, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert httpx2.get(f"{labels}/health").status_code == 200


# -- the process --------------------------------------------------------------------------------------------------


def start(*arguments, **environment):
    """``python -m reward_server`` on a free port; gives (process, URL) once it is ready."""
    port = free_port()
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", **environment}
    process = processes.start(["-m", "reward_server", "--port", port, *arguments], environment)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    while True:
        assert process.poll() is None, process.output()[1]
        assert time.monotonic() < deadline
        try:
            if httpx2.get(f"{url}/ready").status_code == 200:
                return process, url
        except httpx2.TransportError:
            time.sleep(0.1)


def test_a_server_that_is_asked_to_stop_finishes_what_it_has(verifier_folder):
    process, url = start("--model", verifier_folder, "--device", "cpu", "--workers", "2")
    chats = [chat_of("1+1=", "2" * (1 + n % 50)) for n in range(MOST_CHATS)]
    thread, found = in_thread(post, url, {"chats": chats})
    until(lambda: "maporl_batch_items_count 0.0" not in httpx2.get(f"{url}/metrics").text)
    process.send_signal(signal.SIGTERM)
    thread.join()
    assert found[0].status_code == 200 and len(found[0].json()["results"]) == MOST_CHATS
    assert process.wait(30) in (0, -signal.SIGTERM)
    assert "Traceback" not in process.output()[1]


HOSTILE = {
    "mathematics without end": (r"\boxed{(x+y+z+w+a+b+c+d)^{12}}", "5"),
    "a label without end": (r"\boxed{x}", r"\sqrt{" * 30 + "(x+y+z+w+a+b+c+d)^{12}" + "}" * 30),
    "semicolons as a label": ("Answer: 5", ";" * 60_000 + "x"),
    "eight megabytes as a label": ("Answer: 5", "9" * 7_000_000),
    "semicolons": ("Answer: " + ";" * 90_000 + "x", "5"),
    "marks": ("the answer is " * 7_000, "5"),
    "signs before an equals sign": ("1" * 900 + "x = 5", "5"),
}


def test_hostile_texts_do_not_keep_a_served_grader_from_answering():
    process, url = start("--task", "math", "--labels", "--workers", "2")
    asked = [in_thread(post, url, {"chats": [chat_of("?", a)], "references": [r]}) for a, r in HOSTILE.values()]
    answers = 0
    while any(thread.is_alive() for thread, _ in asked) or not answers:
        assert httpx2.get(f"{url}/health", timeout=20).status_code == 200
        answers += 1
        time.sleep(0.02)
    for name, (_, found) in zip(HOSTILE, asked, strict=True):
        (item,) = found[0].json()["results"]
        wrong, refused = item["score"] == 0.0, item["error"] is not None
        assert refused if "label" in name and "without" not in name else wrong, (name, item)
    both = {"chats": [chat_of("?", r"\boxed{(x+1)^2}")] * 2, "references": ["x^2+2x+1", "x^2+2x"]}
    assert [item["score"] for item in post(url, both).json()["results"]] == [1.0, 0.0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
    assert "Traceback" not in process.output()[1]


def test_the_command_line_says_what_is_missing(tmp_path):
    for arguments, message in (
        ([], "expected either --model DIR, or --task NAME with --labels"),
        (["--model", "x", "--task", "gsm8k", "--labels"], "expected either --model DIR"),
        (["--task", "gsm9k", "--labels"], "did you mean 'gsm8k'"),
        (["--task", "gsm8k", "--labels", "--host", "0.0.0.0"], "a token is needed"),
        (["--model", str(tmp_path)], "could not be loaded"),
        (["--model", str(tmp_path), "--device", "cud:1"], "--device 'cud:1'"),
    ):
        result = CliRunner().invoke(cli, ["serve", *arguments, "--port", "0"])
        assert result.exit_code == 2 and message in result.output and result.output.startswith("error: "), result.output


@pytest.mark.parametrize("words", [["RUN"], ["--model", "RUN"]])
def test_who_serves_a_run_is_told_the_command_for_it(tmp_path, words):
    (tmp_path / "config.yaml").write_text("agents: {}")
    result = CliRunner().invoke(cli, ["serve", *(str(tmp_path) if word == "RUN" else word for word in words)])
    assert result.exit_code == 2 and f"a trained team is served by: maporl api {tmp_path}" in result.output


def test_a_taken_port_is_told_before_a_model_is_looked_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", "--model", str(tmp_path / "none"), "--port", port])
    assert result.exit_code == 2 and result.output == (
        f"error: --host 127.0.0.1 --port {port}: the port is taken, perhaps by another server; stop it, or choose another "
        "--port\n"
    )
    result = CliRunner().invoke(cli, ["serve", "--model", "x", "--host", "192.0.2.7", "--port", port], env={"MAPORL_SERVER_TOKEN": TOKEN})  # fmt: skip
    assert result.exit_code == 2 and "cannot be listened on" in result.output
