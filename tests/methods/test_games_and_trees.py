"""Games and trees through the trainer's own steps: who is paid for what, and that equal moves earn equal advantages."""

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from folders import ROOT
from played_games import by_worth, perfect
from scripted_training import played, recipe_values, route, rows, scripted_trainer

from maporl.advantages.batch import TurnBatch
from maporl.advantages.estimator import estimate
from maporl.environments.games import GAMES, Game
from maporl.errors import ConfigError
from maporl.protocols import PlayGame
from maporl.rewards.rules import RULES
from maporl.rollout.branching import BRANCHINGS
from maporl.validation.load import from_dict, load

AT_GRPO = ("at_grpo_shared", "at_grpo_roles")
PLAN_PATH = {"game": "plan_path", "options": {}, "prompt": "{observation}"}
CANDIDATES = {"group": 4}
ALL = {"post": []}
"""No group is left out, so that what all of them earn can be seen."""


def candidate(request):
    """The number of the rollout that speaks."""
    return int(request.label.rpartition(".")[2])


class Alternating:
    """Says the equally good moves of a state in turn."""

    def __init__(self):
        self.said = defaultdict(int)

    def __call__(self, request):
        best = by_worth(request)[1]
        state = (request.example.id, request.ask.tags["state"])
        self.said[state] += 1
        return best[self.said[state] % len(best)]


def planned(request):
    """A plan of path_plans that reaches the goal. The tool agent computes it by a program in every second state."""
    plan = route(request)
    if request.ask.agent == "tool" and len(plan) % 2:
        return f"```python\ndef plan():\n    return {plan}\n```"
    return f"Walk. #### {plan}"


# -- AT-GRPO: a candidate earns what it earned itself ------------------------------------------------------------------


@pytest.mark.parametrize("recipe", AT_GRPO)
@pytest.mark.parametrize("player", [perfect, Alternating()], ids=["perfect", "alternating"])
def test_equally_good_moves_earn_nothing_whichever_of_them_continues(recipe, player, tmp_path):
    got = rows(
        played(scripted_trainer(recipe_values(recipe, tmp_path, protocol=PLAN_PATH, branching=CANDIDATES), player))
    )
    assert len(got) > 20 and len({row.utterance.text for row in got}) > 1
    assert [row.advantage for row in got] == [0.0] * len(got)


@pytest.mark.parametrize("recipe", AT_GRPO)
def test_the_published_workload_pays_each_plan_that_arrives_and_the_planner_for_the_team_too(recipe, tmp_path):
    """Candidate 0 of each agent plans well and the others give no plan: 1 -2 -2 and 2 -2 -2.

    The half of the groups with the lower mean is left out. Of one policy for both agents it has all of the tool
    agent's.
    """
    values = recipe_values(recipe, tmp_path)
    assert values["protocol"]["options"] == {"size": 10, "blocked": 0.22, "rounds": 3}
    script = lambda request: planned(request) if candidate(request) == 0 else "#### nothing"  # noqa: E731
    batch = played(scripted_trainer(values, script))
    got = {(row.utterance.agent, row.utterance.rewards["env"], round(row.advantage, 3)) for row in rows(batch)}
    tool = {("tool", 1, 1.155), ("tool", -2, -0.577)} if recipe == "at_grpo_roles" else set()
    assert got == tool | {("planner", 2, 1.155), ("planner", -2, -0.577)}
    assert all(u.turn == 0 for d in batch.dialogues for u in d.utterances)  # every game was over after one round


