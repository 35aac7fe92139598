"""Dialogues that are played again without an agent: who speaks again, what each agent contributed, and what it is
paid."""

from collections import Counter, defaultdict

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.errors import ConfigError
from maporl.rewards.counterfactual import shapley_values
from maporl.types import from_json, to_json
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run


def words(request):
    """What the agent is told now."""
    return request.ask.messages[-1]["content"]


def credits(batch, agent):
    """By question, the advantages of an agent, in the order of dialogues."""
    of = {id(u): d for d in batch.dialogues for u in d.utterances}
    found = defaultdict(dict)
    for row in rows(batch):
        if row.utterance.agent == agent:
            dialogue = of[id(row.utterance)]
            found[dialogue.prompt][dialogue.rollout] = row.advantage
    return {prompt: [own[k] for k in sorted(own)] for prompt, own in found.items()}


# -- CCPO -------------------------------------------------------------------------------------------------------------


def ccpo(tmp_path, joint, solo, **sections):
    """The advantages of thinker and solver, where the k-th thought leads to ``joint[k]`` and the k-th solo answer is
    ``solo[k]``."""
    sections["branching"] = {"group": len(joint)}
    values = recipe_values("ccpo", tmp_path, task={"largest": 4}, schedule={"round_robin": None}, **sections)
    values["ppo"] |= {"response_length": 8, "num_mini_batches": 1}
    thoughts, alone = Counter(), Counter()

    def script(request):
        question = request.example.id
        if request.ask.agent == "thinker":
            thoughts[question] += 1
            return f"t{thoughts[question]}"
        if "thinker: t" in words(request):
            right = joint[int(words(request)[-1]) - 1]
        else:
            alone[question] += 1
            right = solo[alone[question] - 1]
        return request.example.answer if right > 0 else "x"

    batch = played(scripted_trainer(values, script))
    assert set(alone.values()) == {len(solo)}, "a solo answer for each dialogue"
    return credits(batch, "thinker"), credits(batch, "solver")


@pytest.mark.parametrize(
    ("joint", "solo", "thinker", "solver"),
    [
        ([1, 1, -1, -1], [-1, -1, 1, -1], [1.1, 1.1, -1.1, -1.1], [1, 1, -1, -1]),
        ([1, 1, 1, -1], [1, 1, 1, -1], [0.55, 0.55, 0.55, -1.65], [0.5, 0.5, 0.5, -1.5]),
        ([1, 1, -1, -1], [1, -1, 1, -1], [1, 1, -1, -1], [1, 1, -1, -1]),
    ],
    ids=["the solver alone is mostly wrong", "mostly right", "right half of the time"],
)
def test_ccpo_pays_the_thinker_for_what_it_turns(tmp_path, joint, solo, thinker, solver):
    """The numbers of the released code (version 2), from the recipe ccpo."""
    thinkers, solvers = ccpo(tmp_path, joint, solo)
    assert len(thinkers) == len(solvers) == 4
    assert all(own == pytest.approx(thinker, abs=1e-4) for own in thinkers.values())
    assert all(own == pytest.approx(solver, abs=1e-4) for own in solvers.values())


def test_a_standard_deviation_removes_the_bonus_of_ccpo(tmp_path):
    for joint, expected in (([1, 1, -1, -1], [0.866, 0.866, -0.866, -0.866]), ([1, 1, 1, -1], [0.5, 0.5, 0.5, -1.5])):
        both = ccpo(tmp_path, joint, [-1, -1, 1, -1], advantage={"scale": "std"})
        assert all(own == pytest.approx(expected, abs=1e-3) for agent in both for own in agent.values())


def test_paired_the_bonus_depends_on_the_dialogues_own_solo_answer(tmp_path):
    paired = ["last", {"counterfactual": {"weight": 0.2, "threshold": 1.0, "baseline": "paired"}}]
    thinkers, _ = ccpo(tmp_path, [1, 1, -1, -1], [-1, 1, 1, -1], reward={"rules": paired})
    # rewards 2.2, 2, -0.2, 0, of which the mean is 1
    assert all(own == pytest.approx([1.2, 1.0, -1.2, -1.0], abs=1e-4) for own in thinkers.values())


