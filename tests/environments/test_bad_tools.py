"""Bad input to tools and environments: what they raise, return, pay, change and print, and servers that die in a
run."""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from fast_cases import some
from folders import SUPPORT
from hostile_runs import nested

from maporl import Arithmetic
from maporl.config.call_options import CallLimits
from maporl.config.schema import EnvironmentSection
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.base import Environment, Tool
from maporl.environments.build import TeamTools, ToolGrant, build_grants
from maporl.environments.rooms import EnvironmentFailure, EnvironmentSpec
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.methods.games.prisoners import PrisonersDilemma
from maporl.protocols import Chain
from maporl.protocols.game import PlayGame
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Example, Result, TurnEnd, from_json, to_json
from trl_ext.ppo.options import Decoding


def call(name, **arguments):
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def play(lines, tools=(), make=None, agents=("ann",), **options):
    """Play one dialogue in which ann says ``lines``. Return it and its world, in which nothing is open any more."""
    given = TeamTools.of({"ann": list(tools)}, {}, agents)
    world = given.world
    if make is not None:
        world.environments["shop"] = EnvironmentSpec("shop", make, agents, EnvironmentSection(use="shop", **options))
    grants = build_grants(given.grants, world)
    kits = {name: agent_tools(name, grant, world, None, 100) for name, grant in grants.items()}
    left = list(lines)
    driver = RolloutDriver(
        Arithmetic(largest=9), Chain(turns=1), {name: SpeakerSpec("s", (name,), tools=kits.get(name)) for name in agents},
        {"s": ScriptedEngine(lambda request: left.pop(0))}, Decoding(1.0), world=world,
    )  # fmt: skip
    try:
        (dialogue,) = driver.play([Example("e", "2+2=", "4")])
        return dialogue, world
    finally:
        world.drop_all()


def results(dialogue):
    return [c.result for u in dialogue.utterances for c in u.calls]


def acting(work, returns=str):
    """A tool function that does ``work``."""

    def act():
        """Act."""
        return work()

    act.__annotations__ = {"return": returns}
    return act


class Place(Environment):
    """Does nothing wrong. Its instances count how often they were reset and closed."""

    log: list = []

    def reset(self, seed, row):
        Place.log.append("reset")

    def tools(self, agent):
        return [Tool.of(acting(lambda: "x"))]

    def close(self):
        Place.log.append("close")


@pytest.fixture(autouse=True)
def fresh_log():
    Place.log.clear()


class Mute:
    def __str__(self):
        raise ValueError("no words")


class Unsaid(Exception):
    def __str__(self):
        raise RuntimeError("never")


def fails(error):
    raise error


class Leaves(Place):
    def tools(self, agent):
        return [Tool.of(acting(lambda: sys.exit("gone")))]


DEEP = "TypeError: the value of a Result must be JSON: it has more than 64 lists and objects inside each other"
TEXT = "a\x1b[31mb\r\x9b2J\x85\u202ec\u2066d\u2069\u200fe\n\t\u00e9\u4f60\U0001f468\u200d\U0001f469"
S = "\ufffd"
SHOWN = f"a{S}[31mb{S}{S}2J{S}{S}c{S}d{S}{S}e\n\t\u00e9\u4f60\U0001f468\u200d\U0001f469"
NO_JSON = "TypeError: the value of a Result must be JSON: Object of type object is not JSON serializable"


@pytest.mark.parametrize(("work", "error", "text"), [
    (Mute, "raised", "ValueError: no words"),
    (lambda: Result("x", value={"at": object()}), "raised", NO_JSON),
    (lambda: TEXT, None, SHOWN),
    (lambda: fails(ValueError("x\u202e\x9b")), "raised", f"ValueError: x{S}{S}"),
    (lambda: Result("x", value=nested(60)), None, "x"),
    (lambda: Result("x", value=nested(66)), "raised", DEEP),
    (lambda: Result("x", value=nested(800)), "raised", DEEP),
    (lambda: fails(MemoryError()), "raised", "MemoryError:"),
    (lambda: fails(Unsaid()), "raised", "Unsaid: its message cannot be read (RuntimeError)"),
])  # fmt: skip
def test_what_a_tool_returns_or_raises_is_told_and_recorded(work, error, text):
    dialogue, _ = play([call("act"), "4"], [acting(work)])
    (result,) = results(dialogue)
    assert (result.error, result.text) == (error, text)
    assert from_json(to_json(dialogue)) == dialogue


