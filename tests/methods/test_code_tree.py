"""AT-GRPO's tree over programs, through the trainer's own steps: what candidates earn, which goes on, and equal
advantages."""

from collections import defaultdict

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file
from maporl.errors import ConfigError
from maporl.methods.tiny_versions import tiny_version
from maporl.runs.train import train
from maporl.validation.load import from_dict
from trl_ext.ppo.options import Decoding


def fenced(program):
    return f"```{program}```"


def first_only(example):
    """A program that has the values of 0 and 1, which are shown, and passes the first of the three hidden tests
    alone."""
    return fenced(example.meta["reference"].replace("return ", "return (x<3)*(") + ")")


def right_tests(example):
    first, second = example.meta["values"]
    return f"assert f(0)=={first}\nassert f(1)=={second}"


def half_right_tests(example):
    first, second = example.meta["values"]
    return f"assert f(0)=={first}\nassert f(1)=={second + 100}"


ROUNDS = {
    ("solver", 0): [lambda e: "no program", first_only, first_only, lambda e: fenced("def f(x):return -1")],
    ("tester", 0): [right_tests, half_right_tests, lambda e: "no tests", right_tests],
    ("solver", 1): [
        lambda e: fenced(e.meta["reference"]),
        first_only,
        first_only,
        lambda e: fenced(e.meta["reference"]),
    ],
    ("tester", 1): [half_right_tests, right_tests, right_tests, right_tests],
}
"""What the four candidates of each round write."""


def code_values(folder, recipe="at_grpo_code", group=4, **protocol):
    values = recipe_values(recipe, folder, branching={"group": group}, protocol=protocol)
    values["training"]["per_device_train_batch_size"] = 1
    values["ppo"] |= {"response_length": 80, "num_mini_batches": 1}
    return values


def tree(tmp_path, recipe, **protocol):
    """Play one question of the recipe's tiny version with the candidates of ``ROUNDS``.

    Return the batch and what each request was shown.
    """
    left = {key: list(texts) for key, texts in ROUNDS.items()}
    shown = defaultdict(list)

    def script(request):
        role = request.ask.role
        shown[role, request.turn].append(request.ask.messages[-1]["content"])
        return left[role, request.turn].pop(0)(request.example)

    trainer = scripted_trainer(code_values(tmp_path, recipe, **protocol), script)
    batch = played(trainer)
    trainer.player.world.close()
    return batch, shown


def by_role_and_turn(batch, value):
    found = defaultdict(list)
    for row in rows(batch):
        found[row.utterance.role, row.utterance.turn].append(value(row))
    return {key: sorted(values) for key, values in found.items()}


def credit(row):
    """Twice ``solved`` for a solver, and ``tests`` for a tester."""
    paid = row.utterance.rewards
    return 2 * paid.get("solved", 0) + paid.get("tests", 0)


def test_candidates_are_scored_after_their_programs_ran_and_the_best_goes_on(tmp_path):
    batch, shown = tree(tmp_path, "at_grpo_code", rounds=2)
    dialogues = batch.dialogues
    assert [len(d.utterances) for d in dialogues].count(2) == 3 and [len(d.utterances) for d in dialogues].count(4) == 4
    # 2 solved + tests of the four pairs: 1, 1.17, 0.67, 1; so the second goes on, with what its own tests showed
    (went_on,) = {d.utterances[0].text for d in dialogues if len(d.utterances) == 4}
    assert went_on == first_only(dialogues[0].example)
    second = dialogues[0].example.meta["values"][1]
    for prompt in shown["solver", 1] + shown["tester", 1]:
        assert f"assert f(1)=={second + 100}: AssertionError" in prompt and went_on.strip("`") in prompt
    assert len(shown["solver", 1]) == 4
    assert {d.outcome for d in dialogues if len(d.utterances) == 2} == {None}
    # the right program with half right tests disagrees; right tests are of two values that all programs of round 2 have
    assert [d.outcome for d in dialogues if d.outcome is not None] == [2, 2, 2]