# -- who is paid for an illegal move -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*AT_GRPO, "salt", "spa_rl"])
def test_a_partners_illegal_move_pays_nobody_in_plan_path(recipe, tmp_path):
    """The first player comes a step nearer in every candidate, and then the second one talks nonsense."""
    change = PLAN_PATH | {"after_illegal": "end", "options": {"size": 5, "limit": 8}}
    values = recipe_values(recipe, tmp_path, protocol=change, branching=CANDIDATES)
    first = next(iter(values["agents"]))
    batch = played(scripted_trainer(values, lambda r: perfect(r) if r.ask.agent == first else "nonsense"))
    own = [row for row in rows(batch) if row.utterance.agent == first]
    far = [d for d in batch.dialogues if d.outcome == "illegal"]
    assert {round(u.rewards["env"], 6) for d in far for u in d.utterances} == {0.1, -1.5}
    assert {round(row.utterance.rewards["env"], 6) for row in own} <= {0.1, 1.1}
    if recipe != "spa_rl":  # whose critic knows nothing yet
        assert [row.advantage for row in own] == [0.0] * len(own)


FINES = {
    "tictactoe": ("opposed", (-1.5, 0.5)),
    "kuhn_poker": ("opposed", (-1.5, 0.5)),
    "prisoners_dilemma": ("mixed", (-1.5, 0)),
    "plan_path": ("common", (-1.5, 0)),
    "path_plans": ("common", (-2, 0)),
    "sokoban": ("common", (-2, 0)),
    "sudoku": ("common", (-2, 0)),
    "signals": ("common", (-1.5, 0)),
    "exchange": ("common", (-1.5, 0)),
    "textarena": ("opposed", (-1.5, 0.5)),
    "pettingzoo": ("mixed", (-1.0, 0)),
    "gymnasium": ("common", (-1.5, 0)),
}
"""Whose interests meet, and what an illegal move pays its author and the others."""


@pytest.mark.parametrize("name", GAMES)
def test_every_game_and_its_page_say_what_an_illegal_move_pays(name):
    interests, fines = FINES[name]
    game = GAMES[name]()
    assert (game.interests, (game.illegal, game.illegal_others)) == (interests, fines)
    page = (ROOT / "docs/games.md").read_text().splitlines()
    (line,) = [line for line in page if line.startswith(f"| `{name}` | {interests} |")]
    assert f"| {fines[0]:g} | {fines[1]:g} |" in line


# -- games that go on after an illegal move ----------------------------------------------------------------------------


def test_advantage_alignment_survives_nonsense(tmp_path):
    """Of the moves, 5% are nonsense. Each game goes on with a random legal one, and both players make all moves."""
    rng = random.Random(0)
    script = lambda request: "what?" if rng.random() < 0.05 else rng.choice("AB")  # noqa: E731
    values = recipe_values("advantage_alignment", tmp_path, branching={"group": 8})
    values["protocol"]["options"] = {"rounds": 10, "divide": 5}
    values["schedule"] = {}
    batch = played(scripted_trainer(values, script))
    for dialogue in batch.dialogues:
        assert [u.agent for u in dialogue.utterances] == ["ann", "bob"] * 10
    assert len(rows(batch)) == 4 * 8 * 20
    wrong = [u for d in batch.dialogues for u in d.utterances if u.text == "what?"]
    assert wrong and {u.rewards["legal"] for u in wrong} == {0.0}
    assert all(-1.5 <= u.rewards["env"] <= -0.5 for u in wrong)  # the fine, and 0 to 1 for the round itself


def test_a_rollout_that_is_alone_in_its_round_earns_nothing():
    """The returns of three rollouts are 1, .5 and 0. Only the first of them has a second round."""
    config = replace(load("advantage_alignment").advantage, post=(), gamma=0.0)
    batch = TurnBatch(
        reward=[1, 0.5, 0, 3],
        seed=["s"] * 4,
        agent=["ann"] * 4,
        turn=[0, 0, 0, 1],
        rollout=[0, 1, 2, 0],
        order=[0, 0, 0, 1],
    )
    assert estimate(batch, config).tolist() == pytest.approx([0.75, 0, -0.75, 0])