def test_a_coroutine_whose_value_has_no_text_is_an_error_too():
    async def act():
        """Act."""
        return Mute()

    (result,) = results(play([call("act"), "4"], [act])[0])
    assert (result.error, result.text) == ("raised", "ValueError: no words")


def test_ten_megabytes_of_bytes_that_are_not_text():
    (result,) = results(play([call("act"), "4"], [acting(lambda: b"\xff\x1b\x00" * 3_500_000)])[0])
    assert set(result.text) == {S} and len(result.text) == 4 * 512
    assert result.left_out == 2**18 - 512


def test_a_long_message_with_control_characters_and_half_characters_is_cut():
    long = acting(lambda: fails(ValueError("\x1b[31m\x00 \ud800" + "x" * 10_000_000)))
    (result,) = results(play([call("act"), "4"], [long])[0])
    assert result.text.startswith(f"ValueError: {S}[31m{S} {S}xxx") and len(result.text) == 300


def test_a_tool_of_an_environment_that_leaves_the_program():
    (result,) = results(play([call("act"), "4"], make=Leaves)[0])
    assert (result.error, result.text) == ("raised", "SystemExit: gone")


ODD, SEEN = "a\x1b[31mb\ud83d\u202e\r\n", "a\ufffd[31mb\ufffd\ufffd\n"
"""What no reader should obey and no tokenizer can read, and what agents are shown of it."""


class TestWhatEnvironmentsSay:
    @pytest.mark.parametrize("by_agent", [False, True])
    def test_at_their_beginning_and_before_a_turn(self, by_agent):
        class Shop(Environment):
            def tools(self, agent):
                return []

            def reset(self, seed, row):
                return {"ann": f"reset {ODD}"} if by_agent else f"reset {ODD}"

            def observe(self, agent):
                return f"observe {ODD}"

            def state(self):
                return f"state {ODD}"

        dialogue, _ = play(["4"], make=Shop)
        (utterance,) = dialogue.utterances
        assert f"reset {SEEN}observe {SEEN}" in utterance.messages[-1]["content"]
        assert utterance.tags["state"] == f"state {SEEN}"

    def test_in_games(self):
        class Odd(PrisonersDilemma):
            def observe(self, player):
                return f"observe {ODD}"

            def moves(self, player):
                return (*super().moves(player), ODD)

        game = Odd()
        game.begin_with(random.Random(0), game.seats()[0])
        (message,) = (
            PlayGame(game="prisoners_dilemma", prompt="{observation} {moves}")._ask(game, "ann", 0, "0").messages
        )
        assert f"observe {SEEN}" in message["content"] and message["content"].count(SEEN) == 2


class TestWhatModelsWrite:
    def take(self, line):
        def take(n: int, of: str = "all") -> str:
            """Take.

            Args:
                n: how many
                of: of what
            """
            return f"{n} {of}"

        (result,) = results(play([line, "4"], [take])[0])
        return result.error, result.text

    @pytest.mark.parametrize(("line", "error", "text"), [
        (call("take", n=1, off="x"), "arguments", "unknown off; it takes n, of"),
        (call("take"), "arguments", "n is missing"),
        (call("take", n=[1]), "arguments", "n: [1] is not of type 'integer'"),
        (call("take", n="7"), None, "7 all"),
        (call("tale", n=1), "unknown", "unknown 'tale'; did you mean 'take'? known: take"),
        ('<call>{"name": "take", "arguments": [1]}</call>', "unread", "its arguments are not an object: [1]"),
        ('<call>{"arguments": {}}</call>', "unread", 'it is not an object with "name" and "arguments"'),
        ('<call>{"name": "take"', "unread", "<call> has no </call>"),
    ])  # fmt: skip
    def test_a_call_that_cannot_be_carried_out_is_told(self, line, error, text):
        assert self.take(line) == (error, text)

    @pytest.mark.parametrize("body", [
        "[" * 100_000,
        '{"name": "take", "arguments": {"n": ' + "[" * 500 + "]" * 500 + "}}",
        '{"name": "take", "arguments": {"n": "' + "[" * 500 + "]" * 500 + '"}}',
        '{"name": "take", "arguments": {"n": ' + "9" * 5000 + "}}",
        '{"name": "take", "arguments": {"n": NaN}}',
    ], ids=["deep", "500 deep", "500 deep in a text", "5000 digits", "NaN"])  # fmt: skip
    def test_json_that_is_hard_to_read(self, body):
        error, text = self.take(f"<call>{body}</call>")
        assert error in ("unread", "arguments") and len(text) < 250


