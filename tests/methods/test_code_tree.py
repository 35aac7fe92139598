"""AT-GRPO's tree over programs, through the trainer's own steps: what candidates earn, which goes on, and equal
advantages."""

from collections import defaultdict

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.errors import ConfigError
from maporl.validation.load import from_dict


def fenced(program):
    return f"```{program}```"


def reference(example):
    return fenced(example.meta["reference"])


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
    ("solver", 1): [reference, first_only, first_only, reference],
    ("tester", 1): [half_right_tests, right_tests, right_tests, right_tests],
}
"""What the four candidates of each round write."""


def code_values(folder, group=4, **protocol):
    sections = {"branching": {"group": group}, "protocol": protocol, "ppo": {"response_length": 80}}
    return recipe_values("at_grpo_code", folder, questions=1, **sections)


def tree(tmp_path, **protocol):
    """The batch of one question of at_grpo_code with the candidates of ``ROUNDS``, and what each request was shown."""
    left = {key: list(texts) for key, texts in ROUNDS.items()}
    shown = defaultdict(list)

    def script(request):
        role = request.ask.role
        shown[role, request.turn].append(request.ask.messages[-1]["content"])
        return left[role, request.turn].pop(0)(request.example)

    trainer = scripted_trainer(code_values(tmp_path, **protocol), script)
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
    """The solvers and testers of at_grpo_code are compared by what their programs did."""
    batch, shown = tree(tmp_path, rounds=2)
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
    """Round 1 of at_grpo_code: solvers earn 0, 2/3, 2/3, 0 and testers 1, 1/2, 0, 1. Round 2: 2, 2/3, 2/3, 2 and 1/2, 1, 1, 1."""
    batch, _ = tree(tmp_path, rounds=2)
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
    programs = iter([reference, first_only, lambda e: "no program", first_only] * 2)
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
    batch, _ = tree(tmp_path, order="turns", rounds=1)
    dialogues = batch.dialogues
    assert sorted(len(d.utterances) for d in dialogues) == [1] * 3 + [2] * 4
    (went_on,) = {d.utterances[0].text for d in dialogues if len(d.utterances) == 2}
    assert went_on == first_only(dialogues[0].example)
    programs = {u.text: u.rewards for d in dialogues for u in d.utterances if u.role == "solver"}
    assert all(set(rewards) >= {"solved", "team"} and "agree" not in rewards for rewards in programs.values())


def test_agents_that_call_tools_themselves_cannot_be_compared_in_a_tree(tmp_path):
    values = code_values(tmp_path)
    values["tools"]["python"] = {"use": "python"}
    values["agents"]["coder"]["tools"] = ["python"]
    with pytest.raises(ConfigError, match="go on after calls of tools"):
        from_dict(values)
