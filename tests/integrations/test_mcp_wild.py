"""MCP servers as they are in the wild: names that no model can write, files in answers, long lists, long answers, bad
schemas."""

import asyncio
import sys

import pytest
from folders import SUPPORT

pytest.importorskip("mcp", reason="needs the extra mcp")

from maporl.environments.build import ToolGrant
from maporl.environments.rooms import LARGEST, Rooms
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.integrations import mcp_server
from maporl.integrations.mcp import MCPEnvironment, MCPTools
from maporl.integrations.mcp_server import ServerGone
from maporl.rollout.agent_tools import agent_tools
from maporl.types import Act, Example

SERVER = str(SUPPORT / "mcp_raw_server.py")


@pytest.fixture(scope="module")
def box():
    box = MCPTools(command=[sys.executable, SERVER])
    yield box
    box.close()


@pytest.fixture(scope="module")
def say(box):
    """Call a tool as a run does."""
    world = World({tool.name: tool for tool in box.tools()}, {}, [])
    rooms = Rooms(Example("1", "?", ""), ("seed",), [])

    def call(name, **arguments):
        return world.act([(rooms, 0, Act("ann", name, arguments, 0))], {"ann": 30.0})[0]

    return call


def test_all_pages_of_a_long_list_and_names_that_models_can_write(box):
    tools = {tool.name: tool for tool in box.tools()}
    assert len(tools) == 1206
    assert list(tools)[:7] == [
        "files_count_2",
        "files_count",
        "files_count_3",
        "_2nd_look",
        "x" * 64,
        "x" * 60 + "_2",
        "tool0",
    ]
    assert tools["files_count_2"].description == "Count\ufffd files.\ufffd"
    assert tools["files_count"].parameters == {"type": "object", "properties": {}}
    assert tools["_2nd_look"].line() == "_2nd_look(place: {row: integer, depth: integer or null}): "


def test_a_call_reaches_the_tool_by_its_own_name(say):
    assert say("files_count_2").text == "3"
    assert say("files_count_3").text == "by another name"
    assert say("_2nd_look", place={"row": 1}).text == '{"place": {"row": 1}}'


def test_what_is_not_only_text(say):
    assert say("tool0").text == "downloaded\n# Title"
    assert say("tool1").text == "c.md The third.: repo://a/c.md\n[image: only text can be shown]"
    for name, kind in (("tool2", "resource"), ("tool3", "image")):
        result = say(name)
        assert (result.error, result.text) == (
            "raised",
            f"it returned content of the type '{kind}'; only text can be shown",
        )
    assert say("tool7").text == "done"


def test_long_deep_and_obeyed(say):
    long = say("tool4")
    assert len(long.text) == LARGEST and long.value is None
    assert say("tool5").text == "x\ufffdy\ufffdz\ufffd"
    deep = say("tool6")
    assert deep.error == "raised" and deep.text.endswith("it has more than 64 lists and objects inside each other")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tool8", "did not return structured content"),
        ("tool9", "Invalid structured content returned by tool tool9: 'a' is a required property"),
        ("tool10", "downloaded"),
        ("tool11", "content"),  # version 2 of the package says that it is missing, and version 1 shows the structured
        ("tool12", "hologram"),
        ("tool13", "downloaded"),
        *[(f"tool{number}", "the database is locked") for number in (14, 15, 16, 17)],
        ("tool18", "{}"),
    ],
)
def test_a_refused_answer_is_an_error_of_its_call_only(box, say, name, words):
    result = say(name)
    assert words in result.text and (result.error or "none") == ("none" if name == "tool18" else "raised")
    assert say("files_count_2").text == "3" and box._server.alive


def test_an_environment_is_not_lost_by_a_refused_answer():
    own = MCPEnvironment(command=[sys.executable, SERVER], only=["tool8", "tool14"])
    try:
        own.reset(0, {})
        assert [asyncio.run(tool.run()).error for tool in own.tools("ann")] == ["raised", "raised"]
    finally:
        own.close()


def test_an_agent_may_name_a_tool_as_the_server_does(box):
    tools = {tool.name: tool for tool in box.tools()}
    world = World(tools, {}, [], groups={"shop": list(tools)})
    kit = agent_tools("ann", ToolGrant(("shop.2nd look", "shop.tool0")), world, None, 100)
    assert list(kit.checks) == ["_2nd_look", "tool0"]
    with pytest.raises(ConfigError, match=r"agents\.ann\.tools: shop\.tol0: unknown 'tol0'; did you mean 'tool0'"):
        agent_tools("ann", ToolGrant(("shop.tol0",)), world, None, 100)


def test_only_names_tools_as_the_server_does_or_as_models_do():
    box = MCPTools(command=[sys.executable, SERVER, "bad"], only=["files.count", "_2nd_look"])
    box.close()
    assert [tool.name for tool in box.tools()] == ["files_count_2", "_2nd_look"]
    with pytest.raises(ConfigError, match=r"only: .* has no tool 'count'; it has files\.count, .* and 1177 more$"):
        MCPTools(command=[sys.executable, SERVER, "bad"], only=["count"])


def test_a_bad_schema_is_named_at_the_start():
    with pytest.raises(
        ConfigError,
        match=r"mcp: the MCP server .*mcp_raw_server\.py bad.*: tool broken: parameters\.properties\.a\.pattern: '\(' is not a "
        r"regular expression: .*; give a valid JSON schema; or leave this tool out by only: \[NAMES\]",
    ):
        MCPTools(command=[sys.executable, SERVER, "bad"])


@pytest.mark.parametrize(("mode", "words"), [("circle", r"6 tools in 2 pages"), ("endless", r"0 tools in \d+ pages")])
def test_a_list_without_end_is_given_up(mode, words, monkeypatch):
    monkeypatch.setattr(mcp_server, "MOST_TOOLS", 200)
    with pytest.raises(ServerGone, match=rf"does not list its tools: ValueError: its list does not end: {words}"):
        MCPTools(command=[sys.executable, SERVER, mode])
