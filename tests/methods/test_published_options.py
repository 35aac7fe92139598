"""Options of recipes that must be those of the published code, through the trainer's own steps.

Every test reads the recipe's own file. The numbers were worked out by hand from the code's formulas.
"""

import pytest
import torch
from recipe_runs import rollout_of
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.loops.stages import trainer_options
from maporl.validation.load import from_dict


def one_question(name, tmp_path, script, **sections):
    """The batch of an update of the recipe that plays one question."""
    return played(scripted_trainer(recipe_values(name, tmp_path, questions=1, **sections), script))


def of(batch, agent):
    return [round(row.advantage, 4) for row in rows(batch) if row.utterance.agent == agent]


# -- Dr. MAS -----------------------------------------------------------------------------------------------------------

VERDICTS = ["<verify>reject</verify>", "?", "<verify>approve</verify>", "<verify>reject</verify>"]


def solver_and_verifier(request):
    """Rollouts 0 and 2 are right, 1 and 3 wrong; the verdict of 1 cannot be read."""
    rollout = rollout_of(request)
    if request.ask.role == "verifier":
        return VERDICTS[rollout]
    return request.example.answer if rollout in (0, 2) else "100"


@pytest.mark.parametrize(
    ("words", "rejects"),
    [
        ("Wrong. <verify>\nreject </verify>", True),
        ("<verify>reject</verify>\n<verify>approve</verify>", False),
        ("<verify>Reject</verify>", False),
        ("<verify>rejected</verify>", False),
        ("reject", False),
    ],
)
def test_only_a_plain_rejection_of_dr_mas_rejects(tmp_path, words, rejects):
    batch = one_question("dr_mas", tmp_path, lambda r: words if r.ask.role == "verifier" else "100")
    assert {"".join(u.agent[0] for u in d.utterances) for d in batch.dialogues} == {"svs" if rejects else "sv"}


def test_dr_mas_charges_each_agent_for_its_own_form(tmp_path):
    """Worked by hand: solvers 1 1 0 1 0 0, verifiers 1 -.1 1 0. A dialogue ends with the answer to the first
    rejection."""
    batch = one_question("dr_mas", tmp_path, solver_and_verifier, branching={"group": 4})
    assert ["".join(u.agent[0] for u in d.utterances) for d in batch.dialogues] == ["svs", "sv", "sv", "svs"]
    credits = [[round(u.rewards["credit"], 6) for u in d.utterances] for d in batch.dialogues]
    assert credits == [[1, 1, 1], [0, -0.1], [1, 1], [0, 0, 0]]
    assert of(batch, "solver") == [0.9129, 0.9129, -0.9129, 0.9129, -0.9129, -0.9129]
    assert of(batch, "verifier") == [0.8641, -0.9464, 0.8641, -0.7818]


