"""The protocol world, played by hand and trained: what it asks, what it does, and what it is sent."""

import pytest
from scripted_dialogues import TEAM, Game, trained

from maporl import PlayWorld
from maporl.types import Act, Result


class TestWorld:
    def test_each_acts_in_turn_until_it_is_over(self):
        game = Game(
            PlayWorld(place="maze", turns=3),
            ("ann", "bob"),
            ["north", "wait", "east"],
            [Result("You see a door."), Result("Nothing."), Result("You are out.", done=True)],
        )
        assert game.texts() == [
            "Who wrote Emma?",
            "Who wrote Emma?\n\nann: north\nYou see a door.",
            "You see a door.\n\nbob: wait\nNothing.",
        ]
        assert [(ask.agent, ask.parents, ask.answers) for ask in game.asks] == [
            ("ann", (), True), ("bob", (0,), True), ("ann", (0, 1), True),
        ]  # fmt: skip
        assert game.acts == [
            Act("ann", "act", {"action": "north"}, 0, "maze"),
            Act("bob", "act", {"action": "wait"}, 1, "maze"),
            Act("ann", "act", {"action": "east"}, 2, "maze"),
        ]
        assert game.outcome == {"actions": 3, "over": True}

    def test_an_agent_acts_so_many_times(self):
        game = Game(
            PlayWorld(place="maze", turns=2), ("ann",), ["a", "b"], [Result("1"), Result("wrong", error="raised")]
        )
        assert game.texts() == ["Who wrote Emma?", "1"] and game.outcome == {"actions": 2, "over": False}

    def test_it_ends_where_the_environment_is_over_already(self):
        game = Game(PlayWorld(place="maze"), ("ann",), ["a"], [Result("it is over", error="over")])
        assert game.outcome == {"actions": 1, "over": True}

    def test_the_environment_names_who_acts_next(self):
        results = [
            Result("1", value={"next": "cy"}),
            Result("2", value={"next": "cy"}),
            Result("3"),
            Result("4", done=True),
        ]
        game = Game(PlayWorld(place="maze"), TEAM, ["a", "b", "c", "d"], results)
        assert [ask.agent for ask in game.asks] == ["ann", "cy", "cy", "ann"]
        with pytest.raises(ValueError, match=r"environment 'maze': it wants 'dee' to act, of agents \['ann'"):
            Game(PlayWorld(place="maze"), TEAM, ["a"], [Result("1", value={"next": "dee"})])

    def test_what_an_action_is_paid_at_once(self):
        game = Game(PlayWorld(place="maze"), ("ann",), ["a", "b"], [Result("1", reward=0.5), Result("2", done=True)])
        assert [said.rewards for said in game.utterances] == [{"maze": 0.5}, {}] and PlayWorld(place="maze").pays == {
            "maze"
        }

    def test_options_choose_tool_and_texts(self):
        world = PlayWorld(
            place="maze", tool="step", argument="text", opening="Go.", later="{question} {news}", quote="<{result}>"
        )
        game = Game(world, ("ann", "bob"), ["a", "b"], [Result("1"), Result("2", done=True)])
        assert game.texts() == ["Go.", "Go.\n\nWho wrote Emma? <1>"]
        assert game.acts[1] == Act("bob", "step", {"text": "b"}, 1, "maze")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "place: expected the name of an environment"),
            ({"place": "x", "turns": 0}, "turns: expected a whole number of at least 1, got 0"),
            ({"place": "x", "later": "Go on."}, r"later: it must contain \{news\}"),
            ({"place": "x", "quote": "{nothing}"}, "quote: it may use"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            PlayWorld(**options)


MAZE = """
from maporl import Environment, Result, Tool

SCHEMA = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}


class Maze(Environment):
    def reset(self, seed, row):
        self.steps = 0
        return "!"

    def tools(self, agent):
        def act(action):
            self.steps += 1
            return Result(str(self.steps), reward=float(agent == "ann"), done=self.steps == 3)

        return [Tool("act", "Act.", SCHEMA, act)]

    def reward(self):
        return {"bob": 10.0 * self.steps}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten")
def test_a_team_that_acts_in_a_world_is_trained(tmp_path, monkeypatch):
    (tmp_path / "maze.py").write_text(MAZE)
    said = trained(
        tmp_path, monkeypatch, ("ann", "bob"), task={"name": "toy_sum", "largest": 9},
        environments={"maze": {"use": "maze:Maze"}}, protocol={"name": "world", "place": "maze", "turns": 5},
        reward={"sources": {"maze": 1.0}},
    )  # fmt: skip
    assert [(u["agent"], u["rewards"].get("maze")) for u in said] == [("ann", 1.0), ("bob", 30.0), ("ann", 1.0)]
    assert [u["calls"][0]["result"]["text"] for u in said] == ["1", "2", "3"]
    assert said[0]["messages"][-1]["content"].endswith("!") and "2" in said[2]["messages"][-1]["content"]
