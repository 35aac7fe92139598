"""Verifiers that are served, and one that learns beside the team."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import processes
import pytest
import torch
from launches import free_port
from transformers import LlamaConfig, LlamaForSequenceClassification

from maporl.config.schema import RewardSection, TinySection
from maporl.rewards.build import build_sources
from maporl.verifier.client import VerifierClient, server_urls
from maporl.verifier.encoding import chat_of
from maporl.verifier.section import VerifierSection
from reward_server.options import ServerOptions
from reward_server.serve import server


@contextmanager
def serving(scorers, **options):
    """A server in a thread; gives its URL."""
    running = server(scorers, ServerOptions(port=free_port(), **options), log_level="critical")
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{running.config.port}"
    finally:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def verifier_folder(tmp_path_factory):
    from maporl.config.schema import TinySection
    from maporl.tiny import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(TinySection())
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_labels=1, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("verifier")
    LlamaForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "verifier.json").write_text(json.dumps({"temperature": 1.7, "metrics": {"held_out": {"auc": 0.5}}}))
    return str(folder)


CHATS, TRUTHS = [chat_of(f"{n}", f"Answer: {n}") for n in range(10)], [str(n) for n in range(10)]


class Fake:
    """A server that answers as ``script`` says, one entry a request, the last one for ever; remembers what it was
    asked.

    An entry is a status, a body, or "hang up".
    """

    def __init__(self, *script):
        self.script, self.asked, self.lock = list(script), [], threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with fake.lock:
                    fake.asked.append((self.path, dict(self.headers), body))
                    entry = fake.script.pop(0) if len(fake.script) > 1 else fake.script[0]
                if entry == "hang up":
                    self.connection.close()
                    return
                if entry == "good":
                    entry = {"results": [{"score": 0.25} for _ in body["chats"]]}
                status, text = (
                    (entry, b'{"error": {"code": "e", "message": "m", "field": "f"}}')
                    if isinstance(entry, int)
                    else (200, json.dumps(entry).encode())
                )
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", "1")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def client(*fakes, **options):
    urls = tuple(getattr(fake, "url", fake) for fake in fakes)
    section = VerifierSection(**{"urls": urls, "batch_size": 2, "retries": 3, "timeout": 2, **options})
    return VerifierClient(section, server_urls(section))


def serve(port, *words):
    words = words or ("--task", "toy_sum", "--labels")
    return processes.start(["-m", "reward_server", *words, "--port", port])


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ready(url):
    try:
        return httpx2.get(f"{url}/ready").status_code == 200
    except httpx2.TransportError:
        return False


TINY = TinySection(alphabet="0123456789+=", hidden_size=32, layers=1, heads=2)


def learner(**options):
    section = VerifierSection(tiny=TINY, learn_every=1, learning_rate=3e-3, **options)
    return build_sources(RewardSection(sources={"verifier": 1.0}, verifier=section), ["verifier"])["verifier"]
