"""Dialogues in environments: who acts, what is paid, what is forked, and that everything is closed."""

import asyncio
import json
import threading
import time
from dataclasses import replace

import pytest
from isolated_worlds import Mute
from played_games import EXAMPLES, TASK, Shop, buys, by_turns, driver_of, spec

from maporl import Debate
from maporl.config.call_options import CallLimits
from maporl.config.schema import BranchingSection, EnvironmentSection
from maporl.datasets.search import QuestionSearch
from maporl.engines.scripted import ScriptedEngine
from maporl.environments.base import Environment, Tool
from maporl.environments.build import TeamTools, build_grants, environment_spec
from maporl.environments.rooms import EnvironmentFailure
from maporl.environments.workers import Workers
from maporl.environments.world import World
from maporl.errors import ConfigError, refuse
from maporl.protocols import Chain
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.branching import play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.rollout.tool_checks import OfferedTools
from maporl.run import ResolvedRun
from maporl.types import Result, TurnEnd, from_json, to_json
from maporl.validation.load import from_dict
from trl_ext.ppo.options import Decoding


@pytest.fixture(autouse=True)
def closed_once():
    Shop.opened.clear()
    yield
    assert [shop.closed for shop in Shop.opened] == [1] * len(Shop.opened)


class TestTwoAgentsInOneWorld:
    def play(self, workers=32):
        world = World(environments={"shop": spec()})
        world.workers = Workers(workers)
        script = by_turns(ann=[buys(2), "4"], bob=[buys(2), "4"])
        (dialogue,) = driver_of(script, world).play(EXAMPLES[:1])
        return dialogue, world

    def test_acts_run_in_the_order_of_the_asks(self):
        dialogue, world = self.play()
        first, second, third, fourth = dialogue.utterances
        assert [c.result.text for u in (first, second) for c in u.calls] == ["You have 2.", "Only 1 left."]
        assert [(u.agent, u.turn, u.part, u.order, u.answers) for u in dialogue.utterances] == [
            ("ann", 0, 0, 0, False), ("bob", 0, 0, 0, False), ("ann", 0, 1, 1, True), ("bob", 0, 1, 1, True),
        ]  # fmt: skip
        assert first.messages[-1]["content"].endswith("The shop has 3.")
        assert third.messages == [{"role": "tool", "name": "buy", "content": "You have 2."}]
        assert (first.rewards, third.rewards) == ({"shop": pytest.approx(0.2)}, {"shop": 2.0})
        assert fourth.rewards == {} and fourth.turn_end is TurnEnd.ANSWER
        counts = world.take_counts()
        assert (counts["env/shop/opened"], counts["env/shop/closed"]) == (1.0, 1.0)
        assert (counts["tools/buy/calls"], counts["tools/buy/failed"]) == (2.0, 0.0)
        assert from_json(to_json(dialogue)) == dialogue

    def test_one_thread_gives_the_same_record(self):
        def timeless(dialogue):
            for u in dialogue.utterances:
                for call in u.calls:
                    object.__setattr__(call.result, "seconds", 0.0)
            return dialogue

        assert timeless(self.play(1)[0]) == timeless(self.play(32)[0])


def test_news_come_with_the_next_turn():
    world = World(environments={"shop": spec()})
    script = by_turns(ann=[buys(2), "4", "5"], bob=["4", "5"])
    (dialogue,) = driver_of(script, world, Debate(turns=2)).play(EXAMPLES[:1])
    second = [u for u in dialogue.utterances if u.turn == 1]
    assert all(u.messages[-1]["content"].endswith(" 1 are left.") for u in second)
    assert not any("The shop has" in m["content"] for u in second for m in u.messages)


class TestForks:
    @pytest.mark.parametrize("how", ["fork_first", "fork_every", "fork_random"])
    def test_a_fork_goes_on_as_its_trunk_would(self, how):
        """Everybody buys one piece in each turn, so that what is bought tells in which world it was."""
        world = World(environments={"shop": spec()})
        script = lambda r: "4" if r.ask.continues is not None else buys(1)  # noqa: E731
        driver = driver_of(script, world, Chain(turns=1))
        section = BranchingSection(how=how, group=2)
        dialogues = play_branched(driver, EXAMPLES, section, lambda d: [0.0] * len(d))
        assert len(dialogues) >= 4
        for dialogue in dialogues:
            texts = [c.result.text for u in dialogue.utterances for c in u.calls]
            assert texts == ["You have 1.", "You have 1."]
            paid = [u.rewards.get("shop", 0.0) for u in dialogue.utterances]
            assert paid == [pytest.approx(0.1), 1.0, pytest.approx(0.1), 1.0]

    def test_a_world_that_cannot_fork_is_refused(self):
        unforkable = type("Unforkable", (Shop,), {"forks": "no"})
        world = World(environments={"shop": spec(unforkable)})
        script = lambda r: "4" if r.ask.continues is not None else buys(1)  # noqa: E731
        driver = driver_of(script, world, Chain(turns=1))
        with pytest.raises(EnvironmentFailure, match="can be neither copied nor replayed"):
            play_branched(driver, EXAMPLES[:1], BranchingSection(how="fork_every", group=2), lambda d: [0.0])
        world.drop_all()


