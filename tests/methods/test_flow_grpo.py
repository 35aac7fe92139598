"""What the recipe flow_grpo really trains on, through the trainer's own steps. The numbers were worked out by hand."""

import math

import pytest
from recipe_runs import loss_and_gradients, rollout_of
from scripted_training import played, recipe_values, rows, scripted_trainer

pytest.importorskip("bm25s", reason="needs the extra search")


THOUGHT = ["planner", "thinker", "verifier"]


def in_the_flow(tmp_path, script, **advantage):
    values = recipe_values("flow_grpo", tmp_path, questions=1, branching={"group": 3}, advantage=advantage)
    return scripted_trainer(values, script)


def script(request):
    """Rollout 0 searches and stops, and is right. Wrong are 1, which names nobody, thinks, and searches, and 2, which
    thinks and stops."""
    rollout, role = rollout_of(request), request.ask.role
    start = request.example.meta["start"]
    if role == "orchestrator":
        named = {0: ["searcher"], 1: ["nobody", "thinker", "searcher"], 2: ["thinker"]}[rollout]
        return f"<next>{named[request.turn]}: who is {start}</next>"
    if role == "verifier":
        return "<verify>stop</verify>" if rollout != 1 else "<verify>continue</verify>"
    if role == "generator":
        return request.example.answer if rollout == 0 else start
    if request.ask.agent == "searcher" and request.ask.continues is None:
        return f"<search>{start}</search>"
    return "kr"


def test_every_plan_earns_the_outcome_and_is_compared_with_all_plans_of_the_question(tmp_path):
    """Five plans earn 1, 0, 0, 0, 0: their mean is 0.2 and their unbiased variance 0.2, so 0.8 / 0.4472 and -0.2 /
    0.4472."""
    trainer = in_the_flow(tmp_path, script)
    batch = played(trainer)
    assert [[u.agent for u in d.utterances] for d in batch.dialogues] == [
        ["planner", "searcher", "searcher", "verifier", "generator"],
        ["planner", "verifier", *THOUGHT, "planner", "searcher", "searcher", "verifier", "generator"],
        [*THOUGHT, "generator"],
    ]
    assert [d.outcome for d in batch.dialogues] == [1, 3, 1]
    assert list(batch.token_batches) == ["planner"], "the others are frozen"
    found = rows(batch)
    assert [row.utterance.rewards["credit"] for row in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row.advantage for row in found] == pytest.approx([1.78885] + [-0.44721] * 4, abs=1e-5)
    assert {row.weight for row in found} == {1.0}
    (call,) = (call for u in batch.dialogues[0].utterances for call in u.calls)
    assert call.name == "search" and batch.dialogues[0].example.answer in call.result.text, "a search is worth naming"
    third = found[3].utterance
    assert third.fresh and third.messages[0]["content"].count("Step ") == 2, "a plan is made from the memory"


def test_rollouts_may_be_compared_in_place_of_plans(tmp_path):
    """Three rollouts earn 1, 0, 0: the mean is 1/3 and the unbiased deviation 0.57735."""
    found = rows(played(in_the_flow(tmp_path, script, unit="rollout")))
    assert [row.advantage for row in found] == pytest.approx([1.15470] + [-0.57735] * 4, abs=1e-5)


def test_the_loss_is_a_token_mean_with_an_uneven_dual_clip_and_a_k3_kl(tmp_path):
    """The gradient of a token is (-A r + 0.001 (1 - 1 / r)) / tokens of all plans, and without its first part where r
    is clipped."""
    trainer = in_the_flow(tmp_path, script)
    batch = played(trainer)
    (tokens,) = batch.token_batches.values()
    found, everything = rows(batch), int(tokens.sampled_mask.sum())
    unclipped = {1.25: (1, 1), 1.35: (0, 1), 0.85: (1, 1), 0.75: (1, 0), 3.5: (0, 0)}  # where A > 0, and where A < 0
    for ratio, (good, bad) in unclipped.items():
        _, gradients = loss_and_gradients(trainer, tokens, shift=math.log(ratio))
        assert len({len(gradient) for gradient in gradients}) > 1, "plans of several lengths"
        for row, gradient in zip(found, gradients, strict=True):
            first = -row.advantage * ratio * (good if row.advantage > 0 else bad)
            expected = (first + 0.001 * (1 - 1 / ratio)) / everything
            assert gradient.tolist() == pytest.approx([expected] * len(gradient), rel=1e-3)
