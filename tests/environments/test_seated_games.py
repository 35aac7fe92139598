"""Games for any number of seats: PettingZoo, Gymnasium, TextArena, and what follows an illegal move."""

import random
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from played_games import play

from maporl.engines.random_moves import RandomMoves, build
from maporl.environments.games import Game
from maporl.errors import ConfigError
from maporl.integrations.petting_zoo import PettingZoo
from maporl.integrations.spaces import in_words
from maporl.protocols.game import PlayGame
from maporl.runs.evaluate import evaluate
from maporl.runs.train import train
from maporl.types import Ask, Example
from maporl.validation.load import from_dict, load

pettingzoo = pytest.importorskip("pettingzoo")
gymnasium = pytest.importorskip("gymnasium")
if find_spec("textarena") is None:  # its import takes seconds, in each process that collects tests
    pytest.skip("needs the extra games", allow_module_level=True)


def anything(ask, rng):
    """A random legal move, or random brackets where the game does not list its moves."""
    moves = ask.tags["moves"]
    return rng.choice(moves) if moves else rng.choice(["[cooperate]", "[defect]", "[Bid: 1, 2]", "[Call]", "[0]", "hm"])


class Pay(pettingzoo.ParallelEnv):
    """Pays agents 1 a round.

    ``ends`` says whose flags are set after a round ("*": the key ``__all__``), ``shows`` who sees something.
    """

    metadata, possible_agents = {"name": "pay"}, ["a", "b"]

    def __init__(self, ends=None, removes=False, cut=False, extra=None, shows=None, pays=""):
        self.ends, self.removes, self.cut, self.extra, self.shows = ends or {}, removes, cut, extra, shows or {}
        self.pays = pays

    def observation_space(self, agent):
        return gymnasium.spaces.Discrete(9)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.round, self.over = list(self.possible_agents), 0, set()
        return dict.fromkeys(self.agents, 0), {}

    def step(self, actions):
        assert not self.over & set(actions)
        self.round += 1
        now = self.ends.get(self.round, "")
        self.over |= set(now)
        flags = {agent: agent in self.over for agent in self.agents} | ({"__all__": now == "*"} if self.extra else {})
        paid = dict.fromkeys([*actions, *self.pays], 1.0) | ({} if self.extra is None else {"__all__": self.extra})
        seen = dict.fromkeys(self.shows.get(self.round, self.agents), self.round)
        none = dict.fromkeys(self.agents, False)
        if self.removes:
            self.agents = [agent for agent in self.agents if not flags[agent] and now != "*"]
        return seen, paid, *((none, flags) if self.cut else (flags, none)), {}


class Turns(pettingzoo.AECEnv):
    """Two agents take turns, and each move pays both 1.

    After three moves both have ended, or ("stuck") a after one, or ("unequal", in which a moves twice) never.
    """

    metadata, possible_agents = {"name": "turns"}, ["a", "b"]

    def __init__(self, how):
        self.how = how

    def observation_space(self, agent):
        return gymnasium.spaces.Discrete(9)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def observe(self, agent):
        return 0

    def reset(self, seed=None, options=None):
        self.agents, self.made, self.agent_selection = list(self.possible_agents), 0, "a"
        self.terminations, self.truncations = dict.fromkeys("ab", False), dict.fromkeys("ab", False)
        self.rewards, self._cumulative_rewards = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
        self.infos = {"a": {}, "b": {}}

    def step(self, action):
        if action is None:
            return self._was_dead_step(action) if self.how == "removes" else None
        self.made += 1
        self.rewards = dict.fromkeys("ab", 1.0)
        over = {"removes": "ab", "keeps": "ab", "all": ["__all__"]}.get(self.how, "") if self.made == 3 else ""
        self.terminations |= dict.fromkeys("a" if self.how == "stuck" else over, True)
        order = "aab" if self.how == "unequal" else "ab"
        self.agent_selection = order[self.made % len(order)]


for api, kind in (("parallel", Pay), ("aec", Turns)):
    pettingzoo.register(api, f"mine/{kind.__name__}-v0", entry_point=kind)


def begun(api, kind, **options):
    """A game of ``kind`` for two that has begun."""
    game = PettingZoo(env=f"mine/{kind.__name__}-v0", api=api, options=options, longest=5)
    game.seated = 2
    game.reset(random.Random(0))
    return game