class TestWhatEnvironmentsSayAndPay:
    @pytest.mark.parametrize(("said", "message"), [
        (3, "reset returned 3, expected a text, texts by agent, or None"),
        ({"cy": "x"}, r"reset told 'cy' something, but environment 'shop' belongs to \['ann'\]"),
    ])  # fmt: skip
    def test_what_reset_says_is_checked_and_it_is_closed(self, said, message):
        class Odd(Place):
            def reset(self, seed, row):
                super().reset(seed, row)
                return said

        with pytest.raises(EnvironmentFailure, match=r"environment 'shop', question e, seed \d+: it cannot begin:"):
            play(["4"], make=Odd)
        # one was made to ask for its tools, and never began
        assert Place.log == ["close", "reset", "close"]

    @pytest.mark.parametrize(("paid", "words"), [
        ("1", "paid '1' to 'ann'"),
        (float("-inf"), "paid -inf to 'ann'"),
        (float("nan"), "paid nan to 'ann'"),
        (10**400, "paid 1000.* to 'ann'"),
        ({"ann": None}, "paid None to 'ann'"),
    ])  # fmt: skip
    def test_a_reward_that_is_not_a_finite_number_stops_the_run(self, paid, words):
        class Odd(Place):
            def reward(self):
                return paid

        with pytest.raises(EnvironmentFailure, match=rf"environment 'shop', question e, seed \d+: reward\(\) {words}"):
            play(["4"], make=Odd)
        assert Place.log.count("reset") == 1 and Place.log.count("close") == 2

    @pytest.mark.parametrize("paid", [np.float32(0.5), np.int64(2), True])
    def test_numbers_of_numpy_and_truth_values_are_numbers(self, paid):
        class Pays(Place):
            def reward(self):
                return paid

            def tools(self, agent):
                return [Tool.of(acting(lambda: Result("x", reward=paid), Result))]

        dialogue, _ = play([call("act"), "4"], make=Pays)
        assert [u.rewards for u in dialogue.utterances] == [{"shop": float(paid)}] * 2
        assert from_json(to_json(dialogue)) == dialogue

    @pytest.mark.parametrize("paid", ["1", float("nan"), 10**400])
    def test_what_a_call_pays_is_checked(self, paid):
        act = acting(lambda: Result("x", reward=paid), Result)

        class Pays(Place):
            def tools(self, agent):
                return [Tool.of(act)]

        with pytest.raises(EnvironmentFailure, match=r"'shop', question e, seed 858393134: act\(\) of 'ann' paid"):
            play([call("act"), "4"], make=Pays)
        with pytest.raises(EnvironmentFailure, match=r"tool 'act', question e: act\(\) of 'ann' paid"):
            play([call("act"), "4"], [act])

    @pytest.mark.parametrize("method", ["reset", "observe", "over", "state", "reward"])
    def test_a_method_that_would_end_the_program_is_named(self, method):
        """Without a word, and with status 0, so that whoever started the run would take it for finished."""

        def leaves(self, *given):
            sys.exit(0)

        odd = type("Odd", (Place,), {method: leaves})
        with pytest.raises(EnvironmentFailure, match=r"environment 'shop', question e, seed \d+: .*SystemExit: 0"):
            play([call("act"), "4"], make=odd)

    @pytest.mark.parametrize("method", ["observe", "state"])
    def test_news_and_names_of_situations_are_texts(self, method):
        odd = type("Odd", (Place,), {method: lambda self, *given: 3})
        with pytest.raises(EnvironmentFailure, match=rf"seed \d+: {method}\(.*\) returned 3, expected a text or None"):
            play(["4"], make=odd)


class TestTheEndOfAnEnvironment:
    def test_it_is_over_before_anybody_acted(self):
        class Over(Place):
            def over(self):
                return True

        (last,) = play([call("act")], make=Over)[0].utterances
        assert last.turn_end is TurnEnd.OVER and last.answers
        assert (last.calls[0].result.error, last.calls[0].result.text) == ("over", "it is over")

    def test_it_never_ends(self):
        dialogue, world = play([call("act")] * 3 + ["4"], make=Place, calls=2)
        assert [r.error for r in results(dialogue)] == [None, None, "limit"]
        assert results(dialogue)[2].text == "at most 2 calls are allowed in it"
        assert world.take_counts()["env/shop/closed"] == 1.0

    def test_a_call_after_done(self):
        class Ends(Place):
            done = False

            def over(self):
                return self.done

            def tools(self, agent):
                def act() -> Result:
                    """Act."""
                    self.done = True
                    return Result("end", done=True)

                return [Tool.of(act)]

        dialogue, _ = play([call("act"), call("act"), "4"], make=Ends, agents=("ann", "bob"))
        assert [(u.agent, u.turn_end) for u in dialogue.utterances] == [("ann", TurnEnd.OVER), ("bob", TurnEnd.OVER)]
        assert [r.error for r in results(dialogue)] == [None, "over"]


