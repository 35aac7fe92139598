"""How many requests a second ``maporl api`` answers, beside ``transformers serve``; what a second adapter costs, and
whether memory stays flat.

    OMP_NUM_THREADS=2 python benchmarks/served_team.py speed RUN --model DIR [--rounds 3 --tokens 32 --output FILE]
    OMP_NUM_THREADS=2 python benchmarks/served_team.py soak RUN [--requests 10000 --output FILE]

``speed`` wants a run with two LoRA adapters on the model DIR, and asks the model itself of ``transformers serve``, with
its continuous batching on. Both get the same questions and sample greedily, in turn: a round asks one server with so
many clients, and then the other. Tokens a second are those of the replies. At the end the model decodes as many rows
without a server, which says how fast one can be at most. ``soak`` asks an agent and the team of a run of small models,
and reads the memory of the server.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import psutil
import torch
from machine import machine
from transformers import AutoModelForCausalLM, DynamicCache

from trl_ext.models.forward import cache_arguments

CLIENTS = (1, 8, 32)
TOPICS = ("the sea", "a clock", "winter", "bread", "a bridge", "maps", "an owl", "rivers", "glass", "a train")
NUMBERS = itertools.count(1000)


@contextmanager
def server(command: list[str], port: int, log: Path):
    """Start a server, and yield its address and its process once it answers."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            time.sleep(0.5)
            try:
                if httpx2.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx2.HTTPError:
                if process.poll() is not None:
                    sys.exit(f"{command}: ended; see {log}")
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, body: dict) -> int:
    """Ask, and return the number of tokens of the reply."""
    reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    reply.raise_for_status()
    return reply.json()["usage"]["completion_tokens"]


def bodies(models: list[str], count: int, tokens: int) -> list[dict]:
    """Requests of different lengths, to each of ``models`` in turn. No question is asked twice: servers keep beginnings
    of prompts, and only the chat template's is shared."""
    return [
        {
            "model": models[n % len(models)],
            "temperature": 0,
            "max_tokens": tokens,
            "messages": [
                {"role": "user", "content": f"{next(NUMBERS)}: {5 + n % 7} sentences about {TOPICS[n % len(TOPICS)]}."}
            ],
        }
        for n in range(count)
    ]


def measured(url: str, requests: list[dict], clients: int) -> dict[str, float]:
    """Ask all with so many clients at a time. Return requests and tokens a second."""
    began = time.monotonic()
    with ThreadPoolExecutor(clients) as threads:
        tokens = sum(threads.map(lambda body: ask(url, body), requests))
    seconds = time.monotonic() - began
    return {"requests": len(requests) / seconds, "tokens": tokens / seconds, "of_each": tokens / len(requests)}


def speed(arguments: argparse.Namespace) -> dict:
    """Measure both servers in turn."""
    model = str(arguments.model)
    command = ["maporl", "api", str(arguments.run), "--device", "cpu", "--dtype", arguments.dtype, "--port", "8711"]
    command += ["--max-tokens", str(arguments.tokens)]
    theirs = ["transformers", "serve", model, "--continuous-batching", "--device", "cpu", "--dtype", arguments.dtype]
    found: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        us, _ = stack.enter_context(server(command, 8711, Path("/tmp/served_ours.log")))
        them, _ = stack.enter_context(server([*theirs, "--port", "8712"], 8712, Path("/tmp/served_theirs.log")))
        for url, name in ((us, "ann"), (us, "bob"), (them, model)):
            ask(url, bodies([name], 1, 4)[0])
        for number in range(arguments.rounds):
            for clients in arguments.clients:
                count = max(4, clients * arguments.each)
                for kind, url, names in (
                    ("ours", us, ["ann"]),
                    ("transformers", them, [model]),
                    ("two adapters", us, ["ann", "bob"]),
                ):
                    one = measured(url, bodies(names, count, arguments.tokens), clients)
                    found.setdefault(f"{kind}, {clients}", []).append(one)
                    print(number, kind, clients, {key: round(value, 2) for key, value in one.items()}, flush=True)
    medians = {
        key: {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
        for key, rounds in found.items()
    }
    ratios = {}
    for clients in arguments.clients:
        ours, theirs, two = (
            medians[f"{kind}, {clients}"]["tokens"] for kind in ("ours", "transformers", "two adapters")
        )
        ratios[clients] = {"ours over transformers": ours / theirs, "one adapter over two": ours / two}
    alone = {clients: bare(model, clients, arguments) for clients in arguments.clients}
    return {"tokens": arguments.tokens, "dtype": arguments.dtype, "medians": medians, "ratios": ratios, "bare": alone}


@torch.no_grad()
def bare(folder: str, rows: int, arguments: argparse.Namespace) -> float:
    """Return the tokens a second that the model's own forward decodes greedily with a cache: no server, no adapter,
    and no prompt is counted. No server that decodes by it is faster."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=arguments.dtype).eval()
    cache, steps = DynamicCache(config=model.config), []
    ids = torch.randint(len(model.get_input_embeddings().weight), (rows, 40))
    for _ in range(arguments.tokens):
        began = time.perf_counter()
        ids = model(input_ids=ids, **cache_arguments(model, cache)).logits[:, -1:].argmax(-1)
        steps.append(time.perf_counter() - began)
    return rows / statistics.median(steps[1:])


def soak(arguments: argparse.Namespace) -> dict:
    """Ask many times, and read the server's memory on the way."""
    command = ["maporl", "api", str(arguments.run), "--device", "cpu", "--port", "8713"]
    memory: dict[int, float] = {}
    with server(command, 8713, Path("/tmp/served_soak.log")) as (url, process):
        names = [one["id"] for one in httpx2.get(f"{url}/v1/models").json()["data"]]
        with ThreadPoolExecutor(8) as threads, httpx2.Client(timeout=600) as client:

            def one(number: int) -> None:
                content = f"{number % 1000:03d}+"
                body = {"model": names[number % len(names)], "messages": [{"role": "user", "content": content}]}
                client.post(f"{url}/v1/chat/completions", json=body).raise_for_status()

            tenth = arguments.requests // 10
            for part in range(10):
                list(threads.map(one, range(part * tenth, (part + 1) * tenth)))
                memory[(part + 1) * tenth] = psutil.Process(process.pid).memory_info().rss / 2**20
                print((part + 1) * tenth, round(memory[(part + 1) * tenth], 1), "MiB", flush=True)
    return {"requests": arguments.requests, "mib": memory}


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "soak"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=2, help="requests of each client in a round")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result = {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
    result |= speed(arguments) if arguments.what == "speed" else soak(arguments)
    print(json.dumps(result, indent=1))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
