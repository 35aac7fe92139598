"""Environments behind OpenEnv's servers: real servers with words and with tools, that fill up, fail, hang and die."""

import re
import socket
import subprocess
import sys
import time

import pytest
from folders import SUPPORT

pytest.importorskip("openenv", reason="needs the extra openenv, which does not fit beside mcp 2")

from maporl.environments.workers import Job, Workers
from maporl.errors import ConfigError, install_command
from maporl.integrations import open_env
from maporl.integrations.open_env import OpenEnv
from maporl.types import Result

SERVER = str(SUPPORT / "open_env_server.py")


def serve(kind, slots):
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
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


class TestAServerOfActions:
    def test_an_episode(self, words):
        world = OpenEnv(words, show="text", reset={"level": "hard"})
        (tool,) = world.tools("ann")
        assert tool.line() == "act(word: string, bid: integer): A guess, which may be a word, and a bid."
        assert tool.parameters["required"] == ["word"]
        try:
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
        finally:
            world.close()

    def test_the_whole_turn_is_the_action(self, words):
        world = OpenEnv(words, spoken="word", columns=["level"])
        try:
            assert world.reset(5, {"level": "odd"}) == '{"text": "Guess a number (odd).", "left": 3}'
            assert [tool.line() for tool in world.tools("ann")] == ["act(action: string): Act in the environment."]
            assert call(world, "act", action="5").text == '{"text": "yes", "left": 2}'
        finally:
            world.close()
        with pytest.raises(ConfigError, match=r"spoken: .*unknown 'wort'; did you mean 'word'"):
            OpenEnv(words, spoken="wort").tools("ann")
        with pytest.raises(ConfigError, match="columns: unknown 'level'"):
            OpenEnv(words, columns=["level"]).reset(1, {})
        world = OpenEnv(words, show="txt")
        with pytest.raises(ConfigError, match=r"show: .*unknown 'txt'; did you mean 'text'"):
            world.reset(1, {})
        world.close()

    def test_dialogues_do_not_share_an_episode_and_the_seed_decides(self, words):
        worlds = [OpenEnv(words, show="text") for _ in range(2)]
        try:
            for seed, world in enumerate(worlds):
                world.reset(seed, {})
            assert [call(world, "act", word="1").text for world in worlds] == ["no", "yes"]
        finally:
            for world in worlds:
                world.close()

    def test_a_full_server_is_waited_for_and_told(self, words):
        worlds = [OpenEnv(words, show="text", open_seconds=1.0) for _ in range(4)]
        try:
            for world in worlds[:3]:
                world.reset(0, {})
            with pytest.raises(
                ConfigError, match=r"no session is free \(Server at capacity: 3/3 .*max_concurrent_envs of at"
            ):
                worlds[3].reset(0, {})
            ((late,),) = [Workers().run([[Job(lambda: _later(worlds[0]), 5, "close")]])[0]]
            assert late.error is None
            assert worlds[3].reset(0, {}) == "Guess a number (easy)."
        finally:
            for world in worlds:
                world.close()

    def test_after_a_call_that_took_too_long_nothing_is_sent(self, words):
        """The package would open a new world without a word."""
        world = OpenEnv(words, show="text")
        try:
            world.reset(3, {})
            assert call(world, "act", seconds=0.3, word="sleep") is None
            assert call(world, "act", word="3") == Result("the connection to it is lost", error="lost", done=True)
            assert world.over()
        finally:
            world.close()

    def test_a_server_that_dies(self):
        process, url = serve("words", 2)
        world = OpenEnv(url, show="text", open_seconds=0.5)
        try:
            world.reset(3, {})
            lost = Result("the connection to it is lost", error="lost", done=True)
            assert call(world, "act", word="die") == lost and call(world, "act", word="3") == lost
        finally:
            world.close()
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
    def test_its_tools_are_offered_as_they_are(self, tools):
        world = OpenEnv(tools)
        assert [tool.line() for tool in world.tools("ann")] == ["up(by: integer): Count up.", "fail(): Fail."]
        try:
            assert world.reset(0, {}) is None
            assert [call(world, "up", by=n).text for n in (2, 3)] == ["now 2", "now 5"]
            failed = call(world, "fail")
            assert failed.error == "raised" and "it failed" in failed.text
            assert call(world, "up", by="x").error == "raised"
        finally:
            world.close()

    def test_a_session_of_its_own(self, tools):
        worlds = [OpenEnv(tools) for _ in range(2)]
        try:
            for world in worlds:
                world.reset(0, {})
            assert [call(world, "up", by=1).text for world in (worlds[0], worlds[0], worlds[1])] == [
                "now 1",
                "now 2",
                "now 1",
            ]
        finally:
            for world in worlds:
                world.close()


class TestOptions:
    def test_another_machine_is_asked_for(self):
        with pytest.raises(ConfigError, match=r"openenv: url: example.org is another machine; add network: true"):
            OpenEnv("http://example.org")
        with pytest.raises(ConfigError, match="openenv: url: expected an address"):
            OpenEnv("http://[x")

    def test_a_missing_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
        with pytest.raises(ConfigError, match=f"needs the package openenv .*{re.escape(install_command('openenv'))}"):
            OpenEnv("http://localhost:1")
