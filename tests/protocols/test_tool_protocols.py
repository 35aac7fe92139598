"""Protocols that answer calls themselves, and that call tools themselves."""

import pytest

from maporl import Arithmetic
from maporl.config.call_options import CallLimits
from maporl.config.schema import BranchingSection
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.base import Tool
from maporl.environments.build import ToolGrant
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.protocols import CallReturn, Protocol
from maporl.rewards.credit import credit_by_readers
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.branching import play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Act, Ask, Example, Result, TurnEnd
from trl_ext.ppo.options import Decoding

TASK = Arithmetic(largest=9)
EXAMPLE = Example("e", "2+2=", "4")


def search(query: str) -> str:
    """Search.

    Args:
        query: the words
    """
    return "Emma was written by Jane Austen."


def driver_of(protocol, script, agents, tools=None, **limits):
    world = World({"search": Tool.of(search)})
    specs = {}
    for name in agents:
        handed = protocol.tools(name, agents)
        given = (tools or {}).get(name, ())
        kit = None
        if given or handed:
            grant = ToolGrant(tuple(given), "json", CallLimits(**limits))
            kit = agent_tools(name, grant, world, None, 100, handed)
        specs[name] = SpeakerSpec("scripted", (name,), tools=kit)
    lines = {name: list(own) for name, own in script.items()}
    engine = ScriptedEngine(lambda request: lines[request.ask.agent].pop(0))
    return RolloutDriver(TASK, protocol, specs, {"scripted": engine}, Decoding(1.0), world=world)


def asks(worker, question):
    return f'<call>{{"name": "ask_{worker}", "arguments": {{"question": "{question}"}}}}</call>'


class TestPlannerAndSearcher:
    SCRIPT = {
        "planner": [asks("searcher", "author of Emma"), "Jane Austen"],
        "searcher": ['<call>{"name": "search", "arguments": {"query": "Emma author"}}</call>', "Jane Austen."],
    }

    def play(self):
        protocol = CallReturn(call="tool", plan="{question}")
        agents = ("planner", "searcher")
        driver = driver_of(protocol, self.SCRIPT, agents, {"searcher": ["search"]})
        (dialogue,) = driver.play([EXAMPLE])
        return dialogue

    def test_the_record(self):
        said = self.play().utterances
        assert [(u.agent, u.turn, u.part, u.answers, u.fresh, u.caller) for u in said] == [
            ("planner", 0, 0, False, False, None),
            ("searcher", 0, 0, False, True, 0),
            ("searcher", 0, 1, False, True, 0),
            ("planner", 0, 1, True, False, None),
        ]
        assert [u.parents for u in said] == [(), (0,), (1,), (0, 2)]
        assert said[3].messages == [{"role": "tool", "name": "ask_searcher", "content": "Jane Austen."}]
        assert [c.result.text for u in said for c in u.calls] == ["Jane Austen.", "Emma was written by Jane Austen."]
        assert [u.turn_end for u in said] == [None, None, TurnEnd.ANSWER, TurnEnd.ANSWER]

    def test_all_have_the_credit_of_the_answer(self):
        dialogue = self.play()
        dialogue.utterances[3].rewards["credit"] = 1.0
        credit_by_readers(dialogue)
        assert [u.rewards["credit"] for u in dialogue.utterances] == [1.0] * 4


def test_an_orchestrator_asks_two_workers_at_the_same_time():
    protocol = CallReturn(call="tool", plan="{question}")
    script = {
        "boss": [asks("ann", "2+2") + asks("bob", "3+3") + asks("ann", "1+1"), "4, 6, 2"],
        "ann": ["4", "2"],
        "bob": ["6"],
    }
    (dialogue,) = driver_of(protocol, script, ("boss", "ann", "bob"), parallel=True).play([EXAMPLE])
    assert [(u.agent, u.order, u.turn) for u in dialogue.utterances] == [
        ("boss", 0, 0), ("ann", 1, 0), ("bob", 1, 0), ("ann", 1, 1), ("boss", 2, 0),
    ]  # fmt: skip
    assert [m["content"] for m in dialogue.utterances[-1].messages] == ["4", "6", "2"]
    assert dialogue.utterances[-1].parents == (0, 1, 2, 3)


def test_broken_calls_beside_good_ones_come_back_in_order():
    protocol = CallReturn(call="tool", plan="{question}")
    script = {"boss": ['<call>{"name": "ask_ann"}</call>' + asks("ann", "2+2"), "4"], "ann": ["4"]}
    (dialogue,) = driver_of(protocol, script, ("boss", "ann"), parallel=True).play([EXAMPLE])
    assert [(m["content"], m.get("error")) for m in dialogue.utterances[-1].messages] == [
        ("question is missing", "arguments"),
        ("4", None),
    ]


