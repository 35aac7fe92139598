"""SPIRAL as published: what a game pays its sides, what an illegal or cut-off move does, and the running mean of each
role."""

import itertools
import random

import pytest
from scripted_training import TokenScript, played, recipe_values, rows, scripted_trainer

from maporl.environments.games import KuhnPoker
from maporl.integrations.text_arena import TextArena


def spiral(folder, recipe="spiral", games=3, **protocol):
    return recipe_values(
        recipe, folder, protocol=protocol, training={"per_device_train_batch_size": games}, ppo={"response_length": 8}
    )


def turns(batch):
    """For each game, what each side earned in all and the advantages of its turns. A turn that is left out has None."""
    learned = {id(row.utterance): row.advantage for row in rows(batch)}
    found = []
    for dialogue in batch.dialogues:
        own = {}
        for u in dialogue.utterances:
            paid, advantages = own.setdefault(u.agent, (0.0, []))
            own[u.agent] = (paid + u.rewards["env"], [*advantages, learned.get(id(u))])
        found.append(own)
    return found


def test_what_the_sides_of_a_game_earn_and_learn(tmp_path):
    """All pass, so that the higher card wins 1 chip a round, and the game pays 1 and -1. A second batch goes on with
    the means."""
    trainer = scripted_trainer(spiral(tmp_path), lambda request: "I pass: p")
    means = {"first": 0.0, "second": 0.0}
    for _ in range(2):
        batch = played(trainer)
        for dialogue, own in zip(batch.dialogues, turns(batch), strict=True):
            assert len(dialogue.utterances) == 3 * 2  # the tiny version has three rounds
            assert sorted(paid for paid, _ in own.values()) == [-1, 1]
            for agent, (paid, advantages) in own.items():
                assert advantages == pytest.approx([paid - means[agent]] * 3, abs=1e-6)
                means[agent] = 0.95 * means[agent] + 0.05 * paid


def test_an_illegal_move_pays_both_sides_whatever_the_chips_say(tmp_path):
    """The first player talks nonsense in the second round of each game, in which the second player begins."""
    said = {}

    def script(request):
        key = (request.example.id, request.ask.agent)
        said[key] = said.get(key, 0) + 1
        return "hello" if said[key] == 2 and request.ask.agent == "first" else "p"

    batch = played(scripted_trainer(spiral(tmp_path), script))
    mean = {"first": 0.0, "second": 0.0}
    for dialogue, own in zip(batch.dialogues, turns(batch), strict=True):
        assert dialogue.outcome == "illegal"
        assert [u.agent for u in dialogue.utterances] == ["first", "second", "second", "first"]
        assert {agent: paid for agent, (paid, _) in own.items()} == {"first": -1.5, "second": 0.5}
        for agent, (paid, advantages) in own.items():
            assert advantages == pytest.approx([paid - mean[agent]] * 2, abs=1e-6)
            mean[agent] = 0.95 * mean[agent] + 0.05 * paid
    assert mean == pytest.approx({"first": -0.2139, "second": 0.0713}, abs=1e-4)


def test_a_move_that_was_cut_off_is_trained_on_like_any_other(tmp_path):
    """The answers end at 1 token. Where that is a move it is made, and elsewhere it is illegal; all of them have
    rows."""
    trainer = scripted_trainer(spiral(tmp_path, games=4), lambda request: "p")
    engine = TokenScript(trainer.team.policies, lambda r: "pass" if r.ask.agent == "first" else "help", most=1)
    trainer.engines.update(dict.fromkeys(trainer.engines, engine))
    batch = played(trainer)
    assert {u.stop.whole for d in batch.dialogues for u in d.utterances} == {False}
    assert {d.outcome for d in batch.dialogues} == {"illegal"}, "the word p is a move, but the word h is not"
    assert [len(d.utterances) for d in batch.dialogues] == [2] * 4 and len(rows(batch)) == 8


def test_a_draw_pays_nothing_and_its_turns_are_left_out():
    game = KuhnPoker(rounds=2, pays="winner", scale=3.0)
    game.reset(random.Random(0))
    game.dealt = [["K", "J"], ["Q", "J"]]
    game._begin_round()
    assert [game.step({player: "p"}) for player in (0, 1)] == [{}, {}] and game.chips == [1, -1]
    assert game.to_move() == (1,) and game.observe(1) == "2/2 -1 J"
    game.dealt[1][:] = ["J", "Q"]
    assert [game.step({player: "p"}) for player in (1, 0)] == [{}, {0: 0.0, 1: 0.0}]
    assert game.to_move() == () and game.success(0) is game.success(1) is False


@pytest.mark.parametrize("pays", ["chips", "winner"])
def test_what_one_side_wins_the_other_loses_in_random_games(pays):
    for seed in range(60):
        rng = random.Random(seed)
        game = KuhnPoker(rounds=rng.randint(1, 6), pays=pays, scale=0.5)
        game.begin_with(rng, 2)
        paid, moved, begun = [0.0, 0.0], [0, 0], []
        while movers := game.to_move():
            (player,) = movers
            moved[player] += 1
            begun += [player] if not game.history else []
            for other, amount in game.step({player: rng.choice("pb")}).items():
                paid[other] += amount
        assert paid[0] == -paid[1] and max(moved) <= game.longest and game.chips[0] == -game.chips[1]
        assert begun == list(itertools.islice(itertools.cycle((0, 1)), game.rounds))
        wins = 0.5 * ((game.chips[0] > 0) - (game.chips[0] < 0))
        assert paid[0] == (0.5 * game.chips[0] if pays == "chips" else wins)


def test_textarenas_first_invalid_move_ends_the_game_and_pays_both_sides(tmp_path):
    pytest.importorskip("textarena")
    begun = set()

    def script(request):
        first = request.example.id not in begun
        begun.add(request.example.id)
        return "[check]" if first else "[nonsense]"

    batch = played(scripted_trainer(spiral(tmp_path, "spiral_textarena", games=2), script))
    for dialogue, own in zip(batch.dialogues, turns(batch), strict=True):
        wrong, other = dialogue.utterances[-1].agent, dialogue.utterances[0].agent
        assert dialogue.outcome == "illegal" and len(dialogue.utterances) == 2 and wrong != other
        assert (own[wrong][0], own[other][0]) == (-1.5, 0.5)
        assert [u.rewards["legal"] for u in dialogue.utterances] == [1.0, 0.0]
        assert [u.grade.correct for u in dialogue.utterances] == [None, False]


def test_textarena_forgives_once_by_default():
    pytest.importorskip("textarena")
    for forgive, told in ((True, 1), (False, 0)):
        game = TextArena(env="KuhnPoker-v0-short", forgive=forgive)
        game.begin_with(random.Random(0), 2)
        (player,) = game.to_move()
        assert game.step({player: "[nonsense]"}) == {}
        assert len(game.to_move()) == told and game.fines(player) is not forgive
        if forgive:
            assert game.step({player: "[nonsense]"}) == {player: -1.0, 1 - player: 1.0} and not game.fines(player)
