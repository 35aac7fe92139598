"""Which verifier gives the rewards: another one at the same address or in the same folder stops the run, or is warned
of."""

import json
import shutil
import socket
import time

import pytest
import torch
from served_verifiers import CHATS, TRUTHS, Fake, client, ready, serve, wait_for
from tiny_runs import config_of, start

from maporl.config.schema import TinySection
from maporl.rewards.identity import Identity, VerifierChanged, recall_verifiers, record_verifiers
from maporl.runs import train as run
from maporl.tiny import build_tiny_classifier, build_tiny_tokenizer
from maporl.verifier.model import Verifier
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import ServedVerifier, forget_verifiers, load_verifier

A, B = "a" * 64, "b" * 64


def answer(sha256, name="v", count=2):
    named = {} if sha256 is None else {"sha256": sha256, "model": name}
    return {"results": [{"score": 0.25}] * count, **named}


def test_another_verifier_stops_or_is_warned_of(caplog):
    one = Identity()
    one.see(None, "old server", "here")  # a server that does not say what it is
    assert one.remembered() == {}
    one.see(A, "first", "server x")
    one.see(A, "first under another name", "server x")
    assert one.remembered() == {"sha256": A, "name": "first"}
    told = r"server x: is another verifier now, 'second' with sha256 b{16}; the run has had 'first' with sha256 a{16}, whose scores .*; serve the first"
    with pytest.raises(VerifierChanged, match=told):
        one.see(B, "second", "server x")
    with pytest.raises(VerifierChanged, match=r"'\?' with sha256 unknown; the run has had 'first'"):
        one.see(None, "?", "server x")
    assert one.remembered() == {"sha256": A, "name": "first"}, "the first one may come back"
    with pytest.raises(VerifierChanged, match="here: is another verifier now, 'first'"):
        one.recall({"sha256": B, "name": "earlier"}, "here")
    assert not caplog.records
    other = Identity("warn")
    other.see(A, "first", "server x")
    other.see(B, "second", "server x")
    assert other.remembered() == {"sha256": B, "name": "second"}
    assert "server x: is another verifier now, 'second'" in caplog.text and "it goes on with the new one" in caplog.text


@pytest.mark.parametrize("on_failure", ["stop", "wait", "label"])
def test_each_answer_says_which_verifier_it_is_from(on_failure):
    fake = Fake(answer(A), answer(A), answer(B))
    asking = client(fake, on_failure=on_failure)
    assert asking.scores(CHATS[:4], TRUTHS[:4]) == [0.25] * 4
    assert asking.identity.remembered() == {"sha256": A, "name": "v"}
    with pytest.raises(VerifierChanged, match=f"verifier server {fake.url}: is another verifier now"):
        asking.scores(CHATS[:2], TRUTHS[:2])  # also where failures are labelled or waited for
    assert len(fake.asked) == 3, "nobody asks it again"
    going_on = client(Fake(answer(A), answer(B)), on_failure=on_failure, on_change="warn")
    assert going_on.scores(CHATS[:2], TRUTHS[:2]) == going_on.scores(CHATS[:2], TRUTHS[:2])
    assert going_on.identity.remembered()["sha256"] == B


def test_two_servers_must_have_one_verifier(caplog):
    with pytest.raises(VerifierChanged):
        client(Fake(answer(A)), Fake(answer(B))).scores(CHATS[:8], TRUTHS[:8])
    unnamed = client(Fake(answer(None), answer(None)))
    for _ in range(2):  # it is said once
        assert unnamed.scores(CHATS[:2], TRUTHS[:2]) == [0.25] * 2 and unnamed.identity.remembered() == {}
    assert caplog.text.count("does not say which verifier it has (sha256), so that another one goes unnoticed") == 1
    for wrong in (7, "", "x" * 129):
        with pytest.raises(RuntimeError, match="expected sha256 of its verifier as a text"):
            client(Fake(answer(wrong)), retries=0).scores(CHATS[:2], TRUTHS[:2])