# -- SHARP ------------------------------------------------------------------------------------------------------------

OUTCOMES = {"all": [1, 1, 0, 1], "scout": [0, 1, 0, 1], "clerk": [1, 0, 0, 1]}


def plan(outcomes):
    """A script for call_return: dialogue k of a question calls both workers and is right as ``outcomes`` says."""
    opened: Counter = Counter()

    def script(request):
        if request.ask.agent != "planner":
            return "r" + words(request)[-1]
        history = request.transcript.messages
        if request.turn == 0:
            opened[request.example.id] += 1
            return f"<call>{opened[request.example.id]}</call>"
        number = next(m["content"] for m in history if m["role"] == "assistant")[6]
        if request.turn == 1:
            return f"<call>{number}</call>"
        heard = [m["content"] for m in history if m["role"] == "user"][1:]
        silent = [worker for worker, text in zip(("scout", "clerk"), heard, strict=True) if "(no reply)" in text]
        right = outcomes[silent[0] if silent else "all"][int(number) - 1]
        return request.example.answer if right else "x"

    return script


def sharp_batch(tmp_path, **sections):
    sections["branching"] = {"group": 4}
    values = recipe_values("sharp", tmp_path, task={"largest": 4}, **sections)
    values["ppo"] |= {"response_length": 24}
    return played(scripted_trainer(values, plan(OUTCOMES)))


def test_sharp_pays_workers_for_their_marginal_contribution(tmp_path):
    """The specification's numbers for the recipe sharp, without its term for the form of a call."""
    rules = ["last", {"mix": {"weights": {"marginal": 0.5}, "roles": ["worker"]}}]
    batch = sharp_batch(tmp_path, reward={"rules": rules})
    expected = {"scout": [0.9934, 0.1987, -1.3908, 0.1987], "clerk": [0.1987, 0.9934, -1.3908, 0.1987]}
    for worker, numbers in expected.items():
        own = credits(batch, worker)
        assert len(own) == 4 and all(found == pytest.approx(numbers, abs=1e-3) for found in own.values())
    marginal = [d.utterances[1].rewards["marginal"] for d in batch.dialogues[:4]]
    assert marginal == [1, 0, 0, 0]
    assert "marginal" not in batch.dialogues[0].utterances[0].rewards, "the planner was not left out"


def test_without_marginal_credit_all_workers_earn_the_same(tmp_path):
    batch = sharp_batch(tmp_path, reward={"rules": ["last", {"mix": {"weights": {"marginal": 0.0}}}]})
    for agent in ("scout", "clerk"):
        assert all(own == pytest.approx([0.5, 0.5, -1.5, 0.5], abs=1e-3) for own in credits(batch, agent).values())


def test_the_planner_is_asked_again_only_after_it_saw_something_else(tmp_path):
    values = recipe_values("sharp", tmp_path, task={"largest": 4}, branching={"group": 2})
    values["ppo"] |= {"response_length": 24}
    asked: Counter = Counter()
    answer = plan(OUTCOMES)

    def script(request):
        asked[request.ask.agent, request.turn] += 1
        return answer(request)

    batch = played(scripted_trainer(values, script))
    dialogues = len(batch.dialogues)
    assert dialogues == 8
    assert asked["planner", 0] == dialogues, "nobody was left out before the first call"
    assert asked["planner", 1] == 2 * dialogues, "again without the scout"
    assert asked["planner", 2] == 3 * dialogues, "again without each of the two"
    # after another second call the clerk is asked the same, and says what it said
    assert asked["scout", 0] == asked["clerk", 0] == dialogues
    for dialogue in batch.dialogues:
        assert [ablation.without for ablation in dialogue.ablations] == [("scout",), ("clerk",)]
        assert not any(u.trainable for ablation in dialogue.ablations for u in ablation.utterances)
        numbers = [ablation.rollout for ablation in dialogue.ablations]
        assert min(numbers) >= 2 and len(set(numbers)) == 2


