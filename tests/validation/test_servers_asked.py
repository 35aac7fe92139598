"""Servers that a run names are asked before it begins."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny_runs import config_of

from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.validation import servers
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def server():
    """A server that answers GET with a status, and keeps which paths were asked for with which keys."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found.asked.append((self.path, self.headers["authorization"]))
            body = json.dumps(found.says).encode()
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked, found.status, found.url = [], 200, f"http://127.0.0.1:{found.server_port}"
    found.says = {"error": {"code": "no", "message": "no such key"}}
    threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def team(tmp_path, **changes):
    """A run of a tiny model and of an agent behind an API."""
    values = {
        "output_dir": str(tmp_path / "run"),
        "task": {"name": "toy_sum", "largest": 9},
        "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}", "separator": ";"},
        "agents": {
            "ann": {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 16, "layers": 1, "heads": 2}},
            "bob": {"engine": "openai", "api": {"model": "gpt"} | changes.pop("api", {})},
        },
        "ppo": {"response_length": 4},
        "training": {"per_device_train_batch_size": 8, "use_cpu": True},
        "evaluation": {"questions": 0},
    }
    return from_dict(values | changes)


def faults(config):
    return [(fault.severity, str(fault)) for fault in servers.check(ResolvedRun(config))]


def verified(tmp_path, url, **options):
    reward = {"verifier": {"urls": [url], **options}, "sources": {"verifier": 1.0}}
    return team(tmp_path, api={"base_url": NOWHERE}, reward=reward)


def test_an_agent_without_key_is_told_before_anything_is_played_and_the_verifier_beside_it(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    reward = {"verifier": {"urls": [NOWHERE]}, "sources": {"verifier": 1.0}}
    with pytest.raises(ConfigError, match=r"^agents\.bob\.api: OPENAI_API_KEY holds no key; set it, or") as refusal:
        check_run(team(tmp_path, reward=reward))
    (note,) = refusal.value.__notes__
    assert note.startswith("error: reward.verifier: http://127.0.0.1:9: cannot be reached (")
    assert note.endswith("start it: maporl serve --model FOLDER")
    check_run(team(tmp_path, reward=reward), ask_servers=False)


def test_an_endpoint_that_answers_anything_will_do_and_one_that_takes_no_key_will_not(tmp_path, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-wrong-key")
    config = team(tmp_path, api={"base_url": f"{server.url}/v1"})
    for status in (200, 404, 500):
        server.status = status
        assert faults(config) == []
    server.status = 401
    ((severity, said),) = faults(config)
    assert severity == "error" and "answered 401" in said
    assert said.endswith("set the environment variable OPENAI_API_KEY to a key that it takes")
    assert set(server.asked) == {("/v1/models", "Bearer a-wrong-key")}


def test_a_verifier_that_does_not_answer_is_an_error_unless_the_run_would_wait_or_do_without(tmp_path):
    of = {
        how: [severity for severity, said in faults(verified(tmp_path, NOWHERE, on_failure=how)) if "verifier" in said]
        for how in ("stop", "wait", "label")
    }
    assert of == {"stop": ["error"], "wait": ["warning"], "label": ["warning"]}


def test_a_verifier_is_asked_for_its_model_with_the_token(tmp_path, server, monkeypatch):
    monkeypatch.setenv("MAPORL_SERVER_TOKEN", "the-token-of-the-server")
    assert [said for _, said in faults(verified(tmp_path, server.url)) if "verifier" in said] == []
    assert server.asked == [("/v1/model", "Bearer the-token-of-the-server")]


@pytest.mark.parametrize(("longest", "warned"), [(5, False), (4, True), (None, False)])
def test_an_answer_that_is_longer_than_what_a_server_says_that_it_reads_is_warned_of(tmp_path, server, longest, warned):
    """``ppo.response_length`` is 4."""
    server.says = {"name": "v", "kind": "verifier", "sha256": "0", "longest_chat_tokens": longest}
    said = [fault for fault in faults(verified(tmp_path, server.url)) if "verifier" in fault[1]]
    assert [severity for severity, _ in said] == ["warning"] * warned
    assert (
        not warned or "reads chats of at most 4 tokens, and an answer of ppo.response_length may have 4 " in said[0][1]
    )


def test_a_server_that_is_slow_is_only_warned_of(tmp_path, server, monkeypatch):
    monkeypatch.setattr(servers, "SECONDS", 0.0)
    slow = [fault for fault in faults(verified(tmp_path, server.url)) if "short question" in fault[1]]
    assert [severity for severity, _ in slow] == ["warning"] * len(slow) != []


def test_a_run_without_servers_asks_nobody(tmp_path):
    assert list(servers.check(ResolvedRun(config_of(tmp_path)))) == []
