"""Games of TextArena: what players are shown, and that games do not share a generator. Needs the package textarena."""

import random

import pytest

from maporl.integrations.text_arena import TextArena
from maporl.protocols.game import PlayGame
from maporl.types import Example

pytest.importorskip("textarena")


def begun(env: str, seed: int) -> TextArena:
    game = TextArena(env=env)
    game.reset(random.Random(seed))
    return game


@pytest.mark.parametrize("env", ["TicTacToe-v0", "TicTacToe-v0-raw"])
def test_the_story_has_senders_and_the_news_only_what_is_new(env):
    game = begun(env, 3)
    assert game.to_move() == (0,)
    assert game.observe(0).startswith("[GAME] You are Player 0 in Tic Tac Toe.\n")
    game.step({0: game.read(0, "4")})
    assert "[Player 0] [4]\n[GAME] Player 0 placed their symbol (O) in cell 4." in game.observe(1)
    game.step({1: "[0]"})
    news = game.news(0)
    assert news.startswith("[GAME] Player 0 placed their symbol (O) in cell 4.\n")
    assert "[Player 1] [0]\n[GAME] Player 1 placed their symbol (X) in cell 0.\n" in news
    assert "You are Player 0" not in news and "[Player 0]" not in news
    assert "You are Player 0" in game.observe(0) and "[Player 0] [4]" in game.observe(0)
    assert "ObservationType" not in game.observe(0) + game.observe(1)


@pytest.mark.parametrize(
    ("text", "move"), [(" 4 ", "[4]"), ("[4]", "[4]"), ("I take [4].", "I take [4]."), ("4]", "4]")]
)
def test_a_move_without_brackets_is_put_into_brackets(text, move):
    assert TextArena().read(0, text) == move


def test_with_memory_the_protocol_shows_the_news():
    shown = {}
    for memory in (True, False):
        protocol = PlayGame("textarena", memory=memory)
        game = protocol.new_game()
        game.reset(random.Random(3))
        game.step({0: "[4]"})
        game.step({1: "[0]"})
        shown[memory] = protocol._ask(game, "ann", 0, "x").messages[0]["content"]
    assert "You are Player 0" not in shown[True] and "You are Player 0" in shown[False]
    assert next(PlayGame("textarena").play(Example("1", "", ""), ("ann", "bob")))[0].agent == "ann"


@pytest.mark.parametrize("env", ["KuhnPoker-v0", "LiarsDice-v0"])
def test_games_side_by_side_equal_the_same_games_alone(env):
    moves = ["[check]", "[bet]", "[call]", "[fold]"] if env == "KuhnPoker-v0" else ["[Bid: 1, 2]", "[Call]"]

    def advance(game: TextArena, at: int) -> str:
        if game.to_move():
            game.step({game.player: moves[at % len(moves)]})
        return game.observe(game.player)

    def alone(seed: int) -> list[str]:
        game = begun(env, seed)
        return [advance(game, at) for at in range(12)]

    first, second = begun(env, 3), begun(env, 4)
    both = [(advance(first, at), advance(second, at)) for at in range(12)]
    assert [a for a, _ in both] == alone(3)
    assert [b for _, b in both] == alone(4)
    assert alone(3) != alone(4)


def test_the_generator_of_the_process_stays_as_it_was():
    before = random.getstate()
    game = begun("KuhnPoker-v0", 3)
    game.step({0: "[check]"})
    assert random.getstate() == before