def test_a_record_keeps_what_would_have_happened(tmp_path):
    dialogue = sharp_batch(tmp_path).dialogues[0]
    kept = from_json(to_json(dialogue))
    assert kept == dialogue
    assert [ablation.without for ablation in kept.ablations] == [("scout",), ("clerk",)]
    assert kept.ablations[0].utterances[1].text == "(no reply)"


# -- Shapley values ---------------------------------------------------------------------------------------------------


def groups(**worths):
    return {frozenset(name.replace("none", "")): value for name, value in worths.items()}


def test_shapley_values_add_up_and_marginal_contributions_do_not():
    worths = groups(none=0, a=0.2, b=0.1, c=0, ab=0.6, ac=0.3, bc=0.2, abc=1)
    values = shapley_values(worths)
    assert values == pytest.approx({"a": 0.4667, "b": 0.3667, "c": 0.1667}, abs=1e-4)
    assert sum(values.values()) == pytest.approx(1)
    whole = frozenset("abc")
    marginal = {agent: worths[whole] - worths[whole - {agent}] for agent in "abc"}
    assert marginal == pytest.approx({"a": 0.8, "b": 0.7, "c": 0.4})


def test_shapley_values_are_the_credit_of_advisers(tmp_path):
    """The recipe shapley, in dialogues whose worth without each group of advisers is known."""
    values = recipe_values("shapley", tmp_path, task={"largest": 4}, branching={"group": 2})
    values["ppo"] |= {"response_length": 8}
    right_with = {"abc", "ab", "ac", "a"}  # the judge is right if ann spoke, and bob and cal change nothing
    begun: Counter = Counter()

    def script(request):
        agent = request.ask.agent
        if agent != "judge":
            begun[request.example.id, agent] += 1
            return f"hint {agent[0]}"
        heard = "".join(a for a in "abc" if f"hint {a}" in words(request))
        first = request.label.split(".")[-1]
        useful = first != "1"  # in the second dialogue nothing helps
        return request.example.answer if heard in right_with and useful else "x"

    batch = played(scripted_trainer(values, script))
    by_rollout = defaultdict(list)
    for dialogue in batch.dialogues:
        assert len(dialogue.ablations) == 7
        by_rollout[dialogue.rollout].append({u.agent: u.rewards.get("shapley") for u in dialogue.utterances})
    assert by_rollout[0] == [{"ann": 1.0, "bob": 0.0, "cal": 0.0, "judge": None}] * 4
    for dialogue in batch.dialogues:
        shares = [u.rewards["credit"] for u in dialogue.utterances if u.agent != "judge"]
        alone = next(a for a in dialogue.ablations if len(a.without) == 3)
        outcome = dialogue.utterances[-1].rewards["score"]
        assert sum(shares) == pytest.approx(outcome - alone.utterances[-1].rewards["score"])
        assert dialogue.utterances[-1].rewards["credit"] == outcome


# -- in general -------------------------------------------------------------------------------------------------------


