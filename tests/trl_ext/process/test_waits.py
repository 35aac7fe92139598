"""Every wait of the project ends soon after a signal: a list of all of them, the module that they go through, and real
runs."""

import ast
import gc
import json
import os
import queue
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import processes
import pytest
from folders import ROOT
from ray_groups import spec
from tiny_runs import config_of, end_of

from maporl.config.parse import to_yaml
from maporl.config.schema import ApiSection, EnvironmentSection
from maporl.engines.openai import client_of
from maporl.environments.isolated import Host, IsolatedEnvironment
from maporl.environments.workers import Job, Workers
from maporl.event_loop import wait as wait_for_coroutine
from maporl.http_client import HttpClient, persistent
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.group import LearnerGroup
from maporl.integrations.ray.remote import RemoteLearning
from maporl.integrations.ray.scheduling import Turns
from maporl.integrations.ray.section import FailuresSection
from maporl.integrations.ray.verifier_pool import VerifierPool
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import RemoteServer
from maporl.rollout.interleaving import Interleaving
from maporl.runs import train as run
from maporl.sandbox.pool import SandboxPool
from maporl.storage.disk_cache import DiskCache
from maporl.training.ahead import Ahead
from maporl.verifier.client import VerifierClient
from maporl.verifier.section import VerifierSection
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.process.interruptions import Interruptions
from trl_ext.process.servant import receive
from trl_ext.process.waits import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    Discarded,
    Threads,
    check,
    dropped_by,
    finished,
    pause,
    result,
    taken,
    until,
)
from trl_ext.sampling.engine import wait_for
from trl_ext.sampling.request import Draw, TokenRequest
from trl_ext.trainer.scoring import call_reward_functions

# -- the list ----------------------------------------------------------------------------------------------------------

WAITING = {
    "accept", "acquire", "check_call", "check_output", "communicate", "connect", "create_connection", "flock", "input", "poll",
    "readline", "recv", "recv_bytes", "result", "run_until_complete", "select", "sleep", "urlopen", "wait", "wait_for", "waitpid",
    "FileLock", "ProcessPoolExecutor", "Retrying", "ThreadPoolExecutor",
}  # fmt: skip
"""Names of functions, methods and classes that wait."""
OTHERS = {"subprocess.run", "asyncio.run", "ray.get", "self.ray.get", "self.ray.wait"}
THROUGH = {"trl_ext.process.waits", "trl_ext.sampling.engine", "maporl.event_loop"}
"""Where waiting is done for others, so that what is imported from there hears of signals."""
ELSEWHERE = {
    "is done already": {"maporl/integrations/tinker/engine.py": {"TinkerEngine._ask.answered"}, "maporl/integrations/ray/engine_pool.py": {"EnginePool._send.arrived", "EnginePool._done"},
     "maporl/integrations/ray/group.py": {"LearnerGroup._wait"}, "maporl/integrations/ray/ray_cluster.py": {"RayMember.call.settle"}, "maporl/integrations/ray/scheduling.py": {"Turns.run.settle"}, "maporl/engines/base.py": {"Pending.reply"}, "trl_ext/process/servant.py": {"Servant.connected"}, "trl_ext/process/waits.py": {"result"}, "trl_ext/sampling/engine.py": {"TokenEngine.sample", "wait_for"}},
    "waits for moments, in `until` or between two checks": {"maporl/event_loop.py": {"Loop.wait", "Loop._replaced_if_blocked", "_Task", "wait", "awaited"}, "maporl/serving/running.py": {"_talk"}, "maporl/rollout/interleaving.py": {"Interleaving._take"}, "maporl/sandbox/pipes.py": {"exchange"}, "maporl/storage/disk_cache.py": {"DiskCache._in_the_file"}, "trl_ext/process/servant.py": {"_wait", "_exactly"}, "trl_ext/process/waits.py": {"Threads.submit", "taken.happens"}, "maporl/studies/comparing/study.py": {"_run.ended"}},
    "is a coroutine of a loop that has a thread of its own, and is awaited by those in THROUGH": {"maporl/integrations/mcp_server.py": {"Server._start", "Server._keep", "Server._watched", "Server._left"}, "maporl/integrations/open_env.py": {"OpenEnv._begun"}, "maporl/serving/routes.py": {"_heard", "_spoken", "routes.replies.handle"}, "trl_ext/trainer/scoring.py": {"_run.run", "_wanted"}},
    "is in a thread that nobody waits for": {"maporl/environments/isolated.py": {"_answer"},
     "maporl/integrations/ray/ray_cluster.py": {"RayMember.call.settle", "RayMember.stacks", "RayMember.answers"}, "maporl/report/live.py": {"PageSeat.read"}, "trl_ext/process/interruptions.py": {"leave_soon.leave", "Interruptions._listen"}},
    "is before a run or in a command without one, where Python's own handlers end the process": {"maporl/integrations/ray/ray_cluster.py": {"check_reached", "Cluster.facts"}, "maporl/cli/look.py": {"play", "_typed", "_in_the_terminal"}, "maporl/datasets/search.py": {"Index._stored"}, "maporl/runs/dump.py": {"dump"}, "maporl/sandbox/sandbox.py": {"find_bubblewrap"}, "maporl/verifier/generate.py": {"_claim", "_summarise"}, "trl_ext/files/lock.py": {"RunLock._acquire", "RunLock.__enter__", "_lock_in"}},
    "waits for a process that was killed, or that has bounds of its own": {"maporl/serving/running.py": {"Run.end_group", "_has_ended"},
     "maporl/sandbox/sandbox.py": {"_Worker.run"}, "maporl/serving/group_watchdog.py": {"_tell"}, "trl_ext/process/servant.py": {"_ended"}},
    "waits for the disk": {"trl_ext/learning/checkpoint.py": {"_SavingLearners.finish"}},
    "waits for a moment only": {"maporl/integrations/ray/ray_folder.py": {"_take"}, "trl_ext/files/stacks.py": {"Listener.close"},
     "trl_ext/process/interruptions.py": {"Interruptions.__exit__"}},
    "is in another process, which ends with the run": {"maporl/integrations/ray/engine_process.py": {"VLLMRows"},
     "maporl/integrations/ray/ray_folder.py": {"end_all"}, "maporl/environments/isolated_host.py": {"main", "_reaped"}, "maporl/sandbox/sandboxed/worker.py": {"Worker.serve"}, "reward_server": {"app.py", "batching.py"}},
    "is for tests": {"maporl/integrations/ray/ray_cluster.py": {"RayMember.pid"}},
    "puts vLLM to sleep": {"maporl/integrations/vllm/colocated.py": {"ColocatedServer.release"}},
}  # fmt: skip
"""Why a wait does not go through :mod:`trl_ext.process.waits`, by file and function."""


