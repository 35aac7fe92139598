"""Environments behind OpenEnv's servers: real servers with words and with tools, that fill up, fail, hang and die."""

import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from folders import SUPPORT
from launches import free_port

pytest.importorskip("openenv", reason="needs the extra openenv, which does not fit beside mcp 2")

from maporl.environments.workers import Job, Workers
from maporl.errors import ConfigError, install_command
from maporl.integrations import open_env
from maporl.integrations.open_env import OpenEnv
from maporl.types import Result

SERVER = str(SUPPORT / "open_env_server.py")
LOST = Result("the connection to it is lost", error="lost", done=True)


def serve(kind, slots):
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port), str(slots), kind], stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)
    raise TimeoutError


@pytest.fixture(scope="module")
def words():
    process, url = serve("words", 3)
    yield url
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def tools():
    process, url = serve("tools", 2)
    yield url
    process.kill()
    process.wait()


def call(world, name, seconds=5.0, **arguments):
    tool = next(tool for tool in world.tools("ann") if tool.name == name)
    ((outcome,),) = Workers().run([[Job(lambda: tool.run(**arguments), seconds, name)]])
    if outcome.error is not None:
        raise outcome.error
    return None if outcome.late else outcome.value


@contextmanager
def worlds_of(url, number=1, **options):
    """Environments of one server, which are closed at the end."""
    worlds = [OpenEnv(url, **options) for _ in range(number)]
    try:
        yield worlds
    finally:
        for world in worlds:
            world.close()


class TestAServerOfActions:
    def test_an_episode(self, words):
        with worlds_of(words, show="text", reset={"level": "hard"}) as [world]:
            (tool,) = world.tools("ann")
            assert tool.line() == "act(word: string, bid: integer): A guess, which may be a word, and a bid."
            assert tool.parameters["required"] == ["word"]
            assert world.reset(27, {}) == "Guess a number (hard)."
            first = call(world, "act", word="3")
            assert (first.text, first.reward, first.done, first.error) == ("no", 0.0, False, None)
            assert first.value["observation"]["left"] == 2
            wrong = call(world, "act", wrd="3")
            assert wrong == Result("Invalid message (code: VALIDATION_ERROR)", error="raised")
            assert call(world, "act", word="fail").text == "this word is forbidden (code: EXECUTION_ERROR)"
            assert not world.over()
            last = call(world, "act", word="7", bid=2)
            assert (last.text, last.reward, last.done) == ("yes", 2.0, True) and world.over()
            assert world.reward() is None

    def test_the_whole_turn_is_the_action(self, words):
        with worlds_of(words, spoken="word", columns=["level"]) as [world]:
            assert world.reset(5, {"level": "odd"}) == '{"text": "Guess a number (odd).", "left": 3}'
            assert [tool.line() for tool in world.tools("ann")] == ["act(action: string): Act in the environment."]
            assert call(world, "act", action="5").text == '{"text": "yes", "left": 2}'

    def test_an_option_that_names_nothing_of_the_server(self, words):
        with pytest.raises(ConfigError, match=r"spoken: .*unknown 'wort'; did you mean 'word'"):
            OpenEnv(words, spoken="wort").tools("ann")
        with pytest.raises(ConfigError, match="columns: unknown 'level'"):
            OpenEnv(words, columns=["level"]).reset(1, {})
        with (
            worlds_of(words, show="txt") as [world],
            pytest.raises(ConfigError, match=r"show: .*unknown 'txt'; did you mean 'text'"),
        ):
            world.reset(1, {})

    def test_dialogues_do_not_share_an_episode_and_the_seed_decides(self, words):
        with worlds_of(words, 2, show="text") as worlds:
            for seed, world in enumerate(worlds):
                world.reset(seed, {})
            assert [call(world, "act", word="1").text for world in worlds] == ["no", "yes"]

    def test_a_full_server_is_waited_for_and_told(self, words):
        with worlds_of(words, 4, show="text", open_seconds=1.0) as worlds:
            for world in worlds[:3]:
                world.reset(0, {})
            full = r"no session is free \(Server at capacity: 3/3 .*max_concurrent_envs of at"
            with pytest.raises(ConfigError, match=full):
                worlds[3].reset(0, {})
            ((late,),) = [Workers().run([[Job(lambda: _later(worlds[0]), 5, "close")]])[0]]
            assert late.error is None
            assert worlds[3].reset(0, {}) == "Guess a number (easy)."

    def test_after_a_call_that_took_too_long_nothing_is_sent(self, words):
        """The package would open a new world without a word."""
        with worlds_of(words, show="text") as [world]:
            world.reset(3, {})
            assert call(world, "act", seconds=0.3, word="sleep") is None
            assert call(world, "act", word="3") == LOST
            assert world.over()

    def test_a_server_that_dies(self):
        process, url = serve("words", 2)
        with worlds_of(url, show="text", open_seconds=0.5) as [world]:
            world.reset(3, {})
            assert call(world, "act", word="die") == LOST and call(world, "act", word="3") == LOST
        process.kill()
        process.wait()
        with pytest.raises(ConfigError, match=f"openenv: {url}: no session: ConnectionError: Failed to connect"):
            OpenEnv(url, open_seconds=0.5).reset(1, {})
        open_env._OFFERED.clear()
        with pytest.raises(ConfigError, match=f"openenv: {url}: it does not tell the schema of its actions"):
            OpenEnv(url).tools("ann")


def _later(world):
    time.sleep(0.3)
    world.close()


class TestAServerOfTools:
    def test_its_tools_are_offered_as_they_are_in_a_session_of_each_dialogue(self, tools):
        with worlds_of(tools, 2) as [world, other]:
            assert [tool.line() for tool in world.tools("ann")] == ["up(by: integer): Count up.", "fail(): Fail."]
            assert world.reset(0, {}) is other.reset(0, {}) is None
            assert [call(world, "up", by=n).text for n in (2, 3)] == ["now 2", "now 5"]
            assert call(other, "up", by=1).text == "now 1"
            failed = call(world, "fail")
            assert failed.error == "raised" and "it failed" in failed.text
            assert call(world, "up", by="x").error == "raised"


class TestOptions:
    def test_another_machine_is_asked_for(self):
        with pytest.raises(ConfigError, match=r"openenv: url: example.org is another machine; set network: true"):
            OpenEnv("http://example.org")
        with pytest.raises(ConfigError, match="openenv: url: expected an address"):
            OpenEnv("http://[x")

    def test_a_missing_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
        with pytest.raises(ConfigError, match=f"needs the package openenv .*{re.escape(install_command('openenv'))}"):
            OpenEnv("http://localhost:1")
