"""Options of recipes that must be those of the published code, through the trainer's own steps.

Every test reads the recipe's own file. The numbers were worked out by hand from the code's formulas.
"""

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer


def rollout_of(request):
    """Return the number of a request's dialogue among those on the same question."""
    return int(request.label.rsplit(".", 1)[1])


def one_question(name, tmp_path, script, **sections):
    """Return a trainer of the recipe that plays one question, and the batch of its first update."""
    sections["training"] = {"per_device_train_batch_size": 1} | sections.get("training", {})
    sections["ppo"] = {"num_mini_batches": 1} | sections.get("ppo", {})
    trainer = scripted_trainer(recipe_values(name, tmp_path, **sections), script)
    return trainer, played(trainer)


def of(batch, agent):
    return [round(row.advantage, 4) for row in rows(batch) if row.utterance.agent == agent]


# -- Dr. MAS ------------------------------------------------------------------------------------------------------------

VERDICTS = ["<verify>reject</verify>", "?", "<verify>approve</verify>", "<verify>reject</verify>"]


def solver_and_verifier(request):
    """Rollouts 0 and 2 are right, 1 and 3 wrong; the verdict of 1 cannot be read."""
    rollout = rollout_of(request)
    if request.ask.role == "verifier":
        return VERDICTS[rollout]
    return request.example.answer if rollout in (0, 2) else "100"


def test_dr_mas_ends_with_the_answer_to_the_first_rejection(tmp_path):
    _, batch = one_question("dr_mas", tmp_path, solver_and_verifier, branching={"group": 4})
    assert ["".join(u.agent[0] for u in d.utterances) for d in batch.dialogues] == ["svs", "svs", "sv", "svs"]


def test_dr_mas_charges_each_agent_for_its_own_form(tmp_path):
    """Worked by hand: solvers 1 1 0 1 0 0, verifiers 1 -.1 1 0, with the approval of the published code."""
    approval = r"(?s)<verify>approve</verify>|\A(?!.*<verify>reject</verify>)"
    _, batch = one_question(
        "dr_mas", tmp_path, solver_and_verifier, branching={"group": 4}, protocol={"approval": approval}
    )
    credits = [[round(u.rewards["credit"], 6) for u in d.utterances] for d in batch.dialogues]
    assert credits == [[1, 1, 1], [0, -0.1], [1, 1], [0, 0, 0]]
    assert of(batch, "solver") == [0.9129, 0.9129, -0.9129, 0.9129, -0.9129, -0.9129]
    assert of(batch, "verifier") == [0.8641, -0.9464, 0.8641, -0.7818]


@pytest.mark.parametrize(
    ("words", "cost"),
    [
        ("so <verify>approve</verify>", 0.0),
        ("<verify>\nmaybe\n</verify>", 0.0),
        ("approve", 0.1),
        ("<verify>approve", 0.1),
        ("\u5bf9 <verify>approve</verify>", 0.1),
    ],
)
def test_a_verdict_of_dr_mas_needs_its_tags_and_no_chinese(tmp_path, words, cost):
    values = recipe_values("dr_mas", tmp_path, branching={"group": 2})
    values["agent_defaults"]["tiny"]["alphabet"] += "\u5bf9"
    trainer = scripted_trainer(values, lambda r: words if r.ask.role == "verifier" else r.example.answer)
    for dialogue in trainer.advantage(trainer.score(trainer.collected())).dialogues:
        assert {round(u.rewards["credit"], 6) for u in dialogue.utterances if u.agent == "verifier"} == {1 - cost}
        assert {u.rewards["credit"] for u in dialogue.utterances if u.agent == "solver"} == {1.0}
