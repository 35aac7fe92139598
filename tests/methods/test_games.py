"""Games by their rules, against exact values where there are any."""

import contextlib
import random
import time
from itertools import combinations

import pytest
from played_games import full_grids, shortest

from maporl.environments.games import (
    GAMES,
    Exchange,
    IllegalMove,
    KuhnPoker,
    PathPlans,
    PlanPath,
    PrisonersDilemma,
    Signals,
    Sokoban,
    Sudoku,
    TicTacToe,
)
from maporl.methods.games.plan_path import distances
from maporl.methods.games.sokoban import level, solvable


def begun(game, seed=0):
    game.reset(random.Random(seed))
    return game


@pytest.mark.parametrize("name", [n for n in GAMES if n != "textarena"])
def test_every_game_ends_within_its_longest_whatever_legal_moves_are_made(name):
    for seed in range(40):
        rng, game = random.Random(seed), GAMES[name]()
        game.reset(random.Random(f"x/{seed}"))
        made = dict.fromkeys(range(game.seated or game.seats()[0]), 0)
        paid = dict.fromkeys(made, 0.0)
        while movers := game.to_move():
            moves = {}
            for player in movers:
                assert game.observe(player)
                moves[player] = game.read(player, f"I choose <{rng.choice(game.moves(player))}>.")
                made[player] += 1
            for player, amount in game.step(moves).items():
                paid[player] += amount
        assert max(made.values()) <= game.longest
        assert all(game.success(player) in (True, False) for player in paid)
        if name in ("tictactoe", "kuhn_poker"):
            assert sum(paid.values()) == 0
        again = GAMES[name]()
        again.reset(random.Random(f"x/{seed}"))
        other = GAMES[name]()
        other.reset(random.Random(f"x/{seed}"))
        assert again.observe(again.to_move()[0]) == other.observe(other.to_move()[0])


def test_tictactoe_by_hand():
    game = begun(TicTacToe())
    assert game.observe(0) == "X ___/___/___" and game.to_move() == (0,)
    for player, move in zip((0, 1, 0, 1), "1425", strict=True):
        assert game.step({player: move}) == {}
    assert game.observe(0) == "X XX_/OO_/___" and game.moves(0) == ("3", "6", "7", "8", "9")
    with pytest.raises(IllegalMove, match="'4' is not a legal move; legal are 3, 6, 7, 8, 9"):
        game.read(0, "4")
    assert game.step({0: "3"}) == {0: 1.0, 1: -1.0}
    assert game.to_move() == () and game.success(0) and not game.success(1)


LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def exact_values():
    """What every reachable board of noughts and crosses is worth to X: plain minimax, which knows nothing of the game's
    code."""
    known = {}

    def value(board, player, other):
        if board not in known:
            if any(board[a] == board[b] == board[c] == other for a, b, c in LINES):
                known[board] = 1.0 if other == "X" else -1.0
            else:
                after = [value(board[:i] + player + board[i + 1 :], other, player) for i in range(9) if board[i] == "_"]
                known[board] = (max if player == "X" else min)(after, default=0.0)
        return known[board]

    value("_" * 9, "X", "O")
    return known


def test_tictactoe_agrees_with_the_exact_values_of_every_reachable_board():
    seen: dict[str, float] = {}

    def value(board: tuple[str, ...]) -> float:
        game = TicTacToe()
        game.board = list(board)
        name = "".join(board)
        if name in seen:
            return seen[name]
        movers = game.to_move()
        if not movers:
            seen[name] = {"X": 1.0, "O": -1.0, None: 0.0}[game.winner()]
        else:
            player = movers[0]
            after = []
            for move in game.moves(player):
                game.board = list(board)
                game.step({player: move})
                after.append(value(tuple(game.board)))
            seen[name] = (max, min)[player](after)
        return seen[name]

    assert value(tuple("_" * 9)) == 0
    assert len(seen) == 5478 and seen == exact_values()


def test_kuhn_poker_pays_the_pot():
    paid = {}
    for history in ("pp", "bp", "bb", "pbp", "pbb"):
        game = begun(KuhnPoker())
        game.cards = ["K", "J"]
        for number, move in enumerate(history):
            last = game.step({number % 2: move})
        paid[history] = last[0]
    assert paid == {"pp": 1, "bp": 1, "bb": 2, "pbp": -1, "pbb": 2}


def test_the_prisoners_dilemma_pays_and_shows_both():
    game = begun(PrisonersDilemma(rounds=2))
    assert game.to_move() == (0, 1) and game.observe(0) == "-"
    assert game.step({0: "A", 1: "B"}) == {0: 0.0, 1: 1.0}
    assert (game.observe(0), game.observe(1)) == ("AB", "BA")
    assert game.step({0: "A", 1: "A"}) == {0: 0.6, 1: 0.6}
    assert game.to_move() == () and game.success(0)