class TestLimits:
    def play(self, lines, **limits):
        world = World(environments={"shop": spec(agents=("ann",))})
        driver = driver_of(by_turns(ann=lines), world, Chain(turns=1), agents=("ann",))
        kit = driver.specs["ann"].tools
        driver.tools["ann"] = replace(kit, limits=CallLimits(**limits))
        (dialogue,) = driver.play(EXAMPLES[:1])
        return dialogue.utterances

    def test_no_calls_are_left(self):
        said = self.play([buys(1), buys(1), "4"], calls=2)
        assert [u.turn_end for u in said] == [None, None, TurnEnd.LIMIT]
        assert said[2].messages[-1]["content"] == "You cannot call any more. Give your answer."
        assert said[2].answers

    def test_a_call_after_the_limit_is_recorded_and_not_run(self):
        said = self.play([buys(1), buys(1)], calls=1)
        assert [u.turn_end for u in said] == [None, TurnEnd.LIMIT]
        assert said[1].calls[0].result is None and said[1].answers

    def test_the_turn_ends_at_once(self):
        said = self.play([buys(1)], calls=1, at_limit="end")
        assert [(u.turn_end, u.answers) for u in said] == [(TurnEnd.LIMIT, True)]

    def test_failures_in_a_row(self):
        said = self.play(["<call>x</call>", buys(1), "<call>x", "<call>y</call>", "4"], failures=2)
        assert [[c.result.error for c in u.calls] for u in said] == [["unread"], [None], ["unread"], ["unread"], []]
        assert said[-1].turn_end is TurnEnd.LIMIT

    def test_errors_are_told(self):
        said = self.play(['<call>{"name": "sell", "arguments": {}}</call>', "4"])
        told = {"role": "tool", "name": "sell", "content": "unknown 'sell'; known: buy", "error": "unknown"}
        assert said[1].messages == [told]


def call(name, **arguments):
    return f'<call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</call>'


class TestPlainTools:
    def play(self, tool, lines, **options):
        tools = TeamTools.of({"ann": [tool]}, {}, ["ann"])
        world = tools.world
        kit = agent_tools("ann", build_grants(tools.grants, world)["ann"], world, None, 100)
        kit = replace(kit, limits=CallLimits(**options))
        engine = ScriptedEngine(by_turns(ann=lines))
        specs = {"ann": SpeakerSpec("scripted", ("ann",), tools=kit)}
        driver = RolloutDriver(TASK, Chain(turns=1), specs, {"scripted": engine}, Decoding(1.0), world=world)
        (dialogue,) = driver.play(EXAMPLES[:1])
        return [c.result for u in dialogue.utterances for c in u.calls]

    def test_a_tool_that_hangs(self):
        done = threading.Event()

        def hang() -> str:
            """Hang."""
            done.wait(20)
            return "late"

        begun = time.monotonic()
        (result,) = self.play(hang, [call("hang"), "4"], seconds=0.2)
        done.set()
        assert (result.error, time.monotonic() - begun < 5) == ("timeout", True)

    def test_a_coroutine_that_hangs_is_cancelled(self):
        cancelled = []

        async def hang() -> str:
            """Hang."""
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return "late"

        (result,) = self.play(hang, [call("hang"), "4"], seconds=0.2)
        assert result.error == "timeout"
        time.sleep(0.2)
        assert cancelled == [True]


