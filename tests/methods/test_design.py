"""MetaAgent-X: plans of teams and their executions, through the trainer's own steps."""

from collections import Counter, defaultdict

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.methods.design import Design
from maporl.validation.load import from_dict


def designed(tmp_path, plans, right):
    """The next update of ``plans`` for each question. The k-th last word of plan p's executions is right as
    ``right[p][k]``."""
    values = recipe_values("metaagent_x", tmp_path, questions=1, task={"largest": 4})
    values["branching"] |= {"group": [len(plans), max(map(len, right)), 1]}
    values["protocol"] = {"name": "design"}  # its own texts
    values["schedule"] = {}
    values["ppo"] |= {"response_length": 60}
    made, ended = Counter(), Counter()

    def script(request):
        question = request.example.id
        if request.ask.role == "designer":
            made[question] += 1
            return plans[made[question] - 1]
        asked = request.ask.messages[-1]["content"]
        number = next(n for n, plan in enumerate(plans) if f"You are P{n}" in asked and f"P{n}" in plan)
        if not request.ask.answers:
            return f"thought of P{number}"
        ended[question, number] += 1
        return request.example.answer if right[number][ended[question, number] - 1] else "99"

    return played(scripted_trainer(values, script))


def by_role(batch):
    """The advantages of designs, and those of what is said in the executions of each design, in order."""
    designs, executions = {}, defaultdict(list)
    for row in rows(batch):
        if row.utterance.role == "designer":
            designs[row.utterance.text] = row.advantage
        else:
            executions[row.dialogue.utterances[0].text].append(row.advantage)
    return designs, dict(executions)


TWO = ["P0: go", "P1: go"]


def test_designs_and_executions_are_compared_as_published(tmp_path):
    """The numbers of metaagent_x for executions 1, 0 and 1, 1: designs are worth 1/2 and 1. All answers are readable,
    which adds 0.4 to each of them."""
    batch = designed(tmp_path, TWO, [[1, 0], [1, 1]])
    credits = {(row.utterance.role, round(row.utterance.rewards["credit"], 6)) for row in rows(batch)}
    assert credits == {("designer", 0.9), ("designer", 1.4), ("executor", 1.4), ("executor", 0.4)}
    designs, executions = by_role(batch)
    assert designs == pytest.approx({"P0: go": -0.7071, "P1: go": 0.7071}, abs=1e-3)
    assert executions == {
        "P0: go": pytest.approx([0.5, -1.5], abs=1e-3), "P1: go": pytest.approx([0.5, 0.5], abs=1e-3)
    }  # fmt: skip
    assert len(rows(batch)) == 6  # a design is one row, however often it is carried out


def test_all_that_is_said_in_an_execution_earns_what_its_answer_earns(tmp_path):
    """P0 has two members: rows 1.4, 1.4, 0.4, 0.4 and 0.4, 0.4 of P1. Mean 0.7333, unbiased deviation 0.5164."""
    batch = designed(tmp_path, ["P0: think\nP0: end", "P1: go"], [[1, 0], [0, 0]])
    designs, executions = by_role(batch)
    assert designs == pytest.approx({"P0: think\nP0: end": 0.7071, "P1: go": -0.7071}, abs=1e-3)
    assert executions == {
        "P0: think\nP0: end": pytest.approx([1.2910, 1.2910, -0.6455, -0.6455], abs=1e-3),
        "P1: go": pytest.approx([-0.6455, -0.6455], abs=1e-3),
    }
    dialogue = next(d for d in batch.dialogues if len(d.utterances) == 3)
    plan, thought, answer = dialogue.utterances
    assert (plan.parents, thought.parents, answer.parents) == ((), (0,), (0, 1)) and dialogue.outcome == 2
    assert (plan.answers, thought.answers, answer.answers) == (False, False, True)
    question = dialogue.example.question
    assert thought.messages == [{"role": "user", "content": f"{question}\n\nYou are P0. think"}]
    said = f"{question}\n\nOthers have said:\n\nP0: thought of P0\n\nYou are P0. end"
    assert answer.messages == [{"role": "user", "content": said}]


def test_a_design_that_cannot_be_carried_out_earns_nothing(tmp_path):
    """Worth 0, 0.9 and 0.4 with the readable answers: mean 0.4333 and deviation 0.4509."""
    batch = designed(tmp_path, ["no", "P1: go", "P2: go"], [[], [1, 0], [0, 0]])
    designs, executions = by_role(batch)
    assert designs == pytest.approx({"no": -0.9610, "P1: go": 1.0349, "P2: go": -0.0739}, abs=1e-3)
    assert set(executions) == {"P1: go", "P2: go"}
    assert [len(d.utterances) for d in batch.dialogues].count(1) == 1


def test_executor_and_designer_learn_in_turn(tmp_path):
    roles = []
    values = recipe_values("metaagent_x", tmp_path, questions=1)
    assert from_dict(values, "test").schedule.round_robin.agents == ["executor", "designer"]
    values["schedule"]["round_robin"]["every"] = 2
    values["branching"]["group"] = [2, 2, 1]
    trainer = scripted_trainer(values, lambda r: "A: go" if r.ask.role == "designer" else r.example.answer)
    for _ in range(5):
        batch = played(trainer)
        roles.append({row.utterance.role for row in rows(batch)})
        trainer.state.global_step += 1
    assert roles == [{"executor"}] * 2 + [{"designer"}] * 2 + [{"executor"}]


def test_plans_are_read_as_models_write_them():
    plan = "Sure:\n1. **Solver**: Solve {it}.\n- Checker: Check it: again.\nno member\n* Judge : Decide."
    assert Design().members(plan) == [("Solver", "Solve {it}."), ("Checker", "Check it: again."), ("Judge", "Decide.")]
    for name in ("Fact-Checker", "Solver (math)", "Agent #2", "O'Neil", "Dr. Smith", "Step 1 - Solver", "数学家"):
        assert Design().members(f"{name}: Go on.") == Design().members(f"2) **{name}:** Go on.") == [(name, "Go on.")]
    assert Design().members("数学家：解题") == [("数学家", "解题")]
    for prose in ("See https://a.b/c", "Time is 10:30 now", "Here is the plan:"):
        assert Design().members(prose) == []
    assert Design(steps=1).members(plan) == [("Solver", "Solve {it}.")] and Design().members("Solver: ") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps: expected at least 1"),
        ({"designer": "executor", "executor": "executor"}, "expected two agents"),
        ({"member": "(a)"}, "expected two groups"),
        ({"example": "nobody"}, "a plan in which member finds somebody"),
        ({"later": "{instruction}"}, "must contain {others}"),
    ],
)
def test_a_design_that_cannot_work_is_refused(tmp_path, options, words):
    values = recipe_values("metaagent_x", tmp_path, protocol=options)
    with pytest.raises(ValueError, match=words):
        from_dict(values, "test")