TEAMS = [
    ("pettingzoo", {"show": "board"}, 2),
    ("pettingzoo", {"env": "classic/connect_four-v3", "show": "board"}, 2),
    ("pettingzoo", {"env": "classic/rps-v2", "options": {"max_cycles": 4}}, 2),
    ("pettingzoo", {"env": "classic/rps-v2", "api": "parallel", "options": {"max_cycles": 4}}, 2),
    ("gymnasium", {"actions": ["left", "down", "right", "up"]}, 1),
    ("gymnasium", {"env": "Blackjack-v1"}, 1),
    ("textarena", {"env": "LiarsDice-v0"}, 4),
    ("textarena", {"env": "ThreePlayerIPD-v0"}, 3),
    ("textarena", {"env": "TicTacToe-v0"}, 2),
]


@pytest.mark.parametrize("count", [3, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("game", "options", "seats"), TEAMS, ids=lambda v: str(v)[:40])
def test_random_games_come_to_an_end(game, options, seats, count):
    for number in range(count):
        outcome, said = play(PlayGame(game, options=options), seats, anything, number)
        assert set(outcome) == {f"agent{i}" for i in range(seats)} and said
        for agent in {u.agent for u in said}:  # who has said nothing has no utterance to credit
            assert sum(u.rewards["env"] for u in said if u.agent == agent) == pytest.approx(outcome[agent])


def test_equal_seeds_play_equal_games_side_by_side_too():
    protocol = PlayGame("pettingzoo", options={"env": "classic/connect_four-v3"})
    alone = [play(protocol, 2, anything, number) for number in (1, 2)]
    assert [u.text for u in alone[0][1]] != [u.text for u in alone[1][1]]
    games = {
        number: (protocol.play(Example(f"e{number}", "", ""), ("agent0", "agent1")), random.Random(number))
        for number in (1, 2)
    }
    asks = {number: next(steps) for number, (steps, _) in games.items()}
    said = {1: [], 2: []}
    while asks:
        for number in list(asks):
            steps, rng = games[number]
            (ask,) = asks[number]
            one = SimpleNamespace(
                id=0, agent=ask.agent, text=anything(ask, rng), rewards={}, tags=dict(ask.tags), grade=None
            )
            said[number].append(one.text)
            try:
                asks[number] = steps.send([one])
            except StopIteration:
                del asks[number]
    assert [said[1], said[2]] == [[u.text for u in game] for _, game in alone]


class TestPettingZoo:
    @pytest.mark.parametrize("env", ["classic/tictactoe-v3", "classic/connect_four-v3", "classic/rps-v2"])
    def test_payments_are_the_sums_of_last(self, env):
        world = pettingzoo.make("aec", env)
        game = PettingZoo(env=env)
        game.begin_with(random.Random(5), 2)
        world.reset(seed=random.Random(5).randrange(2**31))
        rng, paid, theirs = random.Random(1), {0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}
        while game.to_move():
            (player,) = game.to_move()
            move = rng.choice(game.moves(player))
            for to, amount in game.step({player: move}).items():
                paid[to] += amount
            while True:  # the same moves in PettingZoo's own loop
                _, reward, ended, cut, _ = world.last()
                theirs[world.possible_agents.index(world.agent_selection)] += float(reward)
                if not (ended or cut):
                    world.step(int(move))
                    break
                world.step(None)
        while world.agents:
            _, reward, ended, cut, _ = world.last()
            theirs[world.possible_agents.index(world.agent_selection)] += float(reward)
            world.step(None)
        assert paid == theirs and any(paid.values())

    def test_a_board_is_shown_and_a_free_cell_is_a_move(self):
        game = PettingZoo(show="board")
        game.begin_with(random.Random(0), 2)
        assert game.observe(0) == "___/___/___" and game.seat(0) == "player_1" and game.moves(0) == tuple("012345678")
        game.step({0: "4"})
        assert (game.observe(1), game.observe(0)) == ("___/_O_/___", "___/_X_/___") and "4" not in game.moves(1)

    def test_an_illegal_move_pays_its_author_as_the_wrapper_of_pettingzoo_does(self):
        outcome, said = play(PlayGame("pettingzoo"), 2, lambda ask, rng: "4")
        assert outcome == "illegal" and [u.rewards["env"] for u in said] == [0, -1.0]
        world = pettingzoo.make("aec", "classic/tictactoe-v3")
        world.reset(seed=0)
        world.step(4)
        world.step(4)
        assert list(world.rewards.values()) == [0, -1.0]

    def test_parallel_players_are_asked_in_one_step_and_actions_have_names(self):
        options = {
            "env": "classic/rps-v2",
            "api": "parallel",
            "actions": ["rock", "paper", "scissors"],
            "options": {"max_cycles": 2},
        }
        lines = {"agent0": iter(["rock", "Scissors!"]), "agent1": iter(["paper", "paper"])}
        outcome, said = play(PlayGame("pettingzoo", options=options), 2, lambda ask, rng: next(lines[ask.agent]))
        assert [u.step for u in said[:2]] == [said[0].step] * 2 and said[2].step != said[0].step
        assert [u.rewards["env"] for u in said] == [-1, 1, 1, -1] and outcome == {"agent0": 0, "agent1": 0}

    @pytest.mark.parametrize(("options", "moves", "total"), [
        ({"ends": {3: "ab"}}, "ab ab ab", [3.0, 3.0]),
        ({"ends": {3: "ab"}, "removes": True}, "ab ab ab", [3.0, 3.0]),
        ({"ends": {3: "ab"}, "cut": True}, "ab ab ab", [3.0, 3.0]),
        ({"ends": {2: "*"}, "extra": 9.0}, "ab ab", [2.0, 2.0]),
        ({"ends": {2: "*"}, "cut": True, "extra": 9.0}, "ab ab", [2.0, 2.0]),
        ({"ends": {1: "a", 3: "b"}}, "ab b b", [1.0, 3.0]),
        ({"ends": {1: "a", 3: "b"}, "removes": True}, "ab b b", [1.0, 3.0]),
        ({"ends": {1: "b", 2: "*"}, "removes": True}, "ab a", [2.0, 1.0]),
        ({"shows": {2: "b"}, "ends": {3: "ab"}}, "ab ab b", [2.0, 3.0]),
        ({"shows": {2: ""}}, "ab ab", [2.0, 2.0]),
        ({}, "ab ab ab ab ab", [5.0, 5.0]),
    ])  # fmt: skip
    def test_agents_end_in_every_way_in_which_environments_say_so(self, options, moves, total):
        game = begun("parallel", Pay, **options)
        made = []
        while movers := game.to_move():
            game.step(dict.fromkeys(movers, "0"))
            made.append("".join("ab"[player] for player in movers))
        assert " ".join(made) == moves and list(game.total.values()) == total

    @pytest.mark.parametrize(("how", "moves"), [
        ("removes", [0, 1, 0]),
        ("keeps", [0, 1, 0]),
        ("all", [0, 1, 0]),
        ("unequal", [0, 0, 1, 0, 0, 1, 0]),  # nobody moves more than five times
    ])  # fmt: skip
    def test_a_game_of_turns_ends_by_flags_or_at_its_limit(self, how, moves):
        game = begun("aec", Turns, how=how)
        made = []
        while movers := game.to_move():
            game.step(dict.fromkeys(movers, "0"))
            made += movers
        assert made == moves and list(game.total.values()) == [len(moves)] * 2

    def test_a_payment_to_nobody_is_named(self):
        game = begun("parallel", Pay, pays="c")
        with pytest.raises(ConfigError, match=r"Pay-v0 pays 1.0 to 'c'; expected one of its possible_agents, a, b"):
            game.step({0: "0", 1: "0"})

    def test_an_environment_that_never_lets_an_agent_go_is_named(self):
        game = begun("aec", Turns, how="stuck")
        game.step({0: "0"})
        with pytest.raises(ConfigError, match=r"mine/Turns-v0 selects 'a', which has ended, and leaves it among its"):
            game.step({1: "0"})

    def test_functions_of_the_user_show_and_read(self):
        options = {"show": "played_games:cells", "parse": "played_games:last_digit"}
        lines = iter(["I take 4.", "4? No: 5", "nothing"])
        outcome, said = play(PlayGame("pettingzoo", options=options), 2, lambda ask, rng: next(lines))
        assert [u.heard for u in said] == ["player_1: 9 free", "player_2: 8 free", "player_1: 7 free"]
        assert outcome == "illegal" and [u.rewards["legal"] for u in said] == [1, 1, 0]

    def test_a_function_that_does_not_fit_is_refused_before_the_game(self):
        with pytest.raises(ValueError, match=r"expected a function of \(observation, agent\)"):
            PlayGame("pettingzoo", options={"show": "random:random"})


class TestGymnasium:
    def test_the_drawing_is_shown_with_the_place_in_brackets(self):
        protocol = PlayGame(
            "gymnasium", options={"actions": ["left", "down", "right", "up"], "options": {"is_slippery": False}}
        )
        way = iter(["down", "down", "right", "right", "down", "right"])
        outcome, said = play(protocol, 1, lambda ask, rng: next(way))
        assert said[0].heard == "[S]FFF\nFHFH\nFFFH\nHFFG" and said[1].heard == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
        assert (
            outcome == {"agent0": 1.0} and said[-1].grade.correct and [u.rewards["env"] for u in said] == [0] * 5 + [1]
        )

    def test_masks_say_what_is_legal(self):
        newest = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
        _, said = play(PlayGame("gymnasium", options={"env": newest, "longest": 3}), 1, anything)
        assert set(said[0].tags["moves"]) < set("012345") and len(said) == 3


@pytest.mark.parametrize(("game", "options", "count", "words"), [
    ("pettingzoo", {"env": "classic/nothing-v1"}, 2, "options.env: 'classic/nothing-v1' cannot be made with api aec"),
    ("pettingzoo", {}, 3, "classic/tictactoe-v3 has 2 seats, player_1, player_2, but 3 agents play"),
    ("pettingzoo", {"actions": ["a", "b"]}, 2, "actions: expected 9 names, got 2"),
    ("pettingzoo", {"show": "played_games:broken"}, 2, r"show: played_games:broken failed: .*played_games.py, line \d+: KeyError"),
    ("pettingzoo", {"show": "played_games:number"}, 2, "show: played_games:number returned 3, expected a text"),
    ("gymnasium", {"env": "Nope-v1"}, 1, "game gymnasium: options.env: 'Nope-v1' cannot be made"),
    # parse is an option of PettingZoo's games alone
    ("gymnasium", {"env": "Pendulum-v1"}, 1, "^(?!.*parse).*only Discrete and Text spaces have words; give another env, or"),
    ("textarena", {}, 3, "'TicTacToe-v0' cannot begin for 3 players: AssertionError: The number of players has to be 2"),
    ("textarena", {}, 1, r"textarena has 2 to 15 players but agents are \['agent0'\]"),
])  # fmt: skip
def test_what_cannot_be_played_is_one_clear_error(game, options, count, words):
    with pytest.raises(ValueError, match=words):
        play(PlayGame(game, options=options), count, anything)


# -- what follows an illegal move --------------------------------------------------------------------------------------


def test_a_player_is_asked_again_and_fined():
    lines = iter(["no", "perhaps", "4", "5", "x", "y", "z"])
    outcome, said = play(PlayGame("pettingzoo", after_illegal="retry"), 2, lambda ask, rng: next(lines))
    assert [u.agent for u in said] == ["agent0"] * 3 + ["agent1"] + ["agent0"] * 3 and outcome == "illegal"
    assert [u.rewards["env"] for u in said] == [-1, -1, 0, 0, -1, -1, -1]
    assert said[1].heard.startswith("You said: no\nThat was not a legal move. 0 0\n")
    assert PlayGame("pettingzoo", after_illegal="retry").turns == 300


def test_only_the_players_at_fault_are_asked_again():
    options = {"env": "classic/rps-v2", "api": "parallel", "options": {"max_cycles": 1}}
    lines = {"agent0": iter(["0"]), "agent1": iter(["stone", "1"])}
    outcome, said = play(
        PlayGame("pettingzoo", options=options, after_illegal="retry"), 2, lambda ask, rng: next(lines[ask.agent])
    )
    assert [u.agent for u in said] == ["agent0", "agent1", "agent1"] and outcome == {"agent0": -1, "agent1": 0}
    assert [u.rewards["env"] for u in said] == [-1, -1, 1]


def test_a_player_may_pass_where_the_game_has_passing():
    protocol = PlayGame("plan_path", after_illegal="skip", illegal=-0.5)
    outcome, said = play(protocol, 2, lambda ask, rng: "pass" if ask.agent == "agent0" else rng.choice("UDLR"), 3)
    assert [u.rewards["env"] <= -0.5 for u in said if u.agent == "agent0"] == [True] * sum(
        u.agent == "agent0" for u in said
    )
    assert outcome != "illegal" and len(said) > 2
    with pytest.raises(ValueError, match="after_illegal: nobody can pass in tictactoe"):
        PlayGame("tictactoe", after_illegal="skip")


@dataclass
class Auction(Game):
    """Two to four players bid once, at the same time.

    Payments: the end pays the highest bidder 1, and each bid costs a tenth.
    """

    players = (2, 4)
    longest = 1

    def reset(self, rng):
        self.bids = {}

    def seat(self, player):
        return f"bidder {player + 1} of {self.seated}"

    def to_move(self):
        return () if self.bids else tuple(range(self.seated))

    def observe(self, player):
        return "bid"

    def moves(self, player):
        return ("1", "2", "3")

    def step(self, moves):
        self.bids = {player: int(move) for player, move in moves.items()}
        return {player: -0.1 * bid for player, bid in self.bids.items()}

    def outcome(self):
        best = max(self.bids, key=lambda player: self.bids[player])
        return {best: 1.0}

    def success(self, player):
        return self.bids[player] == max(self.bids.values())


def test_a_game_of_ones_own_for_several_players_pays_at_its_end():
    protocol = PlayGame("test_seated_games:Auction")
    outcome, said = play(protocol, 3, lambda ask, rng: {"agent0": "1", "agent1": "3", "agent2": "2"}[ask.agent])
    assert outcome == pytest.approx({"agent0": -0.1, "agent1": 0.7, "agent2": -0.2})
    assert [u.role for u in said] == ["bidder 1 of 3", "bidder 2 of 3", "bidder 3 of 3"]
    for count in (1, 5):
        with pytest.raises(ValueError, match="has 2 to 4 players but agents are"):
            play(protocol, count, anything)


def test_a_team_of_another_size_is_refused_when_its_configuration_is_read():
    agents = {name: {"tiny": {}} for name in ("ann", "bob", "cid")}
    values = {"output_dir": "x", "task": {"name": "episodes"}, "agents": agents}
    values |= {"protocol": {"name": "game", "game": "tictactoe"}, "reward": {"sources": {"env": 1.0}, "rules": ["own"]}}
    with pytest.raises(ConfigError, match=r"tictactoe has 2 players but agents are \['ann', 'bob', 'cid'\]"):
        from_dict(values)


def test_observations_are_printed_by_rows():
    import numpy as np

    assert in_words({"observation": np.array([[1, 2], [3, 4]]), "action_mask": np.ones(2)}) == "1 2\n3 4"
    assert in_words((1, np.int64(5), True)) == "1, 5, True" and in_words({"a": 1, "b": "x"}) == "a: 1\nb: x"
    assert in_words("\x1b[41mS\x1b[0mFF") == "[S]FF"


# -- recipes and a fixed opponent --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), [("marshal_pettingzoo", "marshal"), ("spiral_textarena", "spiral")])
def test_the_recipes_of_foreign_games_have_the_methods_of_those_they_extend(name, method):
    foreign, own = load(name), load(method)
    for section in ("advantage", "reward", "branching", "schedule", "agents", "updates", "training", "ppo"):
        assert getattr(foreign, section) == getattr(own, section), section
    for key in ("memory", "illegal", "illegal_others"):
        assert foreign.protocol.get(key) == own.protocol.get(key)


def test_an_engine_makes_random_legal_moves_of_its_place_in_the_run():
    engine = RandomMoves({"cid": ["A"]})
    asks = [
        Ask("ann", [], tags={"moves": ["1", "2", "3"]}),
        Ask("cid", [], tags={"moves": ["B"]}),
        Ask("bob", [], taught=("x",)),
    ]
    requests = [[SimpleNamespace(ask=ask, rng_key=(seed, 0, 1)) for ask in asks] for seed in range(40)]
    said = [[reply.text for reply in engine.generate(row, None)] for row in requests]
    assert {row[0] for row in said} == {"1", "2", "3"} and {tuple(row[1:]) for row in said} == {("A", "x")}
    assert said == [[reply.text for reply in engine.generate(row, None)] for row in requests]
    with pytest.raises(ConfigError, match=r"agents.bob.engine: random makes legal moves of games, and none are listed"):
        engine.generate([SimpleNamespace(ask=Ask("bob", []), rng_key=None)], None)
    for options in ({"move": ["A"]}, {"moves": []}, {"moves": "AB"}, {"moves": [1]}):
        with pytest.raises(ConfigError, match=r"engine_options: expected \{moves: \[A, B\]\}, got"):
            build(SimpleNamespace(options={"bob": options}))


@pytest.mark.slow
def test_a_trained_player_meets_random_moves(tmp_path):
    values = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "episodes"}, "updates": 1,
        "agents": {"first": {"policy": "shared"}, "second": {"policy": "shared"}},
        "agent_defaults": {"tiny": {"alphabet": "XO_/ 0123456789", "hidden_size": 32, "layers": 1}},
        "protocol": {"name": "game", "game": "pettingzoo", "options": {"show": "board"}, "prompt": "{observation} "},
        "reward": {"sources": {"env": 1.0}, "rules": ["own"]}, "warm_start": {"steps": 10}, "ppo": {"response_length": 2},
        "training": {"per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 0}, "evaluation": {"questions": 4},
    }  # fmt: skip
    train(from_dict(values), resume=False, quiet=True)
    path = tmp_path / "run/config.yaml"
    found = {}
    for seat in ("first", "second"):
        against = load(str(path), [f"agents.{seat}.engine=random", f"agents.{seat}.policy=null"])
        found[seat] = evaluate(against, tmp_path / "run/final")
        assert found[seat].questions == 4 and not found[seat].baselines
    assert found["first"] != found["second"]