def waits_of(tree):
    """The calls that wait, as (function, call): those of names in WAITING that are not imported from THROUGH."""
    imported = {
        name.asname or name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    found = []

    def visit(node, place):
        for child in ast.iter_child_nodes(node):
            own = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{place}.{child.name}" if place else child.name
            if isinstance(child, ast.Call):
                called = ast.unparse(child.func)
                name = called.rpartition(".")[2]
                options = {option.arg for option in child.keywords}
                waits = name in WAITING or called in OTHERS
                waits |= name == "join" and (not child.args or "thread" in called.lower())
                waits |= name == "get" and "timeout" in options
                through = imported.get(called) in THROUGH or called in (
                    "self.turns.wait",
                    "self.wait",
                    "self._loop.wait",
                )
                if waits and not through and not (name == "Retrying" and "sleep" in options):
                    found.append((own, called))
            visit(child, own)

    visit(tree, "")
    return found


def test_every_wait_hears_of_signals_or_is_named_here():
    named = {(file, place) for files in ELSEWHERE.values() for file, places in files.items() for place in places}
    met, unknown = set(), []
    for package in ("maporl", "trl_ext", "reward_server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for place, called in waits_of(ast.parse(path.read_text("utf-8"))):
                keys = {(file, place), (file, place.split(".")[0]), (package, path.name)} & named
                met |= keys
                if not keys:
                    unknown.append(f"{file}: {place}: {called}")
    assert not unknown, (
        "go through trl_ext.process.waits, so that a signal ends them, or are named in ELSEWHERE with the reason"
    )
    assert not (gone := named - met), f"are gone: {gone}"


# -- the module --------------------------------------------------------------------------------------------------------


def test_waits_return_what_they_wait_for():
    done, failed, waiting = Future(), Future(), Future()
    done.set_result(3)
    failed.set_exception(TimeoutError("its own"))
    assert result(done) == 3 == result(done, 0)
    with pytest.raises(TimeoutError, match="its own"):
        result(failed, 9)
    with pytest.raises(TimeoutError):
        result(waiting, 0.01)
    assert finished([done, waiting], when=FIRST_COMPLETED) == {done}
    assert finished([done, waiting], 0.01, ALL_COMPLETED) == {done}
    items = queue.SimpleQueue()
    items.put(7)
    assert taken(items) == 7
    with pytest.raises(queue.Empty):
        taken(items, 0.01)
    answers = iter([0, 0, 5])
    assert until(lambda seconds: next(answers)) == 5 and until(lambda seconds: None, 0) is None
    pause(0)


def test_what_is_dropped_drops_what_works_for_it_and_nothing_else():
    drop, begun = threading.Event(), queue.SimpleQueue()

    def work(name):
        begun.put(name)
        pause(600)

    def pass_on():
        with Threads(1) as own:
            return result(own.submit(work, "inner"))

    def both():
        with dropped_by(drop), Threads(2) as threads:
            calls = [threads.submit(pass_on), threads.submit(work, "outer")]
            return [result(call) for call in calls]

    other, caller = Threads(1), Threads(1)
    kept, dropped = other.submit(work, "kept"), caller.submit(both)
    assert sorted(taken(begun, 20) for _ in range(3)) == ["inner", "kept", "outer"]
    drop.set()
    with pytest.raises(Discarded):
        result(dropped, 20)
    assert not kept.done()
    other.give_up()
    with pytest.raises(Discarded):
        result(kept, 20)
    check()
    with pytest.raises(Discarded), dropped_by(drop):
        raise AssertionError("it is set before")
    check()


def test_threads_do_at_most_so_much_at_once_in_order_and_end():
    running, most, lock = 0, 0, threading.Lock()

    def work(number):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.001)
        with lock:
            running -= 1
        return number**2

    with Threads(3, "squares") as threads:
        calls = [threads.submit(work, number) for number in range(50)]
        assert [result(call) for call in calls] == [number**2 for number in range(50)]
    assert 1 <= most <= 3
    with pytest.raises(ValueError, match="no"), Threads(1, "squares") as threads:
        slow, never = threads.submit(pause, 600), threads.submit(work, 1)
        raise ValueError("no")
    for call in (slow, never):
        with pytest.raises(Discarded):
            result(call, 20)
    forgotten = Threads(2, "squares")
    assert result(forgotten.submit(work, 3)) == 9
    del forgotten
    gc.collect()
    until(lambda seconds: pause(0.01) or not threads_named("squares"), 20)
    assert not threads_named("squares"), "nobody keeps them"


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


# -- each kind of wait, in this process --------------------------------------------------------------------------------


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.end = True, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.end.set()
    server.shutdown()
    server.server_close()


class Hangs(BaseHTTPRequestHandler):
    """Takes requests, and never answers."""

    def do_POST(self):
        self.server.end.wait()

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hangs():
    with serving(Hangs) as server:
        yield server.url


def nobody():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def ask_verifier(url, **section):
    section = VerifierSection(urls=(url,), timeout=600, **section)
    VerifierClient(section, section.urls).scores([CHAT] * 40, [None] * 40)


def ask_api(url):
    section = ApiSection(model="m", base_url=url, timeout=600)
    with Threads(2) as threads:
        result(threads.submit(persistent(9), client_of("ann", section).post, "/chat/completions", {}))


def sample_from_vllm(url):
    server = RemoteServer(url, VLLMSection(urls=(url,), timeout=600))
    server.sample([TokenRequest("m", [1], Draw(3))])


async def never():
    await __import__("asyncio").sleep(3600)


def use_tool(job):
    Workers(most=1).run([[Job(job, 3600, "tool")], [Job(job, 3600, "not begun")]])


def use_isolated(tmp_path):
    section = EnvironmentSection(use="isolated_worlds:Stock", isolate="process", seconds=3600)
    host = Host("shop", section)
    world = IsolatedEnvironment(host)
    try:
        world.reset(0, {})
        hang = next(tool for tool in world.tools("ann") if tool.name == "hang")
        hang.run()
    finally:
        host.close()


class Deaf:
    """A process that never answers."""

    name, place = "deaf", "a device"

    def call(self, method, *arguments, kept=False):
        return Future()

    def stacks(self):
        return ""

    def end(self):
        pass


def group(tmp_path):
    own = LearnerGroup(spec(devices=1), lambda rank: Deaf(), FailuresSection(), tmp_path)
    own.members = [Deaf()]
    return own


def pool(tmp_path):
    return EnginePool(spec(replicas=1), lambda number, place: Deaf(), FailuresSection(), tmp_path)


def wait_for_turn():
    turns = Turns()
    turns.ask(["gpu"])
    with turns.taken(["gpu"]):
        pass


def wait_for_the_others():
    interleaving, inside = Interleaving(), threading.Event()

    def play():
        with interleaving.running():
            inside.set()
            time.sleep(3600)

    threading.Thread(target=play, daemon=True).start()
    inside.wait()
    with interleaving.running():
        pass


def play_ahead():
    ahead = Ahead(1, Interleaving())
    ahead.begin(lambda: pause(3600))
    ahead.take()


def write_locked(tmp_path):
    cache = DiskCache(tmp_path)
    other = sqlite3.connect(cache.path)
    other.execute("BEGIN EXCLUSIVE")
    cache.put([("key", {})])


def read_frame():
    ours, _theirs = socket.socketpair()
    receive(ours, time.monotonic() + 3600)


def all_sandboxes_are_used():
    sandboxes = SandboxPool(workers=1)
    with sandboxes.one():
        sandboxes.run_tests([("x = 1", ["assert x == 1"], "")])


async def slow_reward(completions, **columns):
    await never()


KINDS = {
    "a verifier that is dead and waited for": lambda hangs, tmp: ask_verifier(nobody(), on_failure="wait", retries=0),
    "a verifier that hangs": lambda hangs, tmp: ask_verifier(hangs),
    "an API that hangs": lambda hangs, tmp: ask_api(hangs),
    "an API that is dead": lambda hangs, tmp: ask_api(nobody()),
    "any server, asked by the main thread": lambda hangs, tmp: HttpClient(hangs, 600).get("/"),
    "a vLLM server that hangs": lambda hangs, tmp: sample_from_vllm(hangs),
    "a tool": lambda hangs, tmp: use_tool(partial(time.sleep, 3600)),
    "a tool that is a coroutine": lambda hangs, tmp: use_tool(never),
    "an environment in a process of its own": lambda hangs, tmp: use_isolated(tmp),
    "a coroutine of a library": lambda hangs, tmp: wait_for_coroutine(never()),
    "a reward function that is a coroutine": lambda hangs, tmp: call_reward_functions([slow_reward], [""], [""], [[1]], {}),
    "a process of this one": lambda hangs, tmp: read_frame(),
    "a free sandbox": lambda hangs, tmp: all_sandboxes_are_used(),
    "another writer of the cache": lambda hangs, tmp: write_locked(tmp),
    "the processes that train": lambda hangs, tmp: RemoteLearning({}, [group(tmp)]).load(tmp),
    "the processes that sample": lambda hangs, tmp: wait_for([pool(tmp).ask([SimpleNamespace(policy="ann")])], lambda: False),
    "a process that samples, to begin": lambda hangs, tmp: pool(tmp).build(),
    "any process that samples": lambda hangs, tmp: pool(tmp).call("untrained"),
    "the processes that score": lambda hangs, tmp: VerifierPool(VerifierSection(model="m"), 1, lambda number, place: Deaf(), 3600,
     tmp).build(),
    "a device": lambda hangs, tmp: wait_for_turn(),
    "another thread that plays": lambda hangs, tmp: wait_for_the_others(),
    "a batch that is played ahead": lambda hangs, tmp: play_ahead(),
}  # fmt: skip
"""What is waited for, each for ever or for an hour."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_signal_ends_every_kind_of_wait(kind, where, hangs, tmp_path):
    waits, before = partial(KINDS[kind], hangs, tmp_path), set(threading.enumerate())

    def interrupt():
        time.sleep(0.1)  # it should wait by then; if not, it is ended before it does
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    with Interruptions() as interruptions:
        sender.start()
        with pytest.raises(Discarded), interruptions.droppable(), Threads(1, "the other thread") as threads:
            waits() if where == "main thread" else result(threads.submit(waits))
        assert interruptions.asked == signal.SIGTERM
    sender.join()
    # threads of foreign code stay where they are, those of pools are free, and all others have ended
    foreign = ("maporl tool", "maporl-http", "maporl adapters", "turns", "Thread-", "process_request", "groups")
    foreign += ("engines of", "asks vLLM", "rollouts")
    left = [t for t in set(threading.enumerate()) - before if not t.name.startswith(foreign)]
    for thread in left:
        thread.join(20)
        assert not thread.is_alive(), thread.name


# -- real runs ---------------------------------------------------------------------------------------------------------


class Parts(BaseHTTPRequestHandler):
    """A verifier and an API. After ``server.most`` requests it says so by ``server.waits`` and never answers."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.count += 1
            hangs = server.count > server.most
        if hangs:
            server.waits.set()
            server.end.wait()
            return
        if "chats" in body:
            results = [{"score": len(chat[-1]["content"]) % 5 / 4} for chat in body["chats"]]
            content = {"results": results, "sha256": "a", "model": "v"}
        else:
            content = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}]}
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def parts():
    with serving(Parts) as server:
        server.count, server.most, server.lock, server.waits = 0, 0, threading.Lock(), threading.Event()
        yield server