def test_one_request_that_fails_ends_those_that_wait_for_ever():
    """The second server refuses, and the first one cannot be reached: with ``wait`` its thread asks again without an
    end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{found.getsockname()[1]}"
    with pytest.raises(RuntimeError, match="answered 401"):
        client(dead, Fake(401), on_failure="wait").scores(CHATS, TRUTHS)


def tiny_verifier(seed, folder=None):
    section = TinySection(hidden_size=32, layers=1, context=64)
    tokenizer = build_tiny_tokenizer(section)
    torch.manual_seed(seed)
    model = build_tiny_classifier(section, tokenizer)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Verifier.of(model, tokenizer, "v", device="cpu")


def test_the_digest_is_that_of_everything_that_decides_scores():
    first = tiny_verifier(1)
    digests = [first.digest(), tiny_verifier(2).digest()]
    first.temperature = 2.0
    digests.append(first.digest())
    first.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    digests.append(first.digest())
    first.tokenizer.add_tokens(["maporl"])
    digests.append(first.digest())
    assert len(set(digests)) == 5 and all(len(digest) == 64 for digest in digests)
    again = tiny_verifier(1)
    again.model.to(torch.bfloat16)
    assert again.digest() == digests[0]


def test_a_run_writes_down_its_verifiers_by_update(tmp_path):
    source = ServedVerifier(client(Fake(answer(A), answer(B)), on_change="warn"), label=False)
    record_verifiers(tmp_path, 1, {"verifier": source})
    assert not list(tmp_path.iterdir()), "it has not scored yet"
    for update in (1, 2, 3):
        source.client.scores(CHATS[:2], TRUTHS[:2])
        record_verifiers(tmp_path, update, {"verifier": source, "other": load_nothing()})
    first, second = {"since": 1, "sha256": A, "name": "v"}, {"since": 2, "sha256": B, "name": "v"}
    assert json.loads((tmp_path / "verifiers.json").read_text()) == {"verifier": [first, second]}
    strict = ServedVerifier(client(Fake(answer(B))), label=False)
    recall_verifiers(tmp_path, 2, {"verifier": strict})
    with pytest.raises(VerifierChanged):  # a run that goes on after update 1 has had the first one
        strict.client.scores(CHATS[:2], TRUTHS[:2])
    strict = ServedVerifier(client(Fake(answer(B))), label=False)
    recall_verifiers(tmp_path, 3, {"verifier": strict})
    assert strict.client.scores(CHATS[:2], TRUTHS[:2]) == [0.25] * 2


def test_an_update_that_is_made_again_writes_its_verifier_anew(tmp_path):
    for sha256 in (A, B):
        source = ServedVerifier(client(Fake(answer(sha256))), label=False)
        source.client.scores(CHATS[:2], TRUTHS[:2])
        record_verifiers(tmp_path, 3, {"verifier": source})
    written = json.loads((tmp_path / "verifiers.json").read_text())
    assert written == {"verifier": [{"since": 3, "sha256": B, "name": "v"}]}


def load_nothing():
    from maporl.rewards.base import FunctionSource

    return FunctionSource(lambda dialogues, task: [])


def test_a_resumed_run_compares_with_its_checkpoint(tmp_path, caplog):
    model, folder = tmp_path / "verifier", tmp_path / "run"
    first = tiny_verifier(1, model).digest()

    def train(resume, **verifier):
        forget_verifiers()  # as a new process begins
        reward = {"sources": {"verifier": 1.0}, "verifier": {"model": str(model), **verifier}}
        run.train(config_of(folder, 2, {"reward": reward}), resume=resume, quiet=True)

    train(False)
    state = json.loads((folder / "checkpoint-1/state.json").read_text())
    assert state["rewards"] == {"verifier": {"sha256": first, "name": str(model)}}
    for later in ("final", "checkpoint-2"):
        shutil.rmtree(folder / later)
    second = tiny_verifier(2, model).digest()
    with pytest.raises(VerifierChanged, match=f"reward.verifier.model {model}: is another verifier now"):
        train(True)
    train(True, on_change="warn")
    assert "it goes on with the new one" in caplog.text
    had = json.loads((folder / "verifiers.json").read_text())["verifier"]
    assert [(one["since"], one["sha256"]) for one in had] == [(1, first), (2, second)]
    assert load_verifier(VerifierSection(tiny=TinySection(), learn_every=1)).remembered() == {}, "it changes by itself"


@pytest.mark.slow
def test_a_server_that_comes_back_with_another_verifier_stops_the_run(tmp_path):
    """Real servers and real kills. The run waits for the dead server, and refuses the one that comes instead."""
    pytest.importorskip("fastapi")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url, models, folder = f"http://127.0.0.1:{port}", [tmp_path / "first", tmp_path / "second"], tmp_path / "run"
    for seed, model in enumerate(models):
        tiny_verifier(seed, model)

    def started(model):
        server = serve(port, "--model", model, "--device", "cpu")
        wait_for(lambda: ready(url))
        return server

    def records():
        file = folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    verifier = {"urls": [url], "on_failure": "wait", "retries": 1}
    config = config_of(folder, 40, {"reward": {"sources": {"verifier": 1.0}, "verifier": verifier}})
    server = started(models[0])
    try:
        process = start(tmp_path, config)
        wait_for(lambda: records() >= 3)
        server.kill()
        time.sleep(1)
        server = started(models[1])
        assert process.wait(120) == 1
        said = process.output()[1]
        assert said.count("error:") == 1 and f"verifier server {url}: is another verifier now" in said, said
        before = records()
        refused = start(tmp_path, config, "--resume")
        assert refused.wait(120) == 1 and "is another verifier now" in refused.output()[1]
        server.kill()
        server = started(models[0])
        assert before < 40
        again = start(tmp_path, config, "--resume")
        assert again.wait(300) == 0, again.output()[1]
        assert len(json.loads((folder / "verifiers.json").read_text())["verifier"]) == 1
    finally:
        server.kill()