def test_plan_path_pays_arriving_and_coming_nearer():
    game = begun(PlanPath(size=3, walls=0, limit=4))
    game.token, game.goal = (0, 0), (0, 2)
    game.far = distances(game.goal, game.free)
    assert game.observe(0) == "A_G/___/___"
    assert game.step({0: "U"}) == {0: 0.0, 1: 0.0}  # off the grid
    assert game.step({1: "R"}) == {0: 0.1, 1: 0.1}
    assert game.step({0: "R"}) == {0: 1.1, 1: 1.1} and game.success(1) and game.to_move() == ()


@pytest.mark.parametrize("text", ["```" + "\n" * 60_000, "```python" + " \n" * 30_000, "U " * 60_000, "```\n" * 20_001])
def test_no_text_takes_long_to_read_as_a_plan(text):
    started = time.perf_counter()
    game = begun(PathPlans())
    with contextlib.suppress(IllegalMove):
        game.read(0, text)
    assert time.perf_counter() - started < 2


def test_path_plans_try_the_proposal_on_a_copy_and_walk_the_planners_plan():
    game = begun(PathPlans(size=3, blocked=0, rounds=2))
    game.state, game.goal = (0, 0), (0, 2)
    assert game.observe(0) == "S.G\n...\n..." and game.to_move() == (0,)
    program = "So:\n```python\ndef plan():\n    return ['R'] * 5\n```"
    assert game.read(0, program) == "R R R R R"
    assert game.step({0: "R R R R R"}) == {0: 1.0}  # a plan ends at the goal
    assert game.state == (0, 0) and game.observe(1) == "S.G\n...\n...\nProposed plan: R R R R R"
    assert game.step({1: game.read(1, 'Down first. #### ["D", "R", "U"]')}) == {0: 0.0, 1: 0.0}
    assert game.state == (0, 1) and game.to_move() == (0,)  # where the plan led
    assert game.step({0: "U"}) == {0: 0.0}  # off the grid
    assert game.step({1: game.instead(1, random.Random(0))}) == {0: 0.0, 1: 0.0}
    assert game.to_move() == () and not game.success(0)


@pytest.mark.parametrize(("player", "text"), [
    (0, "```python\nimport os\ndef plan():\n    return os.listdir()\n```"),
    (0, "```python\ndef plan():\n    while True: pass\n```"),
    (0, "```python\ndef plan():\n    return 'RR'\n```"),
    (0, "no plan"),
    (0, "```python\ndef plan():\n    return ['R'] * 257\n```"),  # the planner's prompt could not hold it
    (1, "```python\ndef plan():\n    return way\n```"),  # only the tool agent has the tool
    (1, "#### []"),
])  # fmt: skip
def test_a_text_without_a_plan_is_illegal(player, text):
    game = begun(PathPlans())
    with pytest.raises(IllegalMove, match="gives no plan; expected a list of U, D, L, R"):
        game.read(player, text)


@pytest.mark.parametrize(("code", "taught"), [(False, ("1", "2", "3")), (True, ("2",))])
def test_a_guesser_of_signals_is_taught_a_code_if_there_is_one(code, taught):
    game = begun(Signals(states=3, code=code))
    assert game.taught(0) == ("a", "b", "c")
    game.step({0: "b"})
    assert game.taught(1) == taught


def test_signals_hide_the_state_from_the_guesser():
    game = begun(Signals(states=3))
    game.state = 1
    assert game.observe(0) == "2" and game.moves(0) == ("a", "b", "c")
    assert game.step({0: "c"}) == {}
    assert game.observe(1) == "c" and game.moves(1) == ("1", "2", "3")
    assert game.step({1: "2"}) == {0: 1.0, 1: 1.0} and game.success(0)


def test_an_exchange_pays_the_guesses_that_the_others_letters_make_possible():
    game = begun(Exchange(states=3))
    game.numbers = [1, 2]
    assert [game.observe(player) for player in (0, 1)] == ["2", "3"] and game.moves(0) == ("a", "b", "c")
    assert game.taught(0) == ("a", "b", "c")  # any letter
    assert game.step({0: "b", 1: "a"}) == {} and game.to_move() == (0, 1)
    assert [game.observe(player) for player in (0, 1)] == ["a", "b"] and game.moves(0) == ("1", "2", "3")
    assert [game.taught(player) for player in (0, 1)] == [("1",), ("2",)]  # what the code has for the letter
    assert game.step({0: "1", 1: "2"}) == {0: 0.0, 1: 1.0} and game.to_move() == ()
    assert [game.success(player) for player in (0, 1)] == [False, True]


@pytest.mark.parametrize(("kind", "options", "message"), [
    (PlanPath, {"walls": 15}, "walls: expected at most 14, beside start and goal, got 15"),
    (PrisonersDilemma, {"rounds": 0}, "rounds: expected a whole number of at least 1, got 0"),
    (Exchange, {"states": 10}, "states: expected a whole number of at least 2 and at most 9, got 10"),
    (PathPlans, {"blocked": 0.9}, "blocked: expected a number of at least 0 and at most 0.5, got 0.9"),
    (Sokoban, {"boxes": 3}, "boxes: expected 1 or 2, got 3"),
    (Sudoku, {"empty": 12}, "empty: expected a whole number of at least 1 and at most 11, got 12"),
])  # fmt: skip
def test_games_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


