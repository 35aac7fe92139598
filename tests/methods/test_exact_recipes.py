"""A card that says "exact" has numbers that are pinned through the trainer's own steps, or through those of a loop."""

import ast
from collections import Counter, defaultdict
from functools import cache

import pytest
from folders import SUPPORT, file_of
from scripted_training import STEPS, grid_of, played, recipe_values, rows, sampled, scripted_trainer, shown, step_to

from maporl.config.recipes import card_of, recipe_files
from maporl.loops.plan import stages_of
from maporl.validation.load import from_dict

DRIVERS = {"scripted_trainer", "build_trainer", "MultiAgentPPOTrainer", "sampled", "run_loop", "Loop", "Perturbed"}
"""What builds a trainer or a loop."""


@cache
def names_in(file):
    """By function of a test file, and of what it shares with others, the names that it uses."""
    tree = ast.parse(file.read_text())
    shared = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)} & {
        p.stem for p in SUPPORT.glob("*.py")
    }
    trees = [tree, *(ast.parse((SUPPORT / f"{name}.py").read_text()) for name in shared)]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name: {node.id for node in ast.walk(f) if isinstance(node, ast.Name)} for f in functions}


def drives(test):
    """Whether a test builds a trainer or a loop, by itself or by a function or fixture of its file or of
    tests/support."""
    functions, seen, left = names_in(file_of(test)), set(), [test]
    while left:
        name = left.pop()
        seen.add(name)
        if functions.get(name, set()) & DRIVERS:
            return True
        left += [used for used in functions.get(name, ()) if used in functions and used not in seen]
    return False


@pytest.mark.parametrize("name", recipe_files())
def test_an_exact_card_is_pinned_through_the_trainer(name):
    card = card_of(name)
    driving = [test for test in card.checked_by if drives(test)]
    assert driving or card.status != "exact", f"{name}: none of {card.checked_by} builds a trainer or a loop"


def values_of(name, folder, questions=1, **sections):
    """A recipe's own values with tiny models, for so many questions."""
    return recipe_values(name, folder / "run", questions, **sections) | {"evaluation": {"questions": 0}}


def advantages_of(batch):
    """By the numbers of the question and of the dialogue and by agent, the credits and the advantages of its turns."""
    found = defaultdict(list)
    for row in sorted(rows(batch), key=lambda row: row.utterance.order):
        place = row.dialogue.prompt, row.dialogue.rollout, row.utterance.agent
        found[place].append((row.utterance.rewards["credit"], row.advantage))
    return found


