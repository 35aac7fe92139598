"""Measure the reward server's throughput against offline scoring and against one request at a time.

    python benchmarks/reward_server.py [--model DIR] [--requests 128] [--tokens 100 250] [--concurrency 32] [--rounds 3]
    python benchmarks/reward_server.py --soak 20000

Without ``--model``, the verifier has the size of SmolLM2-135M and random bfloat16 weights. ``--tokens`` are the lengths
of the shortest and the longest chat. Every round measures three ways on the same chats, one after the other:
``Verifier.score`` in this process, the server with ``--concurrency`` clients that each send one chat at a time, and a
server that handles one request at a time with as many clients. ``--soak`` sends that many requests, and compares
latency and memory of the four quarters. Servers run in other processes. The result is printed as JSON.
"""

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch
from serving import serving
from transformers import LlamaConfig, LlamaForSequenceClassification

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_tokenizer
from maporl.verifier.encoding import chat_of
from maporl.verifier.model import Verifier


def make_verifier(folder: Path, small: bool) -> str:
    """Save a verifier with random weights in ``folder``. It has the shape of SmolLM2-135M, or a ``small`` one."""
    tokenizer = build_tiny_tokenizer(TinySection())
    shape = (64, 128, 2, 4, 4) if small else (576, 1536, 30, 9, 3)
    hidden, inner, layers, heads, kv = shape
    config = LlamaConfig(
        vocab_size=1000 if small else 49152, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, num_labels=1, max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextmanager
def serving_model(model: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Serve ``model`` on the processor, and yield the server's URL and its process."""
    log = Path(tempfile.gettempdir()) / "reward_server.log"
    with serving(log, "reward_server", "--model", model, "--device", "cpu", *options) as (url, process):
        yield url, psutil.Process(process.pid)


def ask(url: str, chats: list, concurrency: int) -> tuple[float, list[float], list[float]]:
    """Send one chat in each request with ``concurrency`` clients. Return seconds, latencies and scores.

    Each client keeps one connection of the standard library, which leaves most of the machine to the server.
    """
    client = threading.local()
    bodies = [json.dumps({"chats": [chat]}) for chat in chats]

    def send(body: str) -> tuple[float, float]:
        if not hasattr(client, "connection"):
            client.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        started = time.perf_counter()
        client.connection.request("POST", "/v1/score", body, {"Content-Type": "application/json"})
        response = client.connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {text!r}")
        return time.perf_counter() - started, json.loads(text)["results"][0]["score"]

    with ThreadPoolExecutor(concurrency) as pool:
        started = time.perf_counter()
        found = list(pool.map(send, bodies))
        seconds = time.perf_counter() - started
    return seconds, [latency for latency, _ in found], [score for _, score in found]


def throughput(model: str, chats: list, concurrency: int, rounds: int) -> dict:
    """Measure chats per second, offline and served, one after the other in each round."""
    verifier = Verifier.load(model, "cpu")
    verifier.score(chats[:16])
    rates: dict[str, list[float]] = {"offline": [], "served": [], "one_at_a_time": []}
    with serving_model(model) as (url, _), serving_model(model, "--batch-tokens", "1") as (alone, _):
        ask(url, chats[:16], 4)
        ask(alone, chats[:16], 4)
        for _ in range(rounds):
            started = time.perf_counter()
            expected = verifier.score(chats)
            rates["offline"].append(len(chats) / (time.perf_counter() - started))
            for name, server in (("served", url), ("one_at_a_time", alone)):
                seconds, _, scores = ask(server, chats, concurrency)
                rates[name].append(len(chats) / seconds)
                assert np.allclose(scores, expected, atol=0.02), "the server scores otherwise"
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    return {
        "chats_per_second": rates,
        "served_over_offline": medians["served"] / medians["offline"],
        "served_over_one_at_a_time": medians["served"] / medians["one_at_a_time"],
    }


def soak(model: str, chats: list, requests: int, concurrency: int) -> dict:
    """Measure p50 and p99 latency in milliseconds and the server's memory in MB, for each quarter of the requests."""
    quarters = []
    with serving_model(model) as (url, process):
        ask(url, chats, concurrency)
        for _ in range(4):
            seconds, latencies, _ = ask(url, [chats[i % len(chats)] for i in range(requests // 4)], concurrency)
            p50, p99 = np.percentile(latencies, [50, 99]) * 1000
            rss = process.memory_info().rss / 2**20
            quarters.append(
                {"requests_per_second": requests / 4 / seconds, "p50_ms": p50, "p99_ms": p99, "rss_mb": rss}
            )
    return {"requests": requests, "quarters": quarters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs=2, default=(100, 250), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_verifier(Path(folder), small=bool(options.soak))
        chats = [
            chat_of("1+1=", "".join(rng.choices("0123456789", k=rng.randint(*options.tokens) - 5)))
            for _ in range(options.requests)
        ]
        if options.soak:
            result = soak(model, chats, options.soak, options.concurrency)
        else:
            result = throughput(model, chats, options.concurrency, options.rounds)
    print(json.dumps({"concurrency": options.concurrency, "chat_tokens": options.tokens, **result}))


if __name__ == "__main__":
    main()
