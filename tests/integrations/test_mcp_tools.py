"""Tools of MCP servers: real servers that answer, fail, hang, die, come back, and answer with more than text."""

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time

import psutil
import pytest
from folders import SUPPORT
from launches import free_port

pytest.importorskip("mcp", reason="needs the extra mcp")

from maporl.config.schema import EnvironmentSection
from maporl.environments import ENVIRONMENTS, TOOLS
from maporl.environments.rooms import EnvironmentSpec, Rooms
from maporl.environments.workers import Job, Workers
from maporl.environments.world import World
from maporl.errors import ConfigError, install_command
from maporl.integrations import mcp, mcp_server
from maporl.integrations.mcp import MCPEnvironment, MCPTools
from maporl.integrations.mcp_server import ServerGone
from maporl.types import Act, Example, Result

VERSION = int(importlib.metadata.version("mcp").partition(".")[0])
COMMAND = [sys.executable, str(SUPPORT / "mcp_test_server.py")]
DEAD = Result("its server has died", error="raised")


@pytest.fixture(autouse=True)
def same_packages(monkeypatch):
    """The server is written with the same version of the package as the client."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    assert children() == []


def options(*more, **changed):
    return {"command": [*COMMAND, *more], "env": ["PYTHONPATH"], **changed}


@pytest.fixture
def box():
    box = MCPTools(**options())
    yield box
    box.close()


def call(owner, name, seconds=5.0, **arguments):
    """Call a tool as the loop of tools does. Return None if it took too long."""
    tools = owner.tools() if isinstance(owner, MCPTools) else owner.tools("ann")
    tool = next(tool for tool in tools if tool.name == name)
    ((outcome,),) = Workers().run([[Job(lambda: tool.run(**arguments), seconds, name)]])
    if outcome.error is not None:
        raise outcome.error
    return None if outcome.late else outcome.value


def children():
    running = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in running if COMMAND[1] in " ".join(child.cmdline())]


class TestOfACommand:
    def test_its_tools_have_the_schemas_that_it_gives(self, box):
        lines = {tool.name: tool.line() for tool in box.tools()}
        assert lines["price"] == "price(fruit: string, count: integer): Say what fruit costs."
        assert list(lines) == ["price", "buy", "lines", "empty", "picture", "slow", "hang", "die", "variables"]
        price = box.tools()[0]
        assert price.parameters["required"] == ["fruit"] and price.parameters["properties"]["count"]["default"] == 1

    def test_what_it_answers_is_text(self, box):
        assert call(box, "price", fruit="pear", count=2) == Result("2 pear cost 6", value={"result": "2 pear cost 6"})
        assert call(box, "lines").text == "one\ntwo"
        assert call(box, "empty").text == '{"result": []}'
        assert call(box, "picture") == Result(
            "it returned content of the type 'image'; only text can be shown", error="raised"
        )

    def test_its_errors_are_told(self, box):
        hidden = "" if VERSION > 1 else ": a stone is not for sale"
        assert call(box, "price", fruit="stone") == Result(f"Error executing tool price{hidden}", error="raised")
        wrong = call(box, "price", fruit=3)
        assert wrong.error == "raised" and "Input should be a valid string" in wrong.text
        assert call(box, "price", fruit="fig").error is None

    def test_it_is_shared_by_all_calls_of_the_process(self, box):
        assert [call(box, "buy", count=n).text for n in (1, 2)] == ["1 apples", "3 apples"]
        assert len(children()) == 1

    def test_its_process_gets_no_other_variables(self, monkeypatch):
        monkeypatch.setenv("SHOP_KEY", "secret")
        monkeypatch.setenv("OTHER_KEY", "secret")
        box = MCPTools(**options(env=["PYTHONPATH", "SHOP_KEY"]))
        names = set(call(box, "variables").text.split())
        box.close()
        assert names - {"LC_CTYPE"} == {"PATH", "PYTHONPATH", "SHOP_KEY"}  # Python sets LC_CTYPE itself
        assert "secret" not in repr(box._server.options)

    @pytest.mark.slow
    def test_several_calls_wait_at_the_same_time(self, box):
        (tool,) = [tool for tool in box.tools() if tool.name == "slow"]
        began = time.monotonic()
        outcomes = Workers().run([[Job(lambda: tool.run(seconds=0.4), 5, "slow")] for _ in range(8)])
        assert [row[0].value.text for row in outcomes] == ["late"] * 8
        assert time.monotonic() - began < 8 * 0.4 / 2

    @pytest.mark.slow
    def test_a_late_answer_is_not_taken_for_that_of_the_next_call(self, box):
        (slow,) = [tool for tool in box.tools() if tool.name == "slow"]
        ((outcome,),) = Workers().run([[Job(lambda: slow.run(seconds=1.0), 0.2, "slow")]])
        assert outcome.late
        assert call(box, "price", fruit="fig").text == "1 fig cost 3"
        time.sleep(1.1)
        assert call(box, "price", fruit="pear").text == "1 pear cost 3"


class TestAServerThatDies:
    def test_it_is_told_and_started_again_before_the_next_update(self, box):
        assert call(box, "buy", count=1).text == "1 apples"
        assert call(box, "die") == DEAD and call(box, "buy", count=1) == DEAD
        box.renew()
        assert call(box, "buy", count=1).text == "1 apples" and len(children()) == 1

    @pytest.mark.slow
    def test_it_is_missed_between_updates(self, box):
        (child,) = children()
        child.kill()
        child.wait(5)
        box.renew()
        assert call(box, "buy", count=1).text == "1 apples"
        box.renew()
        assert call(box, "buy", count=1).text == "2 apples"  # a server that answers is left alone

    @pytest.mark.slow
    def test_it_dies_between_two_calls(self, box):
        (child,) = children()
        child.kill()
        child.wait(5)
        assert call(box, "buy", count=1) == DEAD

    @pytest.mark.slow
    def test_one_that_hangs_is_started_again(self, box, monkeypatch):
        monkeypatch.setattr(mcp_server, "_PATIENCE", 0.5)
        assert call(box, "hang", seconds=0.3) is None
        assert call(box, "price", seconds=0.3, fruit="fig") is None
        box.renew()
        assert call(box, "price", fruit="fig").text == "1 fig cost 3" and len(children()) == 1

    @pytest.mark.slow
    def test_one_that_does_not_start_is_told_with_its_last_words(self):
        with pytest.raises(ServerGone, match=r"--broken' does not start: .*; it wrote: no database here"):
            MCPTools(**options("--broken"))
        with pytest.raises(ServerGone, match=r"--silent' does not start: no answer within 0.5 s"):
            MCPTools(**options("--silent", start_seconds=0.5))

    @pytest.mark.slow
    def test_closing_twice_and_calling_after_it(self, box):
        box.close()
        box.close()
        assert children() == [] and call(box, "price", fruit="fig") == DEAD


def serve(port):
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise TimeoutError


class TestAtAnAddress:
    @pytest.mark.slow
    def test_it_answers_dies_and_comes_back(self, monkeypatch):
        for name in (
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
            "all_proxy",
        ):  # which this machine's own servers are not asked through
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        port = free_port()
        url = f"http://127.0.0.1:{port}/mcp"
        with pytest.raises(ServerGone, match=f"the MCP server '{url}' does not start: ConnectError"):
            MCPTools(url=url)
        server = serve(port)
        box = MCPTools(url=url)
        try:
            assert call(box, "price", fruit="pear").text == "1 pear cost 3"
            server.kill()
            server.wait()
            assert call(box, "price", fruit="pear") == DEAD and call(box, "price", fruit="pear") == DEAD
            with pytest.raises(ServerGone, match="does not start: ConnectError"):
                box.renew()
            server = serve(port)
            box.renew()
            assert call(box, "price", fruit="pear").text == "1 pear cost 3"
            server.kill()
            server.wait()
            server = serve(port)
            assert call(box, "price", fruit="pear") == DEAD  # it is there, and knows nothing of this session
            box.renew()
            assert call(box, "price", fruit="pear").text == "1 pear cost 3"
            ended = call(box, "die", seconds=1.0)
            assert ended == (DEAD if VERSION > 1 else None)  # version 1 of the package does not notice, and waits
        finally:
            box.close()
            server.kill()
            server.wait()


class TestOfADialogue:
    def test_each_dialogue_has_its_own_server(self):
        worlds = [MCPEnvironment(**options(only=["buy"])) for _ in range(2)]
        try:
            for world in worlds:
                assert world.reset(7, {}) is None
            assert [call(world, "buy", count=2).text for world in (worlds[0], worlds[0], worlds[1])] == [
                "2 apples", "4 apples", "2 apples",
            ]  # fmt: skip
            assert len(children()) == 2 and worlds[0].forks == "no"
        finally:
            for world in worlds:
                world.close()

    @pytest.mark.slow
    def test_its_tools_are_asked_for_once(self, monkeypatch):
        monkeypatch.setattr(mcp, "_LISTED", {})
        first, second = (MCPEnvironment(**options(only=["buy", "price"])) for _ in range(2))
        assert [tool.name for tool in first.tools("ann")] == ["price", "buy"] and len(children()) == 1
        first.close()
        assert [tool.name for tool in second.tools("bob")] == ["price", "buy"] and children() == []

    @pytest.mark.slow
    def test_one_that_is_not_closed_ends_with_the_run(self, tmp_path):
        code = (
            "from maporl.integrations.mcp import MCPEnvironment\n"
            f"world = MCPEnvironment(**{options()!r})\nworld.reset(0, {{}})\nprint(world._server.alive)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout == "True\n"


class TestOptions:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({}, r"expected either command, as \[docs-server, --stdio\], or url"),
            ({"command": ["a"], "url": "http://localhost"}, "expected either command"),
            ({"command": "docs-server --stdio"}, "command: expected a list of texts, .* got 'docs-server --stdio'"),
            ({"command": ["no-such-program-here"]}, "command: no program 'no-such-program-here'; install it"),
            ({"command": ["env"], "env": ["NOT_SET_HERE"]}, "env: the variable 'NOT_SET_HERE' is not set"),
            ({"command": ["env"], "env": "PATH"}, "env: expected a list of names, got 'PATH'"),
            ({"command": ["env"], "only": "x"}, "only: expected a list of names, got 'x'"),
            ({"command": ["env"], "network": True}, "network: it goes with url"),
            ({"url": "http://example.org/mcp"}, "url: example.org is another machine; set network: true if"),
            ({"url": "localhost:8000"}, "url: expected an address, as http://localhost:8000, got 'localhost:8000'"),
            ({"url": "http://localhost/mcp", "env": ["PATH"]}, "env: it goes with command"),
            ({"comand": ["env"]}, "unexpected keyword argument 'comand'; its options are command, url, env"),
        ],
    )
    def test_wrong_ones_are_refused_before_anything_starts(self, changed, message):
        for kind in (MCPTools, MCPEnvironment):
            with pytest.raises(ConfigError, match=f"mcp: .*{message}"):
                kind(**changed)

    def test_another_machine_is_asked_for_by_network_and_the_proxy_is_named(self, monkeypatch):
        monkeypatch.setenv("http_proxy", f"http://alice:correct-horse@127.0.0.1:{free_port()}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(ServerGone, match=r"does not start") as caught:
            MCPTools(url="http://maporl.invalid/mcp", network=True, start_seconds=10)
        assert "'http://maporl.invalid/mcp' through the proxy http://127.0.0.1:" in str(caught.value)
        assert "correct-horse" not in str(caught.value)

    def test_a_missing_package_is_named_with_what_installs_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "mcp", None)
        with pytest.raises(ConfigError, match=f"it needs the package mcp .*{re.escape(install_command('mcp'))}"):
            MCPEnvironment(**options())


@pytest.mark.slow
def test_in_a_run_a_late_tool_is_told_and_a_late_environment_is_lost():
    box = TOOLS["mcp"](**options(only=["price", "slow"]))
    section = EnvironmentSection(use="mcp", options=options(only=["buy", "hang"]))
    spec = EnvironmentSpec("basket", lambda: ENVIRONMENTS["mcp"](**section.options), ("ann",), section)
    world = World({tool.name: tool for tool in box.tools()}, {"basket": spec}, [box])
    rooms = Rooms(Example("1", "?", ""), ("seed",), [])
    try:
        assert list(world.tools) == ["price", "slow"]
        assert [tool.name for tool in world.offers.tools_of("basket", "ann")] == ["buy", "hang"]
        world.begin([rooms])
        acts = [Act("ann", "buy", {"count": 2}, 0, "basket"), Act("ann", "price", {"fruit": "fig"}, 0)]
        results = world.act([(rooms, 0, act) for act in acts], {"ann": 20.0})
        assert [result.text for result in results] == ["2 apples", "1 fig cost 3"]
        late = [Act("ann", "slow", {"seconds": 60}, 0), Act("ann", "hang", {}, 0, "basket")]
        results = world.act([(rooms, 1, act) for act in late], {"ann": 1.0})
        assert [result.error for result in results] == ["timeout", "lost"] and rooms.lost == ["basket"]
        assert world.act([(rooms, 2, acts[1])], {"ann": 20.0})[0].text == "1 fig cost 3"
    finally:
        world.close()