class TestALostEnvironment:
    def test_its_dialogue_ends_and_is_marked(self):
        world = World(environments={"shop": spec(lambda: Shop(slow=1.5), seconds=0.1)})
        script = by_turns(ann=[buys(1), "4"], bob=["4", "4"])
        (dialogue,) = driver_of(script, world, Chain(turns=1)).play(EXAMPLES[:1])
        assert dialogue.lost == ("shop",)
        assert dialogue.utterances[0].turn_end is TurnEnd.LOST
        assert [c.result.error for c in dialogue.utterances[0].calls] == ["lost"]
        with pytest.raises(EnvironmentFailure, match=r"it did not answer within 0\.1 s in 1 of 1 dialogues"):
            world.check_lost([dialogue])
        time.sleep(1.6)

    def test_the_run_stops_if_it_is_told_to(self):
        world = World(environments={"shop": spec(lambda: Shop(slow=1.0), seconds=0.1, on_lost="stop")})
        driver = driver_of(by_turns(ann=[buys(1)], bob=[]), world, Chain(turns=1))
        with pytest.raises(EnvironmentFailure, match="did not answer within"):
            driver.play(EXAMPLES[:1])
        world.drop_all()
        time.sleep(1.1)

    @pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
    def test_out_of_memory_loses_it_and_ctrl_c_ends_the_run(self, error):
        def fall() -> str:
            """Fall."""
            raise error

        class Falling(Shop):
            def tools(self, agent):
                return [Tool.of(fall)]

        world = World(environments={"shop": spec(Falling)})
        driver = driver_of(by_turns(ann=[call("fall"), "4"], bob=["4"]), world, Chain(turns=1))
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                driver.play(EXAMPLES[:1])
            world.drop_all()
            return
        (dialogue,) = driver.play(EXAMPLES[:1])
        assert dialogue.lost == ("shop",)
        assert [c.result.error for c in dialogue.utterances[0].calls] == ["lost"]


class TestFaultsOfEnvironments:
    @pytest.mark.parametrize(("method", "value", "message"), [
        ("reward", {"ann": 1.0, "bob": 2.0}, r"seed \d+: reward\(\) paid 1.0 to 'ann', but environment 'shop' belongs to \['bob'\]"),
        ("reset", {"ann": "Psst."}, r"it cannot begin: reset told 'ann' something, but environment 'shop' belongs to \['bob'\]"),
    ])  # fmt: skip
    def test_nobody_else_is_paid_or_told_anything(self, method, value, message):
        class Generous(Shop):
            def reset(self, seed, row):
                super().reset(seed, row)
                return value if method == "reset" else None

            def reward(self):
                return value

        given = {"bob": ["shop.buy"]}
        world = TeamTools.of(given, {"shop": Generous}, ("ann", "bob")).world
        driver = driver_of(by_turns(ann=["4"], bob=["4"]), world, given=given)
        with pytest.raises(EnvironmentFailure, match=message) as caught:
            driver.play(EXAMPLES[:1])
        assert "name 'shop' in agents.NAME.tools, or list the agent in environments.shop.agents" in str(caught.value)
        world.drop_all()

    def test_an_agent_that_does_not_play(self):
        with pytest.raises(ConfigError, match="tools: agent 'cy' does not play"):
            TeamTools.of({"cy": []}, {}, ["ann"])


def _config(team, protocol=None, sources=None, **shop):
    return from_dict(
        {
            "output_dir": "unused",
            "agents": {name: {"tiny": {}, "tools": tools} for name, tools in team.items()},
            "task": {"name": "toy_sum"},
            "protocol": protocol or {"name": "debate"},
            "environments": {"shop": {"use": "test_environments:Shop", **shop}},
            "reward": {"sources": sources or {"label": 1.0}},
        }
    )