def test_with_real_models_a_conversation_that_goes_on_keeps_its_tokens(tmp_path):
    """Bob's second answer without ann follows his first one, token by token, and shows nothing of her."""
    values = recipe_values("ccpo", tmp_path, task={"largest": 4}, branching={"group": 2})
    values["protocol"] = {"name": "debate", "turns": 2}
    values["branching"] = {"group": 2, "ablate": {"who": ["ann"]}}
    agent = values["agents"]["thinker"]
    values["agents"] = {"ann": dict(agent), "bob": dict(agent)}
    values["schedule"] = {}
    values["ppo"] |= {"response_length": 4, "num_mini_batches": 1}
    from maporl.runs.build import build_trainer

    batch = played(build_trainer(from_dict(values, "test"), quiet=True))
    for dialogue in batch.dialogues:
        (ablation,) = dialogue.ablations
        first, second = (next(u for u in d.utterances if u.agent == "bob") for d in (dialogue, ablation))
        assert second.response_ids == first.response_ids
        again = [u for u in ablation.utterances if u.agent == "bob"][1]
        before = [*first.prompt_ids, *first.response_ids]
        assert again.prompt_ids[: len(before)] == before
        assert again.parents == () or all(ablation.utterances[p].agent == "bob" for p in again.parents)
    assert {row.utterance.agent for row in rows(batch)} == {"ann", "bob"}
    assert len(rows(batch)) == 4 * len(batch.dialogues), "nobody is trained on ablations"


def test_several_samples_are_averaged(tmp_path):
    values = recipe_values("ccpo", tmp_path, task={"largest": 4}, schedule={"round_robin": None})
    values["branching"] = {"group": 2, "ablate": {"who": ["thinker"], "samples": 4}}
    values["reward"]["rules"] = ["last", {"mix": {"weights": {"marginal": 1.0}}}]
    values["ppo"] |= {"response_length": 8, "num_mini_batches": 1}
    alone: Counter = Counter()

    def script(request):
        if request.ask.agent == "thinker":
            return "t"
        if "thinker: t" in words(request):
            return request.example.answer
        alone[request.example.id] += 1
        return request.example.answer if alone[request.example.id] % 4 == 0 else "x"

    batch = played(scripted_trainer(values, script))
    assert {d.utterances[0].rewards["marginal"] for d in batch.dialogues} == {1.5}  # scores are 2 and 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"branching": {"ablate": {"who": []}}}, "branching.ablate.who: expected at least one"),
        ({"branching": {"ablate": {"who": ["thinker", "thinker"]}}}, "who: names an agent twice"),
        ({"branching": {"ablate": {"who": ["nobody"]}}}, "who: 'nobody' does not play"),
        ({"branching": {"ablate": {"who": list("abcde"), "how": "coalitions"}}}, "name at most 4"),
        ({"reward": {"rules": ["last"]}}, "no rule reads what the agents contributed"),
        ({"branching": {"ablate": None}}, "reads the reward 'marginal', which nothing gives here"),
        (
            {"reward": {"rules": [{"mix": {"weights": {"shapley": 1.0}}}]}},
            "reads the reward 'shapley', which nothing gives",
        ),
        ({"protocol": {"name": "refine"}}, "no agent declines, so something must stand"),
        ({"branching": {"how": "tree", "group": 4}, "protocol": {"answering": "all"}}, "tree"),
    ],
)
def test_what_cannot_be_left_out_is_refused(tmp_path, changes, expected):
    values = recipe_values("ccpo", tmp_path, task={"largest": 4})
    for section, own in changes.items():
        values[section] = own if "name" in own else values[section] | own
    with pytest.raises(ValueError, match=expected):
        from_dict(values, "test")


@pytest.mark.parametrize(
    ("recipe", "times"), [("ccpo", "1 more time "), ("sharp", "2 more times "), ("shapley", "7 more times ")]
)
def test_a_check_says_how_many_dialogues_are_played_again(tmp_path, recipe, times):
    values = recipe_values(recipe, tmp_path, task={"largest": 4})
    found = check_run(from_dict(values, "test"))
    assert f", each played {times}without agents into" in next(line for line in found if line.startswith("run:"))


def test_a_dialogue_in_which_nobody_is_left_to_answer_is_named(tmp_path):
    values = recipe_values("ccpo", tmp_path, task={"largest": 4}, branching={"group": 2, "ablate": {"who": ["solver"]}})
    values["ppo"] |= {"response_length": 8, "num_mini_batches": 1}
    with pytest.raises(ConfigError, match="without solver nobody answers question"):
        played(scripted_trainer(values, lambda request: "x"))