def test_a_move_that_replaces_an_illegal_one_is_drawn_from_the_seed(tmp_path):
    game = {"after_illegal": "replace", "options": {"rounds": 6, "divide": 5}}
    values = recipe_values("advantage_alignment", tmp_path, protocol=game, branching={"group": 2})
    values["schedule"] = {}
    trainer = scripted_trainer(values, lambda request: "what?" if request.ask.agent == "ann" else "B")
    batch = played(trainer)
    outcomes = defaultdict(set)
    for d in batch.dialogues:
        outcomes[d.example.id].add(tuple(u.rewards["env"] for u in d.utterances))
    assert all(len(found) == 1 for found in outcomes.values())  # the same draws in all dialogues of a seed
    fines = {round(u.rewards["env"], 6) for d in batch.dialogues for u in d.utterances if u.agent == "ann"}
    assert fines == {-1.5, -1.3}  # -1.5 and 0 where A was drawn, 1/5 where B was
    with pytest.raises(ValueError, match="textarena lists no moves"):
        PlayGame("textarena", after_illegal="replace")


# -- SALT merges moves, and not spellings ------------------------------------------------------------------------------


def test_salt_merges_one_move_in_eight_wordings(tmp_path):
    wordings = ["R", "r", "I go R", "[R]", "right: R.", "So R!", "'R'", "R ."]
    moves = iter("UDLRUDLR" * 1000)

    def script(request):
        first = request.turn == 0 and request.ask.agent == "first"
        return wordings[candidate(request)] if first else next(moves)

    batch = played(scripted_trainer(recipe_values("salt", tmp_path, branching={"group": 8}), script))
    opening = [row for row in rows(batch) if row.utterance.order == 0]
    assert len(opening) == 4 * 8 and {row.utterance.text for row in opening} == set(wordings)
    assert max(abs(row.advantage) for row in opening) < 1e-6
    later = [row for row in rows(batch) if row.utterance.order > 0]
    assert max(abs(row.advantage) for row in later) > 0.5


def test_wordings_of_one_answer_are_one_action(tmp_path):
    said = itertools.cycle(["5", "05", "6", "2+3=5"])
    batch = played(scripted_trainer(recipe_values("grpo", tmp_path), lambda request: next(said)))
    actions = {(s.utterance.grade.answer, s.columns.values["action"]) for own in batch.samples.values() for s in own}
    assert {answer for answer, _ in actions} == {"5", "6"} and len(actions) == 2


# -- equal moves in equal states earn equal advantages -----------------------------------------------------------------


@dataclass
class TinyTree(Game):
    """A random game tree: what a move pays and whether it ends the game is drawn from the moves so far."""

    interests = "mixed"
    pays_every_move = True
    seed: int = 0
    together: bool = False
    longest = 2

    def reset(self, rng):
        self.start, self.history = rng.random(), ""

    def to_move(self):
        if len(self.history) >= 4 or (self.history and self._drawn("end").random() < 0.1):
            return ()
        return (0, 1) if self.together else (len(self.history) % 2,)

    def _drawn(self, what):
        return random.Random(f"{self.seed}/{self.start}/{self.history}/{what}")

    def observe(self, player):
        return self.history or "-"

    def moves(self, player):
        return ("a", "b", "c")

    def step(self, moves):
        self.history += "".join(moves.values())
        rng = self._drawn("pay")
        return {player: rng.choice([-1.0, 0.0, 0.5, 2.0]) for player in (0, 1)}

    def success(self, player):
        return self._drawn("won").random() < 0.5


LOOKS_AHEAD = {
    "team_mean": {}, "sum": {}, "last": {}, "zero_sum": {}, "back_propagate": {}, "tree_mean": {}, "public_goods": {},
    "tournament": {}, "mix": {"weights": {"callees/env": 0.5}}, "gate": {"order": ["callees/env"]},
    "tier": {"proximity": "callees/legal"}, "redistribute": {"by": "callees/env"}, "margin": {"beta": 0.5}, "quality": {"beta": 0.5},
    "prove": {}, "length_share": {}, "potential": {"of": "legal", "weight": 0.5},
}  # fmt: skip
OWN = {  # a cost per token charges for wordings, so here it is at its limit
    "own": {}, "complement": {"roles": ["player 1"]}, "mix": {"weights": {"legal": 0.5, "caller/env": 0.5}},
    "cost": {"most": 0.001}, "gate": {"order": ["env", "legal"]}, "tier": {"proximity": "legal"},
    "redistribute": {"by": "env", "grounding": "legal"}, "margin": {}, "quality": {},
    "convert": {}, "beyond_shown": {},
}  # fmt: skip
RETURNS = {"utterance": "mean", "reward_to_go": "mean", "tree": "mean", "turn_gae": "critic", "chain_gae": "critic"}
MAPORL = {
    "current, individual": {"horizon": "current", "share": "individual"},
    "last": {"horizon": "last"},
    "discounted sum": {"horizon": "discounted_sum"},
}