@pytest.mark.parametrize("mixed", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_the_tournament_of_arenarl_by_hand(mixed, tmp_path):
    """Qualities 5, 8, 6, 3: rewards 1/3, 1, 2/3, 0; their unbiased standard deviation is .4303."""
    said = iter(["5", "8", "6", "3"])

    def script(request):
        if request.ask.agent != "judge":
            return next(said)
        lines = request.ask.messages[-1]["content"].splitlines()
        first, second = (int(line[-1]) for line in lines if line and line[-1] in "8653")
        return f"Better: {'A' if first > second else 'B'}"

    trainer = scripted_trainer(values_of("arenarl", tmp_path, branching={"group": 4}), script)
    batch = trainer.collected()
    batch.dialogues = [batch.dialogues[i] for i in mixed]  # in whatever order they are
    found = [own[0] for _, own in sorted(advantages_of(trainer.advantage(trainer.score(batch))).items())]
    assert [credit for credit, _ in found] == pytest.approx([1 / 3, 1, 2 / 3, 0])
    assert [advantage for _, advantage in found] == pytest.approx([-0.3873, 1.1619, 0.3873, -1.1619], abs=1e-4)


GAMES = {"won": "1 4 2 5 3", "illegal": "x", "drawn": "1 2 3 5 4 6 8 7 9"}
"""Moves of tic-tac-toe: the first player wins, makes an illegal move, or neither wins."""


@pytest.mark.parametrize(
    ("name", "first_cell", "drawn", "first", "second"),
    [
        ("marshal", 0, 0.1, [1.8333, -10.1667, 0.9333], [-0.7333, 0.3667]),
        ("marshal_pettingzoo", 1, 0.0, [1.8889, -10.1111, 0.8889], [-0.6667, 0.3333]),
    ],
)
def test_the_returns_of_marshal_by_hand(name, first_cell, drawn, first, second, tmp_path):
    """Of the first player's 9 turns three earn 1, one earns -11 and five the draw; of the other's, two earn -1 and four
    the draw."""
    moves = [[str(int(move) - first_cell) if move != "x" else move for move in own.split()] for own in GAMES.values()]

    def script(request):
        game = request.rng_key[2]
        return moves[game][request.utterance]

    batch = played(scripted_trainer(values_of(name, tmp_path, questions=3), script))
    found = advantages_of(batch)
    expected = {
        (0, "first"): [first[0]] * 3,
        (0, "second"): [second[0]] * 2,
        (1, "first"): [first[1]],
        (2, "first"): [first[2]] * 5,
        (2, "second"): [second[1]] * 4,
    }
    for (game, player), advantages in expected.items():
        assert [a for _, a in found[game, 0, player]] == pytest.approx(advantages, abs=1e-4)
    assert sum(credit for credit, _ in found[2, 0, "first"]) == pytest.approx(drawn)


def test_the_progress_of_spa_rl_by_hand(tmp_path):
    """The second move leads away. Each move is worth what it and the answer to it bring nearer, 1 at the goal, and .5.
    By GAE with lambda .95 and a critic that says 0, the first player's moves have 1.7968, 1.365, .7 and 2.115, 1.7."""

    def script(request):
        here, free, far = grid_of(shown(request), "A", "/")
        there = {move: far.get(step_to(here, move, free), 99) - far[here] for move in STEPS}
        return next(move for move in STEPS if there[move] == (1 if request.utterance == 1 else -1))

    batch = played(scripted_trainer(values_of("spa_rl", tmp_path, questions=2), script))
    found = advantages_of(batch)
    paid = {place: [credit for credit, _ in own] for place, own in found.items()}
    assert paid[0, 0, "first"] == pytest.approx([0.5, 0.7, 0.7]) and paid[1, 0, "first"] == pytest.approx([0.5, 1.7])
    assert paid[0, 0, "second"] == pytest.approx([0.5, 0.7, 0.6]) and paid[1, 0, "second"] == pytest.approx([0.5, 1.6])
    assert [a for _, a in found[0, 0, "first"]] == pytest.approx([0.4858, -0.3166, -1.5524], abs=1e-4)
    assert [a for _, a in found[1, 0, "first"]] == pytest.approx([1.0772, 0.3060], abs=1e-4)


def test_the_rows_of_malt_by_hand(tmp_path):
    """Two drafts, two verdicts on each, two answers after each: right are 1 1, 1 0, 1 0 and 0 0."""
    right = iter([1, 1, 1, 0, 1, 0, 0, 0])
    values = recipe_values("malt", tmp_path / "run", branching={"group": 2})
    values["loop"] |= {"questions": 1}
    said = iter(range(99))

    def script(request):
        if request.ask.agent == "refiner":
            return str(int(request.example.answer) + (0 if next(right) else 1))
        return f"see {next(said)}"

    dialogues = sampled(values, tmp_path, script)
    worth = {(u.agent, u.sample or d.rollout): u.rewards["credit"] for d in dialogues for u in d.utterances}
    assert sorted(v for (agent, _), v in worth.items() if agent == "generator") == [0.25, 0.75]
    assert sorted(v for (agent, _), v in worth.items() if agent == "verifier") == [0, 0.5, 0.5, 1]
    (_, sft), (dpo, pairs) = stages_of(from_dict(values, "malt"))
    assert Counter(row.role for row in sft(dialogues)) == {"solver": 1, "verifier": 1, "refiner": 4}
    made = pairs(dialogues, dpo.roles)
    assert Counter(pair.chosen.role for pair in made) == {"verifier": 1, "refiner": 2}
    assert sorted((pair.chosen.value, pair.rejected.value) for pair in made) == [(1, 0), (1, 0), (1, 0.5)]


def test_the_pairs_of_madpo_by_hand(tmp_path):
    """Joint answers worth 1, .5, 0 and .5: the pair with the gap 1 comes first, and no pair has the gap 0."""
    values = recipe_values("madpo", tmp_path / "run", branching={"group": 4})
    values["loop"] |= {"questions": 1}
    right = {"ann": [1, 1, 0, 0], "bob": [1, 0, 0, 1]}

    def script(request):
        rollout = request.rng_key[-2]
        return str(int(request.example.answer) + (0 if right[request.ask.agent][rollout] else 1 + rollout))

    dialogues = sampled(values, tmp_path, script)
    ((dpo, gap),) = stages_of(from_dict(values, "madpo"))
    pairs = gap(dialogues, dpo.roles or ())
    found = [(pair.chosen.agent, pair.chosen.place[1], pair.rejected.place[1]) for pair in pairs]
    assert found[:2] == [("ann", 0, 2), ("bob", 0, 2)]
    assert gap(dialogues[::-1], dpo.roles or ()) == pairs  # also of equal gaps
    assert sorted(found) == [
        ("ann", 0, 2), ("ann", 0, 3), ("ann", 1, 2), ("ann", 3, 2), ("bob", 0, 1), ("bob", 0, 2), ("bob", 1, 2), ("bob", 3, 2),
    ]  # fmt: skip
