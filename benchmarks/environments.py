"""Measure tools and environments: search, TRL's classes, servers of MCP and of OpenEnv, and what they cost a rollout.

    python benchmarks/environments.py search --corpus FILE   # index and query; without a file 66,000 made-up paragraphs
    python benchmarks/environments.py trl                    # 256 instances of a class for TRL: opened, 10 calls each,
    closed python benchmarks/environments.py isolated               # 256 instances, 32 at once, in processes of their
    own python benchmarks/environments.py textarena              # 256 games of TextArena of up to 30 moves, side by
    side python benchmarks/environments.py mcp                    # start and calls of a server by its command line
    python benchmarks/environments.py openenv                # 256 sessions of one server, 10 steps each python
    benchmarks/environments.py slow                   # one call of 5 s among 256 of 1 ms, in one step python
    benchmarks/environments.py rollout --model DIR    # 64 dialogues of a model, with and without calls and stop strings

It prints one JSON line for each section. ``rollout`` plays the same number of tokens in two ways, in turn: two turns
without tools, and one turn with a call of a tool that does nothing between its two segments. Its shares are the seconds
inside the tool layer and inside the search for stop strings, by the seconds of the second way.
"""

import argparse
import json
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from maporl.config.schema import EnvironmentSection
from maporl.datasets.search import Index, Passage, read_corpus
from maporl.environments.isolated import Host, IsolatedEnvironment
from maporl.environments.workers import Job, Workers
from maporl.integrations.trl import TRLEnvironment
from maporl.tasks import build_task
from trl_ext.ppo.options import Decoding

SUPPORT = Path(__file__).parents[1] / "tests/support"
DIALOGUES, CALLS = 256, 10