def test_the_advantages_of_a_group_by_hand(tmp_path):
    """Round 1: solvers earn 0, 2/3, 2/3, 0 and testers 1, 1/2, 0, 1. Round 2: 2, 2/3, 2/3, 2 and 1/2, 1, 1, 1."""
    batch, _ = tree(tmp_path, "at_grpo_code", rounds=2)
    credits, advantages = by_role_and_turn(batch, credit), by_role_and_turn(batch, lambda row: row.advantage)
    expected = {
        ("solver", 0): [0, 0, 2 / 3, 2 / 3], ("tester", 0): [0, 1 / 2, 1, 1],
        ("solver", 1): [2 / 3, 2 / 3, 2, 2], ("tester", 1): [1 / 2, 1, 1, 1],
    }  # fmt: skip
    assert credits == {key: pytest.approx(values) for key, values in expected.items()}
    # (value - mean) / deviation, for example of the testers of round 1: mean 0.625 and deviation 0.4787
    assert advantages == {
        ("solver", 0): pytest.approx([-0.8660, -0.8660, 0.8660, 0.8660], abs=2e-4),
        ("tester", 0): pytest.approx([-1.3056, -0.2611, 0.7833, 0.7833], abs=2e-4),
        ("solver", 1): pytest.approx([-0.8660, -0.8660, 0.8660, 0.8660], abs=2e-4),
        ("tester", 1): pytest.approx([-1.5, 0.5, 0.5, 0.5], abs=2e-4),
    }


@pytest.mark.parametrize("order", ["together", "turns"])
def test_equal_tests_earn_equal_advantages_whatever_program_stands_beside_them(order, tmp_path):
    """Eight testers of at_grpo_code write the same in one state.

    Beside them stand right programs and wrong ones, which are paid as such.
    """
    programs = iter([lambda e: fenced(e.meta["reference"]), first_only, lambda e: "no program", first_only] * 2)
    values = code_values(tmp_path, group=8, rounds=1, order=order)
    trainer = scripted_trainer(
        values, lambda r: right_tests(r.example) if r.ask.role == "tester" else next(programs)(r.example)
    )
    batch = played(trainer)
    trainer.player.world.close()
    advantages = by_role_and_turn(batch, lambda row: row.advantage)
    assert advantages["tester", 0] == [0.0] * 8
    assert len(set(advantages["solver", 0])) == 3 and advantages["solver", 0][-2] > 1


def test_in_turns_programs_are_compared_before_the_tester_speaks(tmp_path):
    left = {key: list(texts) for key, texts in ROUNDS.items()}
    trainer = scripted_trainer(
        code_values(tmp_path, order="turns", rounds=1),
        lambda request: left[request.ask.role, request.turn].pop(0)(request.example),
    )
    batch = played(trainer)
    trainer.player.world.close()
    dialogues = batch.dialogues
    assert sorted(len(d.utterances) for d in dialogues) == [1] * 3 + [2] * 4
    (went_on,) = {d.utterances[0].text for d in dialogues if len(d.utterances) == 2}
    assert went_on == first_only(dialogues[0].example)
    programs = {u.text: u.rewards for d in dialogues for u in d.utterances if u.role == "solver"}
    assert all(set(rewards) >= {"solved", "team"} and "agree" not in rewards for rewards in programs.values())


@pytest.mark.parametrize(
    ("name", "evaluation"),
    [
        ("at_grpo_code", Decoding(0.6, 0.95, 20)),
        ("at_grpo_roles", Decoding(0.6, 0.95, 20)),
        ("at_grpo_shared", Decoding(0.0, 1.0, 0)),
    ],
)
def test_answers_and_evaluations_are_sampled_as_published(name, evaluation):
    config = from_dict(read_yaml(recipe_file(name)), name)
    assert (config.ppo.temperature, config.ppo.top_p, config.ppo.top_k) == (1.0, 0.9, 20)
    assert config.evaluation.decoding == evaluation


@pytest.mark.slow
def test_its_tiny_version_trains_and_leaves_a_page(tmp_path):
    values = tiny_version("at_grpo_code", str(tmp_path / "run"))
    assert values["task"] == {"name": "tiny_programs"} and values["branching"] == {
        "how": "tree",
        "group": 3,
        "pick": "best",
    }
    train(from_dict(values | {"updates": 1, "warm_start": {"steps": 2}}), False, quiet=True)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_one_policy_for_both_roles_is_one_line(tmp_path):
    values = code_values(tmp_path)
    for section in values["agents"].values():
        section["policy"] = "shared"
    trainer = scripted_trainer(values, lambda request: "no program")
    assert list(trainer.learners) == ["shared"]
    trainer.player.world.close()


def test_agents_that_call_tools_themselves_cannot_be_compared_in_a_tree(tmp_path):
    values = code_values(tmp_path)
    values["tools"]["python"] = {"use": "python"}
    values["agents"]["coder"]["tools"] = ["python"]
    with pytest.raises(ConfigError, match="go on after calls of tools"):
        from_dict(values)