def served(url, **options):
    return {"reward": {"sources": {"verifier": 1.0}, "verifier": {"urls": [url], "batch_size": 64, **options}}}


UPDATES = 6


def begin(tmp_path, sections, *options, **training):
    folder = tmp_path / "run"
    sections = {"pythonpath": [str(ROOT / "tests")], **sections}
    (tmp_path / "run.yaml").write_text(to_yaml(config_of(folder, UPDATES, sections, save_steps=0, **training)))
    env = {**os.environ, "WAITS_HERE": str(tmp_path / "waits")}
    return processes.start(["-m", "maporl", "train", tmp_path / "run.yaml", "-q", *options], env=env)


def ended(process, tmp_path, status, updates, seconds):
    """Check how the run ends that waits and was sent a signal, and how soon."""
    began = time.monotonic()
    assert process.wait(60) == status, process.output()[1]
    assert time.monotonic() - began < seconds
    said, folder = process.output()[1], tmp_path / "run"
    name = {143: "SIGTERM", 130: "SIGINT"}[status]
    assert "Traceback" not in said, said
    assert [own.name for own in list_checkpoints(folder)] == [f"checkpoint-{updates}"], said
    told = (
        f"{name}: stopped after update {updates} of {UPDATES}; saved in {folder}/checkpoint-{updates}; to go on: "
        f"maporl train {folder}/config.yaml --resume"
    )
    assert told in said, said


