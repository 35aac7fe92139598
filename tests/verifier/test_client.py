"""The client of verifier servers: turns, retries, what is done when none answers. Real servers, some of them bad."""

import json
import os
import re
import socket
import time

import processes
import pytest
import torch
import yaml
from safetensors.torch import load_file
from served_verifiers import CHATS, TRUTHS, Fake, client, ready, serve, wait_for

from maporl import Arithmetic
from maporl.errors import ConfigError
from maporl.rewards.base import RewardFailure
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict
from maporl.verifier.client import Servers, Unavailable, VerifierFailure, server_urls
from maporl.verifier.encoding import chat_of
from maporl.verifier.model import Verifier
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import ServedVerifier, load_verifier


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_servers_take_turns_and_one_that_fails_sits_out_longer_each_time():
    clock = Clock()
    servers = Servers(["a", "b", "c"], clock)
    assert [servers.take() for _ in range(4)] == ["a", "b", "c", "a"]
    assert servers.eject("b") and not servers.eject("b")
    assert [servers.take() for _ in range(4)] == ["c", "a", "c", "a"]
    clock.now = 1.0
    assert "b" in [servers.take() for _ in range(3)]
    servers.eject("b")
    clock.now = 2.9
    assert "b" not in [servers.take() for _ in range(3)]
    clock.now = 3.0
    assert "b" in [servers.take() for _ in range(3)]
    servers.restore("b")
    servers.eject("b")
    clock.now = 4.0
    assert "b" in [servers.take() for _ in range(3)]
    for url in "abc":
        servers.eject(url)
        clock.now += 0.1
    assert servers.take() == "a"  # none is in: the one that is back first


def test_requests_of_one_step_go_out_at_once_to_all_servers_in_order(monkeypatch):
    monkeypatch.setenv("MAPORL_SERVER_TOKEN", "secret-secret-secret")
    both = Fake("good"), Fake("good")
    asking = client(*both)
    assert asking.scores(CHATS, TRUTHS) == [0.25] * 10
    assert {len(fake.asked) for fake in both} == {2, 3}
    path, headers, body = both[0].asked[0]
    assert path == "/v1/score" and headers["Authorization"] == "Bearer secret-secret-secret"
    assert len(body["chats"]) == 2 == len(body["references"]) and body["request_id"].isalnum()
    assert asking.take_counts() == {"requests": 5, "retries": 0, "ejected": 0, "waits": 0, "failures": 0, "labelled": 0}


def test_equal_chats_are_asked_for_once_and_have_one_score():
    """The server gives another score to each place of a request, as one that draws its scores does."""
    fake = Fake({"results": [{"score": score} for score in (0.1, 0.2, 0.3)]})
    first, second = CHATS[:2]
    asked = ([first, second, first, first, second], ["0", "1", "0", "9", "1"])
    assert client(fake, batch_size=10).scores(*asked) == [0.1, 0.2, 0.1, 0.3, 0.2]
    ((_, _, body),) = fake.asked
    assert (body["chats"], body["references"]) == ([first, second, first], ["0", "1", "9"])
    assert client(fake).scores([], []) == [] and len(fake.asked) == 1


def test_what_may_pass_is_tried_again_elsewhere_under_the_same_id():
    bad, good = Fake(503, "hang up", "good"), Fake("good")
    asking = client(bad, good, batch_size=10)
    assert asking.scores(CHATS, TRUTHS) == [0.25] * 10
    assert len(bad.asked) == 1 == len(good.asked)
    assert bad.asked[0][2]["request_id"] == good.asked[0][2]["request_id"]
    counts = asking.take_counts()
    assert (counts["requests"], counts["retries"], counts["ejected"]) == (2, 1, 1)
    alone = client(Fake(500, "hang up", "good"), batch_size=10)
    assert alone.scores(CHATS, TRUTHS) == [0.25] * 10 and alone.take_counts()["retries"] == 2


def test_a_busy_server_is_asked_again_when_it_said_and_is_not_ejected(caplog):
    asking = client(Fake(429, "good"), batch_size=10)
    with caplog.at_level("INFO"):
        assert asking.scores(CHATS, TRUTHS) == [0.25] * 10
    assert "next in 1.0 s" in caplog.text and asking.take_counts()["ejected"] == 0