def test_a_worker_is_not_asked_nothing():
    """A chat template that writes contents alone would make a prompt without tokens of it."""
    protocol = CallReturn(call="tool", plan="{question}")
    script = {"boss": [asks("ann", " "), asks("ann", "2+2"), "4"], "ann": ["4"]}
    (dialogue,) = driver_of(protocol, script, ("boss", "ann")).play([EXAMPLE])
    assert [u.agent for u in dialogue.utterances] == ["boss", "boss", "ann", "boss"]
    assert dialogue.utterances[0].calls[0].result.error == "arguments"
    (dialogue,) = driver_of(CallReturn(), {"boss": ["<call> </call>"]}, ("boss", "ann")).play([EXAMPLE])
    assert dialogue.outcome == 0 and dialogue.utterances[0].answers


def test_no_calls_are_left():
    protocol = CallReturn(call="tool", plan="{question}")
    script = {"boss": [asks("ann", "2+2"), asks("ann", "3+3")], "ann": ["4"]}
    (dialogue,) = driver_of(protocol, script, ("boss", "ann"), calls=1).play([EXAMPLE])
    last = dialogue.utterances[-1]
    assert last.turn_end is TurnEnd.LIMIT and last.answers and last.calls[0].result is None
    assert last.messages[-1]["content"] == "You cannot call any more. Give your answer."


@pytest.mark.parametrize("how", ["fork_every", "fork_random", "fork_first"])
def test_forks_of_calls_between_agents(how):
    protocol = CallReturn(call="tool", plan="{question}")

    def script(request):
        if request.ask.agent == "ann":
            return f"{request.ask.messages[0]['content']}!"
        return "done" if request.ask.continues is not None else asks("ann", "q")

    driver = driver_of(protocol, {}, ("boss", "ann"))
    driver.engines["scripted"] = ScriptedEngine(script)
    dialogues = play_branched(driver, [EXAMPLE], BranchingSection(how=how, group=2), lambda d: [0.0] * len(d))
    for dialogue in dialogues:
        assert [u.text for u in dialogue.utterances] == [asks("ann", "q"), "q!", "done"]
        assert [c.result.text for u in dialogue.utterances for c in u.calls] == ["q!"]


class Continues(Protocol):
    """Continues a turn wrongly."""

    def __init__(self, *schemas):
        self.schemas = schemas

    def play(self, example, agents):
        (said,) = yield [Ask(agents[0], [{"role": "user", "content": "?"}], schemas=self.schemas)]
        yield [Ask(agents[0], [{"role": "tool", "name": "x", "content": "y"}], continues=said.id)]


@pytest.mark.parametrize("schemas", [(), (Tool.of(search).schema(),)], ids=["said", "called what the protocol brought"])
def test_a_turn_that_waits_for_nothing_is_not_continued(schemas):
    call = '<call>{"name": "search", "arguments": {"query": "Emma"}}</call>'
    driver = driver_of(Continues(*schemas), {"ann": [call, "5"]}, ("ann",))
    with pytest.raises(ConfigError, match="the protocol continues utterance 0 of agent 'ann', which waits for nothing"):
        driver.play([EXAMPLE])


class Acts(Protocol):
    """Searches what the agent says, and pays it if something is found."""

    uses_tools = frozenset({"search"})

    def play(self, example, agents):
        (said,) = yield [Ask(agents[0], [{"role": "user", "content": "?"}])]
        (found,) = yield [Act(agents[0], "search", {"query": said.text}, of=said.id)]
        yield [Ask(agents[0], [{"role": "user", "content": found.text}])]
        return found.text


@pytest.mark.parametrize("how", ["independent", "fork_every", "tree"])
def test_a_protocol_calls_a_tool_itself(how):
    driver = driver_of(Acts(), {}, ("ann",))
    driver.engines["scripted"] = ScriptedEngine(lambda request: f"turn {request.turn}")
    section = BranchingSection(how=how, group=2)
    dialogues = play_branched(driver, [EXAMPLE], section, lambda d: [0.0] * len(d))
    whole = [d for d in dialogues if len(d.utterances) == 2]
    assert whole
    for dialogue in whole:
        assert dialogue.outcome == "Emma was written by Jane Austen."
        (call,) = dialogue.utterances[0].calls
        assert (call.id, call.name, call.arguments) == ("0.0", "search", {"query": "turn 0"})
        assert isinstance(call.result, Result)


class Lost(Acts):
    def play(self, example, agents):
        (said,) = yield [Ask(agents[0], [{"role": "user", "content": "?"}])]
        yield [Act(agents[0], "serach", {}, of=said.id)]


def test_an_unknown_tool_of_a_protocol():
    driver = driver_of(Lost(), {"ann": ["4"]}, ("ann",))
    with pytest.raises(
        ConfigError, match="the protocol calls a tool for agent 'ann': unknown 'serach'; did you mean 'search'"
    ):
        driver.play([EXAMPLE])