def waits_for(condition, process):
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.output()[1]
        time.sleep(0.05)


def updates_of(folder):
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_run_that_waits_for_a_dead_server_ends_with_its_updates_and_goes_on(parts, tmp_path):
    """The server dies after some updates, and the run waits. SIGTERM saves them; what goes on ends as a calm run."""
    calm = tmp_path / "calm"
    parts.most = 10**9
    run.train(config_of(calm, UPDATES, served(parts.url)), resume=False, quiet=True)
    each = parts.count // UPDATES
    parts.count, parts.most = 0, 3 * each
    options = {"on_failure": "wait", "retries": 0, "timeout": 0.5}
    process = begin(tmp_path, served(parts.url, **options))
    waits_for(lambda: parts.waits.is_set() and "next in" in process.output()[1], process)
    process.terminate()
    ended(process, tmp_path, 143, 3, 60)
    parts.most = 10**9
    again = begin(tmp_path, served(parts.url, **options), "--resume")
    assert again.wait(120) == 0, again.output()[1]
    (weights, records, dialogues), (expected, calm_records, calm_dialogues) = (
        end_of(folder, UPDATES) for folder in (tmp_path / "run", calm)
    )
    asked = ("verifier/waits", "verifier/retries", "verifier/requests", "verifier/ejected")
    records, calm_records = (
        [{key: value for key, value in record.items() if key not in asked} for record in own]
        for own in (records, calm_records)
    )
    assert records == calm_records and dialogues == calm_dialogues
    for name in (name for name in expected if name.startswith("final")):
        assert all(value.equal(weights[name][key]) for key, value in expected[name].items()), name