def tree_values(folder, branching, reward, returns="utterance", **options):
    """The values of AT-GRPO's recipe with a random tree game, this branching, this reward and this return."""
    values = recipe_values("at_grpo_shared", folder, branching={"how": branching, "group": 3})
    values["protocol"] = {"name": "game", "game": "tiny_tree", "options": options}
    values["reward"] = {"sources": {"env": 1.0}} | reward
    values["advantage"] = {
        "returns": returns, "baseline": RETURNS.get(returns, "critic"), "scale": "none", "key": ["prompt"],
    } | ({"singleton": "zero"} if returns in RETURNS else {})  # fmt: skip
    values["training"]["per_device_train_batch_size"] = 6
    return values


def of_equal_moves(batch, from_order=0):
    """The advantages of each set of equal joint moves in equal states, of two or more."""
    joint = {
        id(u): tuple(v.tags["action"] for v in d.utterances if v.order == u.order)
        for d in batch.dialogues
        for u in d.utterances
    }
    sets = defaultdict(list)
    for row in rows(batch):
        u = row.utterance
        if u.order >= from_order:
            sets[u.tags["seed"], u.order, u.tags["state"], u.agent, joint[id(u)]].append(row.advantage)
    return [found for found in sets.values() if len(found) > 1]


def spread(sets):
    return max(max(found) - min(found) for found in sets)


@pytest.fixture(autouse=True)
def tiny_tree(monkeypatch):
    monkeypatch.setitem(GAMES, "tiny_tree", TinyTree)


@pytest.mark.parametrize("rule", OWN)
@pytest.mark.parametrize("together", [False, True])
def test_candidates_of_a_tree_with_equal_moves_earn_the_same_under_every_rule(rule, together, tmp_path):
    values = tree_values(tmp_path, "tree", {"rules": [{rule: OWN[rule]}]}, together=together)
    rng = random.Random(rule)
    sets = of_equal_moves(played(scripted_trainer(values, lambda request: rng.choice(["a", "b", "c", "go a"]))))
    assert len(sets) > 5 and spread(sets) < 1e-6


@pytest.mark.parametrize("game", [name for name, kind in GAMES.items() if kind.pays_every_move])
@pytest.mark.parametrize("pick", ["best", "sample"])
def test_candidates_with_equal_moves_earn_the_same_in_every_game(game, pick, tmp_path):
    values = recipe_values("at_grpo_shared", tmp_path, branching={"group": 4, "pick": pick}, advantage=ALL)
    values["protocol"] = {"name": "game", "game": game}
    rng = random.Random(game)
    sets = of_equal_moves(
        played(scripted_trainer(values, lambda request: rng.choice([*request.ask.tags["moves"], "illegal"])))
    )
    assert len(sets) >= 2 and spread(sets) < 1e-6


@pytest.mark.parametrize("game", [n for n, kind in GAMES.items() if not kind.pays_every_move and kind.seats()[1] > 1])
def test_a_game_that_pays_only_at_its_end_has_no_candidates_to_compare(game, tmp_path):
    values = recipe_values("at_grpo_shared", tmp_path)
    values["protocol"] = {"name": "game", "game": game}
    with pytest.raises(ConfigError, match="tree compares answers at once, but protocol '"):
        from_dict(values)