class TestWhoseItIs:
    @pytest.mark.parametrize(("ann", "bob", "options", "agents"), [
        ([], [], {}, ("ann", "bob")),
        ([], ["shop"], {}, ("bob",)),
        (["shop.buy"], [], {}, ("ann",)),
        (["shop"], ["shop.buy"], {}, ("ann", "bob")),
        ([], ["shop"], {"agents": ["ann", "bob"]}, ("ann", "bob")),
        ([], [], {"agents": ["ann"]}, ("ann",)),
        ([], ["shop"], {"protocol": {"name": "world", "place": "shop"}}, ("ann", "bob")),
    ])  # fmt: skip
    def test_it_belongs_to_those_whose_tools_name_it(self, ann, bob, options, agents):
        config = _config({"ann": ann, "bob": bob}, **options)
        assert ResolvedRun(config).open_tools().world.environments["shop"].agents == agents
        if set(options) <= {"protocol"}:
            acts_in = frozenset({"shop"} if options else ())
            of = TeamTools.of({"ann": ann, "bob": bob}, {"shop": Shop}, ("ann", "bob"), acts_in)
            assert of.world.environments["shop"].agents == agents

    def test_who_does_not_name_it_hears_nothing_and_is_paid_nothing(self):
        class Even(Shop):
            def reward(self):
                return 1.0

        def played(given):
            world = TeamTools.of(given, {"shop": Even}, ("ann", "bob")).world
            script = by_turns(ann=["4"], bob=[buys(2), "4"])
            (dialogue,) = driver_of(script, world, given=given).play(EXAMPLES[:1])
            return {
                u.agent: ("The shop has 3." in str(u.messages), u.rewards) for u in dialogue.utterances if u.part == 0
            }, {u.agent: u.rewards for u in dialogue.utterances if u.turn_end is not None or u.agent == "ann"}

        first, last = played({"bob": ["shop"]})
        assert first["ann"] == (False, {}) and first["bob"][0]
        assert last == {"ann": {}, "bob": {"shop": 1.0}}
        first, last = played({})
        assert first["ann"][0] and first["bob"][0] and last == {"ann": {"shop": 1.0}, "bob": {"shop": 1.0}}


class TestAWeightOnWhatPaysNothing:
    def trl(self, body):
        names = {"Result": Result}
        exec(f"class Shop:\n    def reset(self):\n        pass\n{body}", names)
        return names["Shop"]

    def can_pay(self, make, **options):
        section = EnvironmentSection(use="shop", **options)
        made = environment_spec("shop", make, section, ("ann",), ("ann",))
        try:
            refuse(World(environments={"shop": made}).offers.unpaid({"shop", "label"}))
        except ConfigError as error:
            assert "reward: shop: the environment 'shop' (" in str(error) and "pays nothing" in str(error)
            return False
        return True

    def test_what_can_pay(self):
        look = '    def look(self) -> str:\n        """Look."""\n'
        assert self.can_pay(Shop)
        assert not self.can_pay(Mute)
        assert not self.can_pay(QuestionSearch)
        assert not self.can_pay(self.trl(f"{look}        return 'x'"))
        assert self.can_pay(self.trl(f"{look}        return Result('x', reward=1.0)"))
        assert self.can_pay(self.trl(f"{look}        return 'x'\n    def get_reward(self):\n        return 1.0"))
        assert self.can_pay(self.trl(f"{look}        return 'x'"), reward="score")
        assert self.can_pay(self.trl(look.replace(" -> str", "") + "        return make()"))

        class ByCalls(Shop):
            reward = Environment.reward

        assert self.can_pay(ByCalls), "its tool is annotated as a text, and returns what pays"

        class Sure(Mute):
            def can_pay(self, agents):
                return agents == ("ann",)

        assert self.can_pay(Sure)

    @pytest.mark.parametrize("isolate", [None, pytest.param("process", marks=pytest.mark.slow)])
    def test_it_is_refused_before_a_model_loads(self, isolate):
        config = _config(
            {"ann": [], "bob": []}, sources={"label": 1.0, "shop": 0.5}, use="isolated_worlds:Mute", isolate=isolate
        )
        with pytest.raises(ConfigError, match=r"reward: shop: the environment 'shop' \(\w+\) pays nothing"):
            refuse(OfferedTools(ResolvedRun(config)).faults())

    def test_a_plain_tool_that_pays_nothing_is_refused_too(self):
        def add() -> int:
            """Add."""
            return 1

        def earn() -> str:
            """Earn."""
            return Result("earned", reward=1.0)

        offers = World({"add": Tool.of(add), "earn": Tool.of(earn)}).offers
        assert list(offers.unpaid({"earn", "label"})) == []
        with pytest.raises(ConfigError, match=r"reward: add: the tool 'add' pays nothing"):
            refuse(offers.unpaid({"add"}))


def test_a_group_plays_one_episode():
    world = World(environments={"shop": spec()})
    driver_of(lambda r: "4", world, common_seed=True, rng_key=(0, 1)).play(EXAMPLES[:1], 2)
    seeds = [shop.seed for shop in Shop.opened if hasattr(shop, "seed")]
    assert len(seeds) == 2 and len(set(seeds)) == 1
    Shop.opened.clear()
    world = World(environments={"shop": spec()})
    driver_of(lambda r: "4", world, common_seed=False, rng_key=(0, 1)).play(EXAMPLES[:1], 2)
    assert len({shop.seed for shop in Shop.opened if hasattr(shop, "seed")}) == 2
