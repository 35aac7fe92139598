"""Dialogues that grow: options of a protocol that change with the updates (ScalingInter)."""

import random

import pytest
import torch
from played_games import perfect
from recipe_runs import rollout_of
from scripted_training import played, recipe_values, rows, scripted_trainer
from tiny_runs import one_update, scheduled_config

from maporl import MultiAgentPPOTrainer
from maporl.config.schema import BranchingSection
from maporl.errors import ConfigError
from maporl.protocols import Debate, PlayGame
from maporl.protocols.growth import grown
from maporl.runs.build import build_trainer
from maporl.schedules import Growth, Schedule

PROTOCOL = Debate(turns=3, later="{others};{question}", quote="{text}")
THREE = {"growth": {"every": 1, "options": {"turns": [1, 2, 3]}}}
DEBATE = {"name": "debate", "turns": 3, "later": "{others};{question}", "quote": "{text}"}


def longest(dialogues):
    """The number of turns of each agent in each dialogue."""
    return {max(u.turn for u in d.utterances if u.agent == a) + 1 for d in dialogues for a in ("ann", "bob")}


def test_an_option_of_a_game_leaves_its_other_options():
    game = PlayGame(game="plan_path", options={"size": 3, "limit": 6})
    growth = Growth({"options.limit": [2, 4]}, every=5)
    assert [grown(game, growth, u).options for u in (5, 6)] == [{"size": 3, "limit": 2}, {"size": 3, "limit": 4}]
    assert game.options == {"size": 3, "limit": 6}


def test_scaling_inter_lets_games_grow(tmp_path):
    """Players that never arrive play to the limit: 2 in the first step, then 4 and 6. All games of an update agree."""
    trainer = scripted_trainer(recipe_values("scaling_inter", tmp_path), lambda r: "U" if r.turn % 2 else "D")
    found = []
    for _ in range(4):
        batch = trainer.collected()
        lost = [d for d in batch.dialogues if not d.utterances[0].grade.correct]
        found.append({len(d.utterances) for d in lost})
        assert len(batch.dialogues) == 4 * trainer.collector.branching.group and lost
        trainer.state.global_step += 1
    assert found == [{2}, {4}, {6}, {6}]


def test_scaling_inter_compares_outcomes(tmp_path):
    """Only the first of three games is won: .1 + 1 against two games that are not, each player of each."""
    values = recipe_values("scaling_inter", tmp_path, protocol={"options": {"size": 2, "walls": 0, "limit": 6}})
    values["schedule"] = {"growth": {"every": 100, "options": {"options.limit": [2]}}}
    batch = played(scripted_trainer(values, lambda r: perfect(r) if rollout_of(r) == 0 else "?"))
    dialogue_of = {id(u): d for d in batch.dialogues for u in d.utterances}
    found = {}
    for row in rows(batch):
        first = dialogue_of[id(row.utterance)].rollout == 0
        found.setdefault((row.utterance.agent, first), set()).add(round(row.advantage, 3))
    assert found["first", True] == {1.155} and found["first", False] == {-0.577}


def test_a_debate_grows_in_training_and_is_evaluated_whole(tmp_path):
    settings = scheduled_config(tmp_path, protocol=DEBATE, schedule=THREE, branching={"group": 2, "resample": 1})
    trainer = build_trainer(settings, quiet=True)
    found = []
    for _ in range(4):
        dialogues, _, _ = one_update(trainer)
        found.append(longest(dialogues))
    assert found == [{1}, {2}, {3}, {3}]
    assert longest(trainer.player.play_evaluation(trainer.task, 2, trainer.args.eval_decoding, 0, batch=1)) == {3}


def test_a_resumed_run_goes_on_at_its_stage(tmp_path):
    def settings(name, updates):
        training = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-2,
            "save_steps": 1, "lr_scheduler_type": "constant",
        }  # fmt: skip
        return scheduled_config(
            tmp_path / name, updates=updates, protocol=DEBATE, schedule=THREE, training=training, branching={"group": 2}
        )

    whole = build_trainer(settings("whole", 3), quiet=True)
    whole.train()
    build_trainer(settings("cut", 1), quiet=True).train()
    resumed = build_trainer(settings("cut", 3), quiet=True)
    played_in, collect = [], resumed.collector.collect
    resumed.collector.collect = lambda batch: (collect(batch), played_in.append(longest(batch.dialogues)))
    resumed.train(resume_from_checkpoint=True)
    assert played_in == [{2}, {3}]
    for name, policy in whole.team.policies.items():
        theirs = resumed.team.policies[name].model.state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in policy.model.state_dict().items())


def test_stages_follow_the_update_at_random(seeds=50):
    for seed in range(seeds):
        rng = random.Random(seed)
        values = [rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
        growth, update = Growth({"turns": values}, rng.randint(1, 7)), rng.randint(1, 60)
        by_hand = [value for value in values for _ in range(growth.every)] + [values[-1]] * 60
        assert growth.at(update) == {"turns": by_hand[update - 1]}


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        ({"every": 0, "options": {"turns": [1]}}, "schedule.growth.every: expected at least 1, got 0"),
        ({"every": 1, "options": {}}, "schedule.growth: expected options with lists of values"),
        ({"every": 1, "options": {"turns": []}}, "options with lists of values"),
        ({"every": 1, "options": {"turns": [1, "two"]}}, "growth"),
        ({"every": 1, "options": {"turn": [1]}}, "turn: 1: protocol debate: unknown .*'turn'.*turns"),
        ({"every": 1, "options": {"quote": [1]}}, "expected an option that is whole, got quote="),
        ({"every": 1, "options": {"options.limit": [1]}}, "unknown .*'options'"),
        ({"every": 1, "options": {"turns": [0]}}, "turns: 0: "),
        ({"every": 2, "options": {"turns": [1, 4]}}, "up to 4 turns from update 3 on, but 3 in the section protocol"),
    ],
)  # fmt: skip
def test_growth_that_cannot_be_is_refused_before_a_model_loads(tmp_path, growth, message):
    with pytest.raises(ConfigError, match=message):
        scheduled_config(tmp_path, protocol=DEBATE, schedule={"growth": growth})


def test_growth_in_python(tmp_path):
    settings = scheduled_config(tmp_path, protocol=DEBATE)
    schedule = Schedule(growth=Growth({"turns": [2]}, every=1))
    trainer = build_trainer(settings, quiet=True)
    args, team = trainer.args, trainer.team
    built = MultiAgentPPOTrainer(args, team, trainer.task, PROTOCOL, schedule=schedule, branching=BranchingSection())
    assert longest(built.collected().dialogues) == {2}
    with pytest.raises(ConfigError, match=r"trainer: schedule\.growth\.options: turn: 2: "):
        wrong = Schedule(growth=Growth({"turn": [2]}, every=1))
        MultiAgentPPOTrainer(args, team, trainer.task, PROTOCOL, schedule=wrong)