REFUSED = {
    **{f"rule {name}": ({"rules": [{name: options}]}, "utterance") for name, options in LOOKS_AHEAD.items()},
    **{f"horizon {name}": (MAPORL[name], "utterance") for name in ("last", "discounted sum")},
    "share": ({"horizon": "current", "share": "all"}, "utterance"),
    "influence": (MAPORL["current, individual"] | {"bonus": {"alpha": [0, 0, 0, 1]}}, "utterance"),
    **{f"returns {name}": ({"rules": ["own"]}, name) for name in RETURNS if name != "utterance"},
    "returns token_chain_gae": ({"rules": ["own"]}, "token_chain_gae"),
    "returns bi_level_gae": ({"rules": ["own"]}, "bi_level_gae"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_looks_ahead_is_refused_where_only_one_candidate_has_a_future(case, tmp_path):
    reward, returns = REFUSED[case]
    with pytest.raises(
        ConfigError, match=r"(looks at what follows an answer|only some candidates have later turns).*how: independent"
    ):
        from_dict(tree_values(tmp_path, "tree", reward, returns))
    from_dict(tree_values(tmp_path, "fork_every", reward, returns))


@pytest.mark.parametrize("change", [{"unit": "rollout"}, {"post": ["opponent_shaping"]}, {"post": ["align"]}], ids=str)
def test_an_advantage_that_compares_turns_is_refused_there_too(change, tmp_path):
    values = tree_values(tmp_path, "tree", {"rules": ["own"]})
    values["advantage"] |= change
    with pytest.raises(ConfigError, match=r"looks at other turns, but with how: "):
        from_dict(values)


ELSEWHERE = {
    "inherit": "needs callers, which games do not have",
    "counterfactual": "needs ablations",
    "consistency": "needs a judge of steps, which a tree refuses",
    "readability": "needs the reward nll, which charges for wordings",
    "tree_margin": "needs attempts that mend others",
    "translate": "needs answers that were shown",
    "refute": "needs tests of programs",
    "short_and_right": "charges for wordings",
}


def test_every_rule_is_tried_or_has_a_reason_why_not():
    """A new rule gets a line in OWN if a credit depends on nothing that is said after it, or else in LOOKS_AHEAD."""
    assert set(RULES) == {*OWN, *LOOKS_AHEAD, *ELSEWHERE}


FORKS = [name for name, kind in BRANCHINGS.items() if not kind.final]
EARNED = [
    *((name, {"rules": [{name: options}]}, "utterance") for name, options in (OWN | LOOKS_AHEAD).items()),
    *((name, reward, "utterance") for name, reward in MAPORL.items()),
    *((name, {"rules": ["own"]}, name) for name in RETURNS),
]
"""Names, rewards and returns. A tournament breaks ties by the order of the dialogues, as ArenaRL does, so equals get
different ranks, and a share of the length charges for wordings."""
EARNED = [one for one in EARNED if one[0] not in ("tournament", "length_share")]


def varied_once(depth):
    """Players whose move is a function of the state, but for one step, in which it is random."""
    rng = random.Random(depth)

    def script(request):
        state = request.ask.tags["state"]
        drawn = rng if len(state.partition(": ")[2].strip("-")) == depth else random.Random(state)
        return drawn.choice(["a", "b", "c", "go a"])

    return script


@pytest.mark.parametrize(
    ("reward", "returns", "how"),
    [
        pytest.param(reward, returns, how, marks=pytest.mark.slow if n % 4 else (), id=f"{name}-{how}")
        for number, (name, reward, returns) in enumerate(EARNED)
        for n, how in enumerate(FORKS, number)
    ],
)
def test_equal_moves_with_equal_futures_earn_the_same_under_every_branching(reward, returns, how, tmp_path):
    """Of all pairs ``make test`` takes every fourth diagonal. So each value is in one of them."""
    trainer = scripted_trainer(tree_values(tmp_path, how, reward, returns), varied_once(1))
    sets = of_equal_moves(played(trainer), from_order=1)
    assert len(sets) >= 2 and spread(sets) < (1e-6 if returns == "utterance" else 1e-5)