def made_up(count: int) -> list[Passage]:
    """Return paragraphs of 60 to 120 words, which are as unequally frequent as those of a language."""
    rng = random.Random(0)
    words = [f"word{number}" for number in range(200_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    pool = rng.choices(words, weights, k=2_000_000)
    drawn = (rng.randrange(len(pool) - 120) for _ in range(count))
    return [Passage(f"title {n}", " ".join(pool[at : at + rng.randint(60, 120)])) for n, at in enumerate(drawn)]


def search(corpus: str | None) -> dict:
    """Build an index, load it again, and search it for the beginnings of its passages."""
    passages = read_corpus(corpus) if corpus else made_up(66_000)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        Index(passages, folder=Path(folder))
        built = time.perf_counter()
        index = Index(passages, folder=Path(folder))
        loaded = time.perf_counter()
    seconds = []
    for passage in passages[:: max(1, len(passages) // 500)]:
        query = " ".join(passage.text.split()[:12])
        since = time.perf_counter()
        index.search(query, 5)
        seconds.append(time.perf_counter() - since)
    return {
        "passages": len(passages),
        "index_seconds": round(built - began, 2),
        "load_seconds": round(loaded - built, 2),
        "query_ms": round(1000 * statistics.median(seconds), 2),
        "slowest_query_ms": round(1000 * max(seconds), 2),
    }


class Counter:
    """A class as TRL takes it. Another process imports it from this file."""

    def reset(self, **row):
        self.count = 0
        return ""

    def up(self, by: int) -> str:
        """Count up.

        Args:
            by: how much
        """
        self.count += by
        return f"{self.count}"

    def get_reward(self):
        return float(self.count)


def trl() -> dict:
    """Open instances of a class for TRL, call each of them, and close them."""
    workers = Workers()
    TRLEnvironment(Counter())  # its schema is made once, outside the time
    began = time.perf_counter()

    def life() -> float:
        world = TRLEnvironment(Counter())
        world.reset(0, {})
        (tool,) = world.tools("ann")
        for _ in range(CALLS):
            tool.run(by=1)
        paid = world.reward()
        world.close()
        return paid

    outcomes = workers.run([[Job(life, 60, "life")] for _ in range(DIALOGUES)])
    assert all(row[0].value == CALLS for row in outcomes)
    return {
        "environments": DIALOGUES,
        "calls": CALLS,
        "seconds": round(time.perf_counter() - began, 3),
        "threads": threading.active_count(),
    }


def isolated() -> dict:
    """Open instances in processes of their own, 32 at once, call each of them, and close them."""
    sys.path.append(str(Path(__file__).parent))
    host = Host("counter", EnvironmentSection(use="environments:Counter"))
    began = time.perf_counter()
    IsolatedEnvironment(host).close()
    seconds: dict[str, float] = {"start": time.perf_counter() - began, "open": 0, "calls": 0, "close": 0}
    private = []
    for _ in range(0, DIALOGUES, 32):
        since = time.perf_counter()
        worlds = [IsolatedEnvironment(host) for _ in range(32)]
        tools = [world.tools("ann")[0] for world in worlds]
        for world in worlds:
            world.reset(0, {})
        opened = time.perf_counter()
        assert all([tool.run(by=1).text == f"{n + 1}" for n in range(CALLS)] for tool in tools)
        called = time.perf_counter()
        private.append(sum(_private_kilobytes(world._pid) for world in worlds) / len(worlds))
        counted = time.perf_counter()
        for world in worlds:
            world.close()
        seconds["open"] += opened - since
        seconds["calls"] += called - opened
        seconds["close"] += time.perf_counter() - counted
    host.close()
    return {
        "environments": DIALOGUES,
        "start_seconds": round(seconds["start"], 2),
        "open_ms": round(1000 * seconds["open"] / DIALOGUES, 2),
        "call_ms": round(1000 * seconds["calls"] / DIALOGUES / CALLS, 3),
        "close_ms": round(1000 * seconds["close"] / DIALOGUES, 2),
        "private_mb": round(statistics.mean(private) / 1024, 1),
    }


def _private_kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def textarena() -> dict:
    """Play games of TextArena side by side with random bids, one move of each game after the other."""
    from maporl.integrations.text_arena import TextArena

    moves = ["[Bid: 1, 2]", "[Bid: 2, 3]", "[Bid: 3, 3]", "[Bid: 4, 4]", "[Call]"]
    rng = random.Random(0)
    began = time.perf_counter()
    games = [TextArena(env="LiarsDice-v0", longest=30) for _ in range(DIALOGUES)]
    for number, game in enumerate(games):
        game.begin_with(random.Random(number), 4)
    opened = time.perf_counter()
    made, running = 0, games
    for _ in range(30):
        for game in running:
            (player,) = game.to_move()
            game.observe(player)
            game.step({player: game.read(player, rng.choice(moves))})
            made += 1
        running = [game for game in running if game.to_move()]
    done = time.perf_counter()
    return {
        "games": DIALOGUES,
        "moves": made,
        "open_seconds": round(opened - began, 2),
        "moves_ms": round(1000 * (done - opened) / made, 3),
        "seconds": round(done - began, 2),
    }


def mcp() -> dict:
    """Start a server by its command line, and call it from one and from many dialogues."""
    from maporl.integrations.mcp import MCPTools

    began = time.perf_counter()
    box = MCPTools(command=[sys.executable, str(SUPPORT / "mcp_test_server.py")], only=["price"])
    started = time.perf_counter()
    (price,) = box.tools()
    workers = Workers()
    jobs = [[Job(lambda: price.run(fruit="fig"), 60, "price")] for _ in range(DIALOGUES)]
    workers.run(jobs[:1])
    one = time.perf_counter()
    workers.run(jobs[:1])
    many = time.perf_counter()
    outcomes = workers.run(jobs)
    done = time.perf_counter()
    box.close()
    assert all(row[0].value.text == "1 fig cost 3" for row in outcomes)
    return {
        "start_seconds": round(started - began, 2),
        "call_ms": round(1000 * (many - one), 2),
        "calls": DIALOGUES,
        "calls_seconds": round(done - many, 3),
    }


def openenv() -> dict:
    """Take sessions of one server, step each of them ten times at once with the others, and give them back."""
    from maporl.integrations.open_env import OpenEnv

    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = [sys.executable, str(SUPPORT / "open_env_server.py"), str(port), str(DIALOGUES), "long"]
    server = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        worlds = [OpenEnv(url, show="text") for _ in range(DIALOGUES)]
        tools = [world.tools("ann")[0] for world in worlds]
        workers = Workers()
        began = time.perf_counter()
        workers.run([[Job(lambda world=world: world.reset(3, {}), 60, "reset")] for world in worlds])
        opened = time.perf_counter()
        for _ in range(CALLS):
            outcomes = workers.run([[Job(lambda tool=tool: tool.run(word="x"), 60, "act")] for tool in tools])
            assert all(row[0].value.text == "no" for row in outcomes), outcomes[0]
        stepped = time.perf_counter()
        workers.run([[Job(world.close, 60, "close")] for world in worlds])
        done = time.perf_counter()
    finally:
        server.kill()
        server.wait()
    return {
        "sessions": DIALOGUES,
        "steps": CALLS,
        "open_seconds": round(opened - began, 2),
        "steps_seconds": round(stepped - opened, 2),
        "close_seconds": round(done - stepped, 2),
        "seconds": round(done - began, 2),
    }


def slow() -> dict:
    """Run one step of calls, one for each dialogue, of which the first one takes long."""
    workers = Workers()
    waits = [5.0, *[0.001] * (DIALOGUES - 1)]
    began = time.perf_counter()
    workers.run([[Job(lambda wait=wait: time.sleep(wait), 60, "wait")] for wait in waits])
    return {"calls": DIALOGUES, "step_seconds": round(time.perf_counter() - began, 2)}


def noop() -> str:
    """Do nothing."""
    return "done"


class Watch:
    """Adds up the seconds inside functions. A call from inside another watched one is not counted twice."""

    def __init__(self) -> None:
        self.seconds, self.open = 0.0, False

    def around(self, owner: Any, name: str) -> None:
        """Watch a function of ``owner`` from now on."""
        kept = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if self.open:
                return kept(*args, **options)
            self.open, began = True, time.perf_counter()
            try:
                return kept(*args, **options)
            finally:
                self.seconds, self.open = self.seconds + time.perf_counter() - began, False

        setattr(owner, name, watched)


def rollout(model: str, dialogues: int, tokens: int, repeats: int) -> dict:
    """Play dialogues of a model whose agent calls a tool that does nothing, and dialogues without it."""
    from maporl.environments.calls import Written
    from maporl.environments.turns import Turn
    from maporl.environments.world import World
    from maporl.runs.build import build_player
    from maporl.types import Stop
    from maporl.validation.load import from_dict
    from trl_ext.chat.stop_strings import StopStrings

    def player(turns: int, tools: list[str], texts: dict[str, str]) -> Any:
        values = {
            "output_dir": tempfile.mkdtemp(), "task": {"name": "toy_sum"}, "warm_start": {"steps": 0},
            "tools": {"noop": {"use": "environments:noop"}},  # this file, whose folder is the first on the path
            "agents": {"ann": {"model": model, "tools": tools, "call_format": "json", "call_texts": texts}},
            "protocol": {"name": "debate", "turns": turns},
            "ppo": {"response_length": tokens, "stop_token": "none"},
        }  # fmt: skip
        made = build_player(from_dict(values, "benchmark"))
        for own in made.tools.values():
            own.format.read = calls_once(own.format.read)
        return made

    def calls_once(read: Any) -> Any:
        """Let the first segment of each turn call the tool, because this model does not.

        Its text is read all the same.
        """

        def reads(text: str, prompt: list[int], response: list[int]) -> list[Written]:
            read(text, prompt, response)
            return [] if "returned: done" in tokenizer.decode(prompt[-40:]) else [Written("noop", {})]

        return reads

    take = Turn.take

    def take_whole(turn: Any, segment: Any) -> None:
        """Take a segment of the full length as one that ended by itself, because a call that was cut is not run."""
        segment.stop = Stop.EOS
        take(turn, segment)

    Turn.take = take_whole  # type: ignore[method-assign]
    plain, calling = player(2, [], {}), player(1, ["noop"], {})
    tokenizer = calling.team.voice_of("ann").tokenizer
    layer, stops = Watch(), Watch()
    for owner, name in ((World, "act"), (World, "begin"), (Turn, "take"), (Turn, "see"), (Turn, "goes_on")):
        layer.around(owner, name)
    stops.around(StopStrings, "end")
    taken: dict[str, list[float]] = {"two turns": [], "one call": []}
    shares: dict[str, list[float]] = {"layer": [], "stop strings": []}
    for _ in range(repeats):
        for name, made in (("two turns", plain), ("one call", calling)):
            task = build_task({"name": "toy_sum"}, "train", 0)
            layer.seconds = stops.seconds = 0.0
            began = time.perf_counter()
            played = made.play([task[n] for n in range(dialogues)], task, Decoding(1.0))
            seconds = time.perf_counter() - began
            assert all(len(d.utterances) == 2 for d in played)
            taken[name].append(seconds)
            if made is calling:
                shares["layer"].append(layer.seconds / seconds)
                shares["stop strings"].append(stops.seconds / seconds)
    return {
        "dialogues": dialogues,
        "tokens": tokens,
        **{f"{name}, s": round(statistics.median(found), 2) for name, found in taken.items()},
        **{f"{name}, %": round(100 * statistics.median(found), 2) for name, found in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "section", choices=["search", "trl", "textarena", "isolated", "mcp", "openenv", "slow", "rollout"]
    )
    parser.add_argument("--corpus", help="a .jsonl file of passages, for search")
    parser.add_argument("--model", help="a folder with a language model, for rollout")
    parser.add_argument("--dialogues", type=int, default=64, help="for rollout")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each segment, for rollout")
    parser.add_argument("--repeats", type=int, default=3, help="for rollout")
    options = parser.parse_args()
    sections = {
        "search": lambda: search(options.corpus), "trl": trl, "textarena": textarena, "isolated": isolated, "mcp": mcp,
        "openenv": openenv, "slow": slow,
        "rollout": lambda: rollout(options.model, options.dialogues, options.tokens, options.repeats),
    }  # fmt: skip
    measured = sections[options.section]()
    print(json.dumps({"section": options.section, **measured}))


if __name__ == "__main__":
    main()