# -- puzzles that are solved by plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"boxes": 2}, {"size": 7, "walls": 0.3}, {"size": 5, "boxes": 2, "walls": 0}], ids=str
)
def test_every_level_of_sokoban_can_be_solved_and_solving_it_pays_one_and_the_way(options):
    levels = set()
    for seed in range(30):
        game = begun(Sokoban(**options), seed)
        player, boxes = game.state
        assert len(boxes) == len(game.goals) == game.boxes and not boxes & game.goals and player not in boxes
        plan = shortest(game.state, game.free, game.goals)
        assert plan
        way = sum(min(abs(r - a) + abs(c - b) for a, b in game.goals) for r, c in boxes)
        levels.add(game.observe(0))
        assert game.step({0: " ".join(plan)}) == pytest.approx({0: 1 + 0.1 * way}) and game.state == (player, boxes)
        assert game.step({1: " ".join(plan)}) == pytest.approx({0: 1 + 0.1 * way, 1: 2 + 0.2 * way})
        assert game.success(0) and game.to_move() == ()
        again = begun(Sokoban(**options), seed)
        level.cache_clear()
        assert begun(Sokoban(**options), seed).state == again.state == (player, boxes)
    assert len(levels) > 25


def test_the_search_backwards_finds_exactly_the_levels_that_a_search_forwards_can_solve():
    free = frozenset((r, c) for r in range(1, 5) for c in range(1, 5)) - {(2, 2)}
    for goals in (frozenset({(1, 1)}), frozenset({(3, 3), (4, 1)})):
        far = solvable(free, goals)
        for boxes in combinations(sorted(free), len(goals)):
            for player in sorted(free - set(boxes)):
                state = (player, frozenset(boxes))
                plan = shortest(state, free, goals)
                assert far.get(state) == (None if plan is None else len(plan))


def test_sokoban_by_hand():
    game = begun(Sokoban(size=5))
    game.free = frozenset((r, c) for r in range(1, 4) for c in range(1, 4))
    game.goals, game.state = frozenset({(2, 3)}), ((2, 1), frozenset({(2, 2)}))
    assert game.observe(0) == "#####\n#   #\n#@$.#\n#   #\n#####"
    assert game.step({0: game.read(0, "```python\ndef plan():\n    return ['R', 'R']\n```")}) == pytest.approx({0: 1.1})
    assert game.observe(1) == "#####\n#   #\n#@$.#\n#   #\n#####\nProposed plan: R R"
    away = game.step({1: game.read(1, "Around. #### DRU")})  # up, away from the goal
    assert away == pytest.approx({0: -0.1, 1: -0.2})
    assert game.observe(0) == "#####\n# $ #\n# @.#\n#   #\n#####"
    assert game.step({0: "U R"}) == pytest.approx({0: 0})  # a box at the wall is not pushed
    assert game.step({1: "R"}) == pytest.approx({0: 0, 1: 0}) and game.observe(0).splitlines()[2] == "#  +#"


def test_every_sudoku_has_one_solution_and_filling_it_in_pays():
    grids = list(full_grids())
    assert len(grids) == 288
    puzzles = set()
    for seed in range(60):
        game = begun(Sudoku(empty=1 + seed % 11), seed)
        assert game.state.count(0) == game.empty and begun(Sudoku(empty=game.empty), seed).state == game.state
        fitting = [g for g in grids if all(n in (0, m) for n, m in zip(game.state, g, strict=True))]
        (solution,) = fitting
        missing = [str(m) for n, m in zip(game.state, solution, strict=True) if not n]
        whole = str([list(solution[i : i + 4]) for i in (0, 4, 8, 12)])
        assert game.step({0: game.read(0, " ".join(missing))}) == {0: 1.0} and game.state.count(0) == game.empty
        assert game.step({1: game.read(1, f"So #### {whole}")}) == {0: 1.0, 1: 2.0}
        assert game.state == solution and game.success(1) and game.to_move() == ()
        puzzles.add(game.given)
    assert len(puzzles) > 50


def test_sudoku_takes_out_what_clashes_and_keeps_what_is_given():
    game = begun(Sudoku())
    game.given = game.state = (1, 0, 0, 4, 0, 0, 1, 0, 0, 4, 0, 0, 4, 0, 0, 1)
    assert game.observe(0) == "1 . . 4\n. . 1 .\n. 4 . .\n4 . . 1"
    assert game.step({0: "2"}) == {0: 0.0}
    clash = game.step({1: "2 2 3"})  # both 2 stand in the first row; 3 is the first of the second row
    assert clash == {0: 0.0, 1: 0.0}
    assert game.observe(0) == "1 . . 4\n3 . 1 .\n. 4 . .\n4 . . 1"
    game.step({0: ""})  # and then the given 1 stays, and the new 3 is right; every other 2 clashes
    game.step({1: "4 2 3 4 2 2 2 2 2 2 2 2 2 2 2 2"})
    assert game.observe(0) == "1 . 3 4\n. . 1 .\n. 4 . .\n4 . . 1"
    with pytest.raises(IllegalMove, match="gives no plan; expected a list of 1, 2, 3, 4"):
        game.read(0, "```python\ndef plan():\n    return [[5, 1]]\n```")