WORLD = {"open_seconds": 600, "close_seconds": 600}
API = {"engine": "openai", "api": {"model": "m", "cache": False, "timeout": 600}}
RUNS = {
    "verifier": lambda url: served(url, on_failure="wait"),
    "api": lambda url: {"agents": {"ann": {}, "bob": {**API, "api": {**API["api"], "base_url": url}}}},
    "plain reward": lambda url: {"reward": {"sources": {"isolated_worlds:plain": 1.0}}},
    "awaited reward": lambda url: {"reward": {"sources": {"isolated_worlds:awaited": 1.0}}},
    "environment": lambda url: {"environments": {"w": {**WORLD, "use": "isolated_worlds:World"}}},
    "isolated environment": lambda url: {
        "environments": {"w": {**WORLD, "use": "isolated_worlds:World", "isolate": "process"}}
    },
    "environment that closes": lambda url: {"environments": {"w": {**WORLD, "use": "isolated_worlds:WorldThatCloses"}}},
}
"""The sections of a run by what it waits for."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_waits_ends_within_five_seconds(name, number, parts, tmp_path):
    parts.most = 40 if name == "api" else 3
    process = begin(tmp_path, RUNS[name](parts.url))
    waits_for(lambda: parts.waits.is_set() or (tmp_path / "waits").exists(), process)
    time.sleep(1)
    updates = updates_of(tmp_path / "run")
    assert updates == 3 or (name == "api" and updates)
    process.send_signal(number)
    if number == signal.SIGINT:
        time.sleep(0.05)
        process.send_signal(number)  # and impatient
    ended(process, tmp_path, 143 if number == signal.SIGTERM else 130, updates, 5 if number == signal.SIGTERM else 12)


@pytest.mark.slow
def test_a_loop_that_waits_keeps_its_complete_parts(parts, tmp_path):
    """Its first round is sampled and its second one waits for the server, which then comes back."""
    folder = tmp_path / "run"
    served_loop = {
        **served(parts.url, on_failure="wait", retries=0, timeout=0.5),
        "branching": {"how": "fork_every", "group": 2},
        "loop": {"rounds": 2, "questions": 4, "stages": [{"train": "sft", "build": {"threshold": {"above": -1.0}}}]},
    }
    parts.most = 10**9
    process = begin(tmp_path, served_loop)
    waits_for(lambda: (folder / "round-1/train-1").is_dir(), process)
    parts.most = 0
    waits_for(lambda: parts.waits.is_set() and "next in" in process.output()[1], process)
    process.terminate()
    assert process.wait(60) == 143
    said = process.output()[1]
    told = (
        "SIGTERM: stopped; the parts of the loop that are complete are kept; to go on: maporl train "
        f"{folder}/config.yaml --resume"
    )
    assert told in said and "Traceback" not in said, said
    assert (folder / "round-1/train-1").is_dir() and not (folder / "round-2/sample").exists()
    parts.most = 10**9
    again = begin(tmp_path, served_loop, "--resume")
    assert again.wait(120) == 0, again.output()[1]
    assert (folder / "final").is_dir() and json.loads((folder / "verifiers.json").read_text())["verifier"][0][
        "sha256"
    ] == "a"


def test_who_waits_no_longer_for_a_device_does_not_get_it():
    turns, dropped = Turns(), Threads(1)
    turns.ask(["a", "b"])
    waiting = dropped.submit(turns.wait, ["a"])
    until(lambda seconds: pause(0.01) or bool(turns._waiting), 20)
    behind = turns.ask(["a", "c"])
    dropped.give_up()
    with pytest.raises(Discarded):
        result(waiting, 20)
    assert not behind.done()
    turns.give(["a", "b"])
    result(behind, 20)
    turns.give(["a", "c"])
    assert not turns._busy and not turns._waiting


def test_a_device_that_a_dropped_thread_gives_back_is_given_to_the_next_one():
    turns, dropped, has_it = Turns(), Threads(1), threading.Event()

    def work():
        with turns.taken(["gpu"]):
            has_it.set()
            pause(600)

    working = dropped.submit(work)
    assert has_it.wait(20)
    behind = turns.ask(["gpu"])
    dropped.give_up()
    with pytest.raises(Discarded):
        result(working, 20)
    result(behind, 20)