def test_an_outage_that_many_requests_meet_is_told_in_one_line_and_its_end_in_another(caplog):
    fake = Fake(*[500] * 12, "good")
    asking = client(fake, batch_size=1, concurrency=8, on_failure="wait", retries=1)
    assert asking.scores(CHATS, TRUTHS) == [0.25] * 10
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    told, again = [line for line in warned if "sha256" not in line]
    assert "answered 500" in told and told.endswith("further attempts are not told")
    # the answer to a request that failed may be read after the first one that did not
    counted = re.search(rf"{fake.url} answers again after \d+ s, in which (\d+) requests failed", again)
    assert 12 - 7 <= int(counted[1]) <= 12


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (422, r"answered 422 \(e at f: m\)"),
        (401, "answered 401"),
        ({"results": [{"score": 0.5}]}, "expected 10 results, got 1"),
        ({"results": None}, "expected 10 results, got None"),
        ([1], "expected a JSON object, got list"),
        ({"results": [{"score": 1.5}] * 10}, r"expected a score in \[0, 1\], got 1\.5"),
        ({"results": [{"score": float("nan")}] * 10}, r"got nan"),
        ({"results": [{"score": None}] * 10}, "got None"),
        ({"results": [{"error": {"code": "too_long", "message": "70 tokens"}}] * 10}, "could not score an answer: too_long: 70 tokens"),
    ],
)  # fmt: skip
def test_what_will_not_pass_is_an_error_naming_the_server_at_once(answer, message):
    fake = Fake(answer)
    with pytest.raises(VerifierFailure, match=rf"verifier server {fake.url}: .*{message}") as caught:
        client(fake, batch_size=10).scores(CHATS, TRUTHS)
    assert caught.value.url == fake.url and isinstance(caught.value, RewardFailure) and len(fake.asked) == 1


def test_a_server_that_is_not_there_stops_the_run_after_the_retries():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    asking = client(url, retries=1, batch_size=10)
    with pytest.raises(Unavailable, match=rf"verifier server {url}: cannot be reached \(ConnectError"):
        asking.scores(CHATS, TRUTHS)
    counts = asking.take_counts()
    assert (counts["requests"], counts["retries"], counts["failures"]) == (2, 1, 1)


def dialogues():
    def utterance(n, text):
        return Utterance(0, "ann", "ann", turn=0, order=0, messages=[], text=text)

    return [Dialogue(Example(f"e{n}", f"{n}+1=", str(n + 1)), [utterance(n, str(n + 1 + n % 2))]) for n in range(4)]


def test_labels_stand_in_for_a_server_that_fails_and_are_counted():
    asking = ServedVerifier(client(Fake(500), retries=0, on_failure="label"), label=True)
    assert asking(dialogues(), Arithmetic(largest=9)) == [[1.0], [0.0], [1.0], [0.0]]
    assert [asking.after_update(1, [], None)["verifier/labelled"] for _ in range(2)] == [4.0, 0.0]
    half = Fake({"results": [{"score": 0.5}, {"error": {"code": "too_long", "message": "m"}}]})
    asking = ServedVerifier(client(half, on_failure="label"), label=True)
    assert asking(dialogues(), Arithmetic(largest=9)) == [[0.5], [0.0], [0.5], [0.0]]


