"""Environments in processes of their own: equal records, real kills, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from folders import ROOT, SUPPORT
from played_games import EXAMPLES, buys, by_turns, driver_of

from maporl.config.call_options import CallLimits
from maporl.config.schema import BranchingSection
from maporl.environments.build import TeamTools
from maporl.environments.isolated import Host
from maporl.environments.rooms import EnvironmentFailure
from maporl.rollout.branching import play_branched
from maporl.types import to_json
from maporl.validation.load import from_dict

AGENTS = ("ann", "bob")


def world_of(kind="Stock", isolate="process", **section):
    config = from_dict(
        {
            "output_dir": "unused",
            "agents": {"ann": {"tiny": {}}, "bob": {"tiny": {}}},
            "task": {"name": "toy_sum"},
            "environments": {"shop": {"use": f"isolated_worlds:{kind}", "isolate": isolate, **section}},
        }
    )
    return TeamTools.from_config(config, AGENTS).world


def call(name, **arguments):
    values = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<call>{{"name": "{name}", "arguments": {{{values}}}}}</call>'


def played(world, examples=1, **lines):
    return driver_of(by_turns(**lines), world).play(EXAMPLES[:examples])


def without_seconds(dialogue):
    record = json.loads(to_json(dialogue))
    for utterance in record["utterances"]:
        for made in utterance["calls"]:
            made["result"].pop("seconds")
    return record


def children(pid):
    """The process numbers of all processes below ``pid``."""
    found, left = [], [pid]
    while left:
        tasks = Path(f"/proc/{left.pop()}/task")
        for task in tasks.glob("*/children") if tasks.exists() else []:
            own = [int(word) for word in task.read_text().split()]
            found += own
            left += own
    return found


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(children(os.getpid()))
    yield
    assert set(children(os.getpid())) <= before


@pytest.fixture(scope="module")
def host():
    """One process for several tests, which takes two seconds to import transformers; :func:`nothing_left` counts it."""
    world = world_of()
    played(world, ann=["4"], bob=["4"])
    yield world
    world.close()


@pytest.fixture
def world(host):
    host.take_counts()
    return host


SCRIPT = {
    "ann": [buys(2), buys(9), "4"],
    "bob": [call("leave"), call("shell"), "4"],
}


def test_records_equal_those_of_the_trainers_own_process(world):
    own = world_of(isolate=None)
    here, apart = (played(w, **SCRIPT) for w in (own, world))
    assert [without_seconds(d) for d in apart] == [without_seconds(d) for d in here]
    calls = [c.result for u in apart[0].utterances for c in u.calls]
    assert [(r.text, r.error, r.value, r.reward) for r in calls] == [
        ("You have 2.", None, {"left": 1}, 0.2), ("SystemExit: away", "raised", None, None),
        ("ValueError: Only 1 left.", "raised", None, None), ("1", None, None, None),
    ]  # fmt: skip
    assert [u.rewards.get("shop") for u in apart[0].utterances] == [0.2, None, None, None, 2.0, None]


def test_each_dialogue_has_its_own_process_and_all_are_gone_at_its_end(world):
    dialogues = played(world, 2, ann=[call("where")] * 2 + ["4"] * 2, bob=["4"] * 2)
    numbers = {c.result.text for d in dialogues for u in d.utterances for c in u.calls}
    assert len(numbers) == 2 and str(os.getpid()) not in numbers
    assert not any(Path(f"/proc/{number}").exists() for number in numbers)
    assert world.take_counts()["env/shop/closed"] == 2


def test_its_random_numbers_come_from_its_seed(world):
    first, again = (played(world, ann=[call("draw"), "4"], bob=["4"]) for _ in range(2))
    drawn = [d[0].utterances[0].calls[0].result.text for d in (first, again)]
    assert drawn[0] == drawn[1] != "0"


@pytest.mark.parametrize("fault, words", [("crash", "its process ended"), ("hoard", "its process ended")])
def test_a_crash_loses_the_dialogue_and_not_the_run(world, fault, words):
    (dialogue,) = played(world, ann=[call(fault)], bob=["4"])
    assert dialogue.lost == ("shop",)
    result = dialogue.utterances[0].calls[0].result
    assert (result.error, result.text) == ("lost", words)
    (calm,) = played(world, ann=["4"], bob=["4"])
    assert calm.lost == ()


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["environment", "agent"])
def test_a_call_that_blocks_is_killed_and_leaves_no_thread(whose, world):
    world = world_of(seconds=0.4) if whose == "environment" else world
    driver = driver_of(by_turns(ann=[call("hang")], bob=["4"]), world)
    if whose == "agent":
        for name, tools in driver.tools.items():
            driver.tools[name] = replace(tools, limits=CallLimits(seconds=0.4))
    begun = time.monotonic()
    (dialogue,) = driver.play(EXAMPLES[:1])
    assert dialogue.lost == ("shop",) and time.monotonic() - begun < 20
    ended = time.monotonic() + 5
    while world.workers.left and time.monotonic() < ended:
        time.sleep(0.01)
    assert world.workers.left == 0  # the thread that waited has come back
    if whose == "environment":
        world.close()


@pytest.mark.slow
def test_one_that_dies_at_its_reward_is_lost():
    world = world_of("DiesAtReward")
    (dialogue,) = played(world, ann=["4"], bob=["4"])
    assert dialogue.lost == ("shop",) and world.take_counts()["env/shop/lost"] == 1
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind, options, words", [
    pytest.param("BlocksAtReset", {"open_seconds": 0.5}, r"reset did not answer within 0.5 s; raise open_seconds", marks=pytest.mark.slow),
    ("FailsAtReset", {}, r"isolated_worlds.py, line \d+: ValueError: no goods"),
    pytest.param("Stock", {"options": {"size": 3}}, r"unexpected keyword argument 'size'", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_that_cannot_begin_stops_the_run_in_one_line(kind, options, words):
    world = world_of(kind, **options)
    with pytest.raises(EnvironmentFailure, match=words):
        played(world, ann=["4"], bob=["4"])
    world.close()


@pytest.mark.slow
def test_one_that_does_not_close_is_counted(capsys):
    world = world_of("BlocksAtClose", close_seconds=0.3)
    played(world, ann=["4"], bob=["4"])
    assert world.take_counts()["env/shop/close_failed"] == 1
    assert "environment 'shop': close() failed" in capsys.readouterr().err
    world.close()


def test_it_is_forked_by_replay(world):
    section = BranchingSection(how="fork_random", group=3)
    driver = driver_of(lambda r: buys(1) if r.ask.continues is None else "4", world)
    dialogues = play_branched(driver, EXAMPLES[:1], section, lambda d: [0.0] * len(d))
    texts = [[c.result.text for u in d.utterances for c in u.calls] for d in dialogues]
    assert len(texts) == 3 and all(own == texts[0] for own in texts)


def test_a_module_that_another_process_cannot_read_is_named(monkeypatch):
    world = world_of()
    host = world.toolboxes[0]
    assert isinstance(host, Host)
    object.__setattr__(host.section, "use", "isolated_worlds:Stok")
    with pytest.raises(EnvironmentFailure, match=r"Stok.*Stock"):
        played(world, ann=["4"], bob=["4"])
    world.close()


@pytest.mark.slow
def test_a_host_that_was_killed_is_started_again():
    world = world_of()
    played(world, ann=["4"], bob=["4"])
    os.kill(world.toolboxes[0]._process.process.pid, signal.SIGKILL)
    (dialogue,) = played(world, ann=[buys(1), "4"], bob=["4"])
    assert dialogue.utterances[0].calls[0].result.text == "You have 1."
    world.close()


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path):
    program = textwrap.dedent(
        """
        import sys, time
        from maporl.config.schema import EnvironmentSection
        from maporl.environments.isolated import Host, IsolatedEnvironment
        host = Host("shop", EnvironmentSection(use="isolated_worlds:Stock"))
        worlds = [IsolatedEnvironment(host) for _ in range(3)]
        print(host._process.process.pid, *(w._pid for w in worlds), flush=True)
        hang = next(t for t in worlds[0].tools("ann") if t.name == "hang")
        hang.run()
        """
    )
    path = os.pathsep.join([str(SUPPORT), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    numbers = process.stdout.readline().split()
    time.sleep(0.3)
    process.kill()
    process.wait()
    ended = time.monotonic() + 20
    left = set(map(int, numbers))
    while left and time.monotonic() < ended:
        left = {pid for pid in left if _runs(pid)}
        time.sleep(0.05)
    assert len(numbers) == 4 and not left


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
