"""What ends a game of TextArena, PettingZoo or Gymnasium early, and which names of actions can be read."""

import random
from importlib.util import find_spec

import pytest
from played_games import play

from maporl.errors import ConfigError
from maporl.integrations.petting_zoo import PettingZoo
from maporl.integrations.text_arena import TextArena
from maporl.protocols.game import PlayGame

pettingzoo = pytest.importorskip("pettingzoo")
gymnasium = pytest.importorskip("gymnasium")
if find_spec("textarena") is None:  # its import takes seconds, in each process that collects tests
    pytest.skip("needs the extra games", allow_module_level=True)


def test_a_player_who_repairs_a_move_has_made_two():
    """TextArena asks a player again after an invalid move, so one player can move more often than the others."""
    lines = {"agent0": iter(["[9]", "[4]"]), "agent1": iter(["[0]"])}
    outcome, said = play(PlayGame("textarena", options={"longest": 2}), 2, lambda ask, rng: next(lines[ask.agent]))
    assert [u.agent for u in said] == ["agent0", "agent0", "agent1"] and outcome == {"agent0": 0, "agent1": 0}


@pytest.mark.parametrize("env", ["Poker-v0", "PublicGoodsGame-v0", "Golf-v0"])
def test_games_in_which_one_player_speaks_more_often_end_at_its_limit(env):
    import textarena

    if f"{env}-raw" not in textarena.envs.registration.ENV_REGISTRY:
        pytest.skip("this TextArena has no such game")
    words = ["[Player 1]", "[fold]", "[10]", "[check]", "[bid 5]", "hm"]
    for number in range(3):
        _, said = play(
            PlayGame("textarena", options={"env": env, "longest": 4}), 3, lambda ask, rng: rng.choice(words), number
        )
        assert max(sum(u.agent == f"agent{player}" for u in said) for player in range(3)) <= 4


def test_an_invalid_move_costs_legal_even_if_the_game_is_cut_short():
    lines = {"agent0": iter(["[Bid: 1, 2]"]), "agent1": iter(["[nonsense]", "[nonsense]"])}
    options = {"env": "LiarsDice-v0", "longest": 2}
    bids = iter(["[Bid: 2, 2]", "[Bid: 3, 2]", "[Bid: 4, 2]", "[Bid: 5, 2]"])
    outcome, said = play(
        PlayGame("textarena", options=options), 4, lambda ask, rng: next(lines.get(ask.agent, bids), "[Bid: 9, 6]")
    )
    assert outcome == dict.fromkeys(("agent0", "agent1", "agent2", "agent3"), 0.0)
    assert [u.rewards["legal"] for u in said if u.agent == "agent1"] == [1.0, 0.0]
    assert all(u.rewards["legal"] for u in said if u.agent != "agent1")


def test_secret_roles_are_tags_when_the_game_is_over():
    outcome, said = play(
        PlayGame("textarena", options={"env": "SecretMafia-v0"}), 6, lambda ask, rng: f"[Player {rng.randrange(6)}]", 0
    )
    roles = {u.agent: u.tags["secret_role"] for u in said}
    assert sorted(roles.values()) == ["Detective", "Doctor", "Mafia", "Mafia", "Villager", "Villager"]
    mafia = {agent for agent, role in roles.items() if role == "Mafia"}
    assert {outcome[agent] for agent in mafia} != {outcome[agent] for agent in set(roles) - mafia}


def test_a_game_that_draws_when_it_is_made_is_decided_by_its_seed():
    """Taboo draws its category before TextArena seeds the generator."""
    heard = []
    for outside in (1, 2, 3):
        random.seed(outside)
        game = TextArena(env="Taboo-v0-full")
        game.begin_with(random.Random(7), 4)
        heard.append(game.observe(game.to_move()[0]))
    assert heard[0] == heard[1] == heard[2]


def test_a_fault_of_textarena_names_the_game_and_the_words(monkeypatch):
    game = TextArena()
    game.begin_with(random.Random(0), 2)

    def broken(action):
        raise KeyError("board")

    monkeypatch.setattr(game.world, "step", broken)
    with pytest.raises(
        ConfigError, match=r"TicTacToe-v0 failed after .* '\[4\]' of player 0: .*KeyError: 'board'; this is"
    ):
        game.step({0: "[4]"})


@pytest.mark.parametrize("game", ["pettingzoo", "gymnasium"])
@pytest.mark.parametrize(("actions", "words"), [
    (["go left", "right"], r"actions: 'go left' cannot be read: .*give one word, such as go_left"),
    (["stop!", "right"], r"actions: 'stop!' cannot be read"),
    (["Rock", "rock"], r"actions: rock stands there twice"),
])  # fmt: skip
def test_names_of_actions_that_no_answer_can_say_are_refused_before_the_game(game, actions, words):
    with pytest.raises(ValueError, match=words):
        PlayGame(game, options={"actions": actions})
    if game == "pettingzoo" and actions[0] == "go left":
        PettingZoo(actions=actions, parse="played_games:last_digit")  # the user's function reads


class Echo(gymnasium.Env):
    """One word ends it."""

    action_space = gymnasium.spaces.Text(5)
    observation_space = gymnasium.spaces.Text(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action):
        return "bye", float(action == "hello"), True, False, {}


def test_moves_that_are_words_are_passed_on_and_cannot_be_replaced():
    gymnasium.register("maporl-test/Echo-v0", entry_point=Echo, disable_env_checker=True)
    options = {"env": "maporl-test/Echo-v0"}
    outcome, said = play(PlayGame("gymnasium", options=options), 1, lambda ask, rng: "hello")
    assert outcome == {"agent0": 1.0} and said[0].heard == "hello"
    assert play(PlayGame("gymnasium", options=options), 1, lambda ask, rng: "toolong")[0] == "illegal"
    with pytest.raises(ConfigError, match="replace needs listed moves"):
        play(PlayGame("gymnasium", options=options, after_illegal="replace"), 1, lambda ask, rng: "toolong")