@pytest.mark.parametrize(
    ("words", "cost"),
    [
        ("so <verify>approve</verify>", 0.0),
        ("<verify>\nmaybe\n</verify>", 0.0),
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


# -- CoMLRL: IAC, MAAC and MAGRPO --------------------------------------------------------------------------------------

RIGHT = [[2], [1, 2], [0, 1], [1, 0]]
"""How many of the two agents are right in each turn of four questions. The first ends after its first turn."""


def partly_right(right):
    """Return a script by which so many agents are right in each turn of the questions, in their order."""
    numbers = {}

    def script(request):
        turns = right[numbers.setdefault(request.example.id, len(numbers)) % len(right)]
        return request.example.answer if ["ann", "bob"].index(request.ask.agent) < turns[request.turn] else "100"

    return script


def actor_critic(name, tmp_path, right=RIGHT):
    """Return a trainer whose critics say .5 in the first turn and .25 in the second, and its first update."""
    trainer = scripted_trainer(recipe_values(name, tmp_path), partly_right(right))
    heads = [trainer.learning.central.head] if name == "maac" else [v.value_head for v in trainer.learners.values()]
    with torch.no_grad():
        for head in heads:
            head.linear.bias.copy_(torch.tensor([0.5, 0.25]))
    return trainer, heads[0], played(trainer)


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_actor_critics_normalise_one_step_differences(tmp_path, name):
    """First .5 .225 -.275 .225, whose mean is .16875 and population deviation .27972; then .75 .25 -.25."""
    _, _, batch = actor_critic(name, tmp_path)
    for agent in ("ann", "bob"):
        own = [row for row in rows(batch) if row.utterance.agent == agent]
        first, second = ([row.advantage for row in own if row.utterance.turn == turn] for turn in (0, 1))
        assert first == pytest.approx([1.1842, 0.2011, -1.5864, 0.2011], abs=1e-4)
        assert second == pytest.approx([1.2247, 0, -1.2247], abs=1e-4)


def test_a_single_difference_stays_as_it_is(tmp_path):
    _, _, batch = actor_critic("iac", tmp_path, [[2], [2], [2], [0, 1]])
    assert [row.advantage for row in rows(batch) if row.utterance.turn == 1] == pytest.approx([0.5 - 0.25] * 2)


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_actor_critics_weigh_the_whole_square_of_the_critics_error(tmp_path, name):
    """The gradient of .6 (V - R)^2, the mean over seven answers, with the targets r + .9 V': 1 .725 .225 .725, then 1
    .5 0."""
    trainer, head, batch = actor_critic(name, tmp_path)
    tokens = batch.token_batches["ann"]
    trainer.learners["ann"].accumulate(tokens, torch.arange(len(tokens)))
    errors = [0.5 * 4 - (1 + 0.725 + 0.225 + 0.725), 0.25 * 3 - (1 + 0.5 + 0)]
    assert head.linear.bias.grad.tolist() == pytest.approx([0.6 * 2 * error / 7 for error in errors], abs=1e-5)


@pytest.mark.parametrize("name", ["iac", "maac"])
def test_actor_critics_end_after_a_turn_that_is_good_enough(tmp_path, name):
    _, _, batch = actor_critic(name, tmp_path)
    assert [(d.turns(), d.outcome) for d in batch.dialogues] == [(1, "enough"), (2, None), (2, None), (2, None)]


def test_magrpo_normalises_among_siblings(tmp_path):
    """Returns 1 + .9 x .5, .5 + .9 x 1 and 0 + .9 / 3: deviations .4 .35 -.75 from 1.05, divided by .53072."""
    right = {0: [2, 2], 1: [1, 2], 2: [0, 0], 3: [1], 4: [0], 5: [2], 6: [2], 7: [0], 8: [2]}

    def script(request):
        turns, number = right[rollout_of(request)], ["ann", "bob"].index(request.ask.agent)
        return request.example.answer if number < turns[request.turn % len(turns)] else "100"

    batch = one_question("magrpo", tmp_path, script, branching={"group": 3})
    own = [row for row in rows(batch) if row.utterance.agent == "ann"]
    first, second = ([row.advantage for row in own if row.utterance.turn == turn] for turn in (0, 1))
    assert sorted(first) == pytest.approx([-1.4132, 0.6595, 0.7537], abs=1e-4)
    expected = [-1.2247, -0.7071, -0.7071, 0, 0, 0, 0, 1.2247, 1.4142]
    assert sorted(second) == pytest.approx(expected, abs=1e-4)


# -- AgentPO -----------------------------------------------------------------------------------------------------------


def test_the_critiques_of_a_group_are_of_one_draft(tmp_path):
    """Whether a draft is right is the actor's luck. Four critiques of one draft, of which the first helps."""

    def script(request):
        if request.ask.agent == "collaborator":
            return f"critique {rollout_of(request)}"
        helped = "critique 0" in request.ask.messages[-1]["content"]
        return request.example.answer if helped else "100"

    values = recipe_values("agentpo_critique", tmp_path)
    assert values["branching"]["group"] == [1, 3, 1]
    batch = one_question("agentpo_critique", tmp_path, script, branching={"group": [1, 4, 1]})
    drafts, critiques, answers = zip(*(d.utterances for d in batch.dialogues), strict=True)
    assert len({u.sample for u in drafts}) == 1 and len({u.text for u in critiques}) == len(answers) == 4
    assert [round(row.advantage, 4) for row in rows(batch)] == [1.5, -0.5, -0.5, -0.5]
    assert {row.utterance.agent for row in rows(batch)} == {"collaborator"}


# -- CoMLRL: MADPO and MARLHF ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["madpo", "marlhf"])
def test_a_step_on_pairs_reads_four_of_them(name, tmp_path):
    config = from_dict(recipe_values(name, tmp_path), name)
    options = trainer_options(config, config.loop.stages[0], None, tmp_path, quiet=True)
    assert options["per_device_train_batch_size"] == 4 and "gradient_accumulation_steps" not in options