def test_where_servers_come_from(monkeypatch):
    monkeypatch.setenv("MAPORL_VERIFIER_URLS", "http://a:1, http://b:2/")
    assert server_urls(VerifierSection()) == ("http://a:1", "http://b:2/")
    assert server_urls(VerifierSection(model="here")) == ()
    assert server_urls(VerifierSection(urls=("http://c:3",))) == ("http://c:3",)
    assert load_verifier(VerifierSection()).client.urls == ("http://a:1", "http://b:2")
    monkeypatch.setenv("MAPORL_VERIFIER_URLS", "a:1")
    with pytest.raises(ConfigError, match="MAPORL_VERIFIER_URLS: expected http://HOST:PORT, got 'a:1'"):
        load_verifier(VerifierSection())
    monkeypatch.delenv("MAPORL_VERIFIER_URLS")
    with pytest.raises(ConfigError, match=r"expected a model to load here, or urls of servers; got neither"):
        load_verifier(VerifierSection())
    base = {"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}}
    for section, message in (
        ({"urls": ["localhost:8501"]}, r"urls: expected http://HOST:PORT, got 'localhost:8501'"),
        ({"urls": ["http://h"], "api": "vllm"}, r"api: vllm needs 'model' too"),
        ({"urls": ["http://h"], "on_failure": "zero"}, r"reward\.verifier\.on_failure"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_dict({**base, "reward": {"sources": {"verifier": 1.0}, "verifier": section}})


def test_vllm_is_asked_by_token_ids_and_its_probabilities_are_calibrated(tiny, tmp_path):
    _, tokenizer = tiny()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "verifier.json").write_text('{"temperature": 2.0}')
    fake = Fake({"data": [{"index": 1, "probs": [0.9, 0.5]}, {"index": 0, "probs": [0.8]}]})
    asking = client(fake, api="vllm", model=str(tmp_path))
    chats = [chat_of("1+1=", "2"), chat_of("1+2=", "3")]
    assert asking.scores(chats, ["2", "3"]) == pytest.approx([2 / 3, 0.5])  # odds of 4 become 2
    path, _, body = fake.asked[0]
    assert path == "/classify" and body["model"] == str(tmp_path)
    assert [tokenizer.decode(ids) for ids in body["input"]] == ["1+1=2<eos>", "1+2=3<eos>"]
    wrong = client(
        Fake({"data": [{"index": n, "probs": [0.1, 0.2, 0.7]} for n in (0, 1)]}), api="vllm", model=str(tmp_path)
    )
    with pytest.raises(VerifierFailure, match="expected probabilities of one class or two"):
        wrong.scores(chats, ["2", "3"])


# -- a server that dies while a team trains -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_killed_and_restarted_while_a_team_trains_changes_nothing(tmp_path):
    pytest.importorskip("fastapi")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    tiny = {"hidden_size": 32, "layers": 1, "heads": 2}
    config = {
        "updates": 12, "task": {"name": "toy_sum", "largest": 9},
        "agents": {"ann": {"tiny": tiny}, "bob": {"tiny": {**tiny, "architecture": "qwen3"}}},
        "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}", "separator": ";", "feedback": "none"},
        "reward": {"sources": {"verifier": 1.0}, "verifier": {"urls": [url], "on_failure": "wait", "retries": 1}},
        "warm_start": {"steps": 5, "batch_size": 8}, "ppo": {"response_length": 3, "temperature": 1.0},
        "training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-3},
        "evaluation": {"questions": 0},
    }  # fmt: skip

    def train(name):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**config, "output_dir": str(tmp_path / name)}))
        return processes.start(["-m", "maporl", "train", path, "-q"])

    def updates(name):
        file = tmp_path / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    server = serve(port)
    try:
        wait_for(lambda: ready(url))
        calm = train("calm")
        assert calm.wait(300) == 0, calm.output()[1]
        shaken = train("shaken")
        wait_for(lambda: len(updates("shaken")) >= 3)
        server.kill()
        wait_for(lambda: ", next in" in shaken.output()[1])
        before = len(updates("shaken"))
        assert 3 <= before < 12 and shaken.poll() is None
        time.sleep(0.5)
        assert len(updates("shaken")) == before  # it waits
        server = serve(port)
        assert shaken.wait(300) == 0, shaken.output()[1]
    finally:
        server.kill()
    assert (
        sum(row["verifier/waits"] for row in updates("shaken"))
        > 0
        == sum(row["verifier/waits"] for row in updates("calm"))
    )
    assert (tmp_path / "calm/dialogues.jsonl").read_text() == (tmp_path / "shaken/dialogues.jsonl").read_text()
    for name in ("ann", "bob"):
        calm, shaken = (load_file(tmp_path / run / "final" / name / "model.safetensors") for run in ("calm", "shaken"))
        assert all(torch.equal(calm[key], shaken[key]) for key in calm)


@pytest.mark.vllm
def test_a_real_vllm_scores_as_this_process_does():
    """Needs ``vllm serve FOLDER --runner pooling --dtype float32``: MAPORL_TEST_VLLM_URL, and FOLDER in
    MAPORL_TEST_VLLM_MODEL, a verifier with a temperature."""
    url, model = os.environ["MAPORL_TEST_VLLM_URL"], os.environ["MAPORL_TEST_VLLM_MODEL"]
    chats = [chat_of(f"What is {n} + {n}?", f"It is {2 * n}. " * (1 + n % 5)) for n in range(20)]
    served = client(url, api="vllm", model=model, timeout=120).scores(chats, [""] * 20)
    here = Verifier.load(model, "cpu", "float32")
    assert here.temperature != 1.0 and served == pytest.approx(here.score(chats), abs=1e-3)
