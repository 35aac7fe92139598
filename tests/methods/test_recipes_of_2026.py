"""MADA-RL, Agon, Co-RL and RLAC: what their recipes' own files pay and compare, by hand."""

from collections import Counter
from itertools import count

import pytest
from scripted_dialogues import apply, dialogue
from scripted_training import played, recipe_values, rows, sampled, scripted_trainer
from test_rewards_of_recipes import paid

from maporl.loops.plan import stages_of
from maporl.types import Grade
from maporl.validation.load import from_dict


def rollout_of(request):
    return int(request.label.rsplit(".", 1)[1])


SAID = {  # by agent: of both rollouts, whether the answer is right, and its length
    "gen_a": [(True, 3), (False, 3)], "gen_b": [(False, 4), (False, 2)], "gen_c": [(False, 3), (False, 3)],
    "critic_a": [(True, 2), (True, 4)], "critic_b": [(False, 3), (False, 3)], "critic_c": [(False, 2), (True, 4)],
}  # fmt: skip


def test_critics_of_mada_rl_earn_what_they_correct(tmp_path):
    """One of three generators is right in the first dialogue, and none in the second."""

    def script(request):
        right, length = SAID[request.ask.agent][rollout_of(request)]
        return request.example.answer.rjust(length, "0") if right else "9" * length

    two = {"training": {"per_device_train_batch_size": 1}, "branching": {"group": 2}}
    values = recipe_values("mada_rl", tmp_path, schedule={"opening": [], "cycle": []}, **two)
    found = {
        (row.utterance.agent, row.dialogue.rollout): (row.utterance.rewards["credit"], row.advantage)
        for row in rows(played(scripted_trainer(values, script)))
    }
    critics = {
        "critic_a": [2 + 0.5 - 2 / 3, 2 - 0.5],  # right twice, shorter at first
        "critic_b": [0 - 2 / 3, 0],  # wrong twice
        "critic_c": [0 - 2 / 3, 2 - 0.5],  # a short wrong answer earns nothing for being short
    }
    for agent, credits in critics.items():
        for rollout, credit in enumerate(credits):
            assert found[agent, rollout] == pytest.approx((credit, credit)), "an advantage is the credit itself"
    # generators are compared; of wrong answers the longer one earns less
    assert found["gen_a", 0] == pytest.approx((2.0, 0.7071), abs=1e-4)
    assert found["gen_a", 1] == pytest.approx((0.0, -0.7071), abs=1e-4)
    assert found["gen_b", 0] == pytest.approx((-0.5, -0.7071), abs=1e-4)


def test_agon_pays_more_where_the_draft_was_wrong(tmp_path):
    right = {(0, "drafter"), (0, "rival"), (1, "rival")}
    found = paid("agon", tmp_path, lambda r, agent, _: "right" if (r, agent) in right else "wrong", 3)
    credits = {(r, agent): credit for (r, agent, _), (credit, _) in found.items()}
    assert credits == {
        (0, "drafter"): 2.5, (1, "drafter"): 0.5, (2, "drafter"): 0.5,
        (0, "rival"): 2.5, (1, "rival"): 3.5, (2, "rival"): 0.5,
    }  # fmt: skip
    advantages = {(r, agent): advantage for (r, agent, _), (_, advantage) in found.items()}
    expected = {"drafter": [1.1547, -0.5774, -0.5774], "rival": [0.2182, 0.8729, -1.0911]}
    assert advantages == pytest.approx({(r, a): e for a, own in expected.items() for r, e in enumerate(own)}, abs=1e-4)


def test_a_bonus_needs_a_draft_that_is_wrong_and_an_answer_that_is_right():
    graded = [{"grade": Grade("1", right, "")} for right in (False, True, True)]
    said = dialogue(("a", 0, [], graded[0]), ("b", 0, [0], graded[1]), ("c", 0, [0, 1], graded[2]))
    got = apply({"convert": {"bonus": 0.5}}, [said], [{0: 0.0, 1: 1.0, 2: 1.0}])
    assert got == [{0: 0.0, 1: 1.5, 2: 1.0}], "c was shown a right answer too"


def test_models_of_co_rl_follow_each_others_majority(tmp_path):
    """llama is mostly wrong and qwen mostly right, so each is paid for the answer that it rarely gives itself."""
    right = {(2, "llama"), (0, "qwen"), (1, "qwen")}
    found = paid("co_rl", tmp_path, lambda r, agent, _: "right" if (r, agent) in right else "wrong", 3)
    assert {(r, agent): credit for (r, agent, _), (credit, _) in found.items()} == {
        (r, agent): float(r == 2) for r in range(3) for agent in ("llama", "qwen")
    }
    assert found[2, "qwen", 0][1] == pytest.approx(1.1546, abs=1e-4)  # (1 - 1/3) / (0.5774 + 0.0001)


def test_a_ring_of_three_follows_the_next_by_name(tmp_path):
    answers = {"ann": "1", "bob": "2", "cy": "2"}
    values = recipe_values("co_rl", tmp_path, branching={"group": 2}) | {"agents": {name: {} for name in answers}}
    found = rows(played(scripted_trainer(values, lambda request: answers[request.ask.agent])))
    credits = {row.utterance.agent: row.utterance.rewards["credit"] for row in found}
    assert credits == {"ann": 0.0, "bob": 1.0, "cy": 0.0}, "bob follows cy, and cy follows ann"


def test_rlac_pays_who_is_right_about_a_test(tmp_path):
    """A right program and one that is wrong from 3 on, two tests of each: valid or not, failed or passed."""
    values = recipe_values("rlac", tmp_path / "run", branching={"group": [2, 2]})
    values["ppo"] |= {"response_length": 80}
    values["loop"] |= {"questions": 1}
    written, asked = count(), Counter()

    def script(request):
        reference = request.example.meta["reference"]
        wrong = reference.replace("return ", "return (x<3)*(") + ")"
        if request.ask.agent == "generator":
            return f"```{(reference, wrong)[next(written)]}```"
        names = {}
        exec(reference, names)
        of = "wrong" if "(x<3)" in request.ask.messages[-1]["content"] else "right"
        asked[of] += 1
        at, beside = {"right": [(5, 0), (5, 1)], "wrong": [(5, 0), (0, 0)]}[of][asked[of] - 1]
        return f"assert f({at})=={names['f'](at) + beside}"

    dialogues = sampled(values, tmp_path, script)
    credits = {}
    for d in dialogues:
        for u in d.utterances:
            credits.setdefault(u.agent, {})[u.text] = u.rewards["credit"]
    assert sorted(credits["generator"].values()) == [0.5, 1.0]
    right = next(text for text, value in credits["generator"].items() if value == 1.0)
    assert "(x<3)" not in right, "its valid test passes, and the other test is not valid"
    (_, of_programs), (_, of_tests) = stages_of(from_dict(values, "rlac"))
    made = of_programs(dialogues, ["solver"])
    assert [(pair.chosen.value, pair.rejected.value) for pair in made] == [(1.0, 0.5)]
    made = of_tests(dialogues, ["tester"])
    assert [(pair.chosen.value, pair.rejected.value) for pair in made] == [(1.0, 0.0)]