class Careless(Place):
    """Changes what all instances share, while a call waits too."""

    concurrent = False

    def tools(self, agent):
        def act() -> str:
            """Act."""
            random.seed(1), np.random.seed(1), os.chdir("/")
            print("a word to the log")
            return "x"

        async def wait() -> str:
            """Act."""
            return act()

        return [Tool.of(act), Tool.of(wait)]


@pytest.mark.parametrize("name", ["act", "wait"])
def test_what_a_call_changes_in_the_process_is_put_back(name, capsys):
    random.seed(5), np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), Path.cwd()
    (result,) = results(play([call(name), "4"], make=Careless)[0])
    assert result.text == "x" and capsys.readouterr().out == "a word to the log\n"
    assert (random.getstate(), np.random.get_state()[1].tolist(), Path.cwd()) == before


SEARCH = Tool.of(acting(lambda: "y"), "search")
ADD = Tool(
    "add", "Add.", {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}, max
)


@pytest.mark.parametrize(("names", "call_format", "tools", "message"), [
    (["act", "shop"], "auto", [Tool.of(acting(lambda: "y"))], r"agents\.ann\.tools: it has two tools called 'act'; rename one of them"),
    (["serach"], "auto", [SEARCH], r"agents\.ann\.tools: unknown 'serach'; did you mean 'search'\? known: search, shop; add"),
    (["shop.atc"], "auto", [], r"agents\.ann\.tools: shop\.atc: unknown 'atc'; did you mean 'act'\?"),
    (["add"], "tags", [ADD], r"agents\.ann\.call_format: tags: tool add needs .*; use call_format: json"),
])  # fmt: skip
def test_names_of_tools_that_cannot_be_are_refused(names, call_format, tools, message):
    given = TeamTools.of({"ann": tools}, {"shop": Place}, ["ann"])
    with pytest.raises(ConfigError, match=message):
        agent_tools("ann", ToolGrant(tuple(names), call_format, CallLimits()), given.world, None, 100)


class TestServersThatDie:
    """Real processes, killed in the midst of a dialogue."""

    @pytest.mark.parametrize("on_lost", some(["drop", "stop"], 0))
    def test_the_server_of_one_dialogue_dies(self, on_lost, monkeypatch):
        pytest.importorskip("mcp", reason="needs the extra mcp")
        from maporl.integrations.mcp import MCPEnvironment

        monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        command = [sys.executable, str(SUPPORT / "mcp_test_server.py")]
        section = EnvironmentSection(use="mcp", on_lost=on_lost, lost_at_most=0.5)
        make = lambda: MCPEnvironment(command=command, env=["PYTHONPATH"], only=["buy", "die"])  # noqa: E731
        world = World(environments={"shop": EnvironmentSpec("shop", make, ("ann",), section)})
        kit = agent_tools("ann", ToolGrant(("shop",)), world, None, 100)

        def say(request):
            if request.ask.continues is not None:
                return "4"
            return call("die") if request.messages[-1]["content"].startswith("1") else call("buy", count=2)

        driver = RolloutDriver(
            Arithmetic(largest=9), Chain(turns=1), {"ann": SpeakerSpec("s", ("ann",), tools=kit)},
            {"s": ScriptedEngine(say)}, Decoding(1.0), world=world,
        )  # fmt: skip
        examples = [Example("e", "1+1=", "2"), Example("f", "2+2=", "4")]
        try:
            if on_lost == "stop":
                with pytest.raises(EnvironmentFailure, match=r"question e, seed \d+: die: its server has"):
                    driver.play(examples)
                return
            first, second = driver.play(examples)
        finally:
            world.close()
        assert first.lost == ("shop",) and first.utterances[-1].turn_end is TurnEnd.LOST
        assert second.lost == () and [r.text for r in results(second)] == ["2 apples"]
        world.check_lost([first, second])
        counts = world.take_counts()
        assert (counts["env/shop/opened"], counts["env/shop/closed"], counts["env/shop/lost"]) == (2.0, 2.0, 1.0)
