"""What the recipe puppeteer really trains on, through the trainer's own steps. The numbers were worked out by hand."""

import pytest
from recipe_runs import loss_and_gradients
from scripted_training import played, recipe_values, rows, scripted_trainer


def script(request):
    """The orchestrator asks the solver, who says 6 tokens, the critic, who says 4 and is right, and ends."""
    if request.ask.role == "orchestrator":
        return f"<next>{('solver', 'critic', 'end')[request.turn]}</next>"
    return "hello" if request.ask.agent == "solver" else f"{int(request.example.answer):03d}"


def puppeteer(folder):
    """The recipe on one question, with a price for every two tokens."""
    one = {"per_device_train_batch_size": 1}
    return recipe_values("puppeteer", folder, protocol={"per_tokens": 2}, training=one, task={"largest": 4})


def test_the_orchestrator_earns_the_outcome_at_its_end_and_pays_for_the_words_of_others(tmp_path):
    """Of four steps, the first costs 0.1 log2(1 + 1/5) 6 / 2 = 0.07891, the second 0.1 log2(1 + 2/5) 4 / 2 = 0.09709.
    So the namings earn 0.99 (0.99 - 0.09709) - 0.07891 = 0.80507, 0.99 - 0.09709 = 0.89291, and 1."""
    values = puppeteer(tmp_path)
    trainer = scripted_trainer(values, script)
    batch = played(trainer)
    (dialogue,) = batch.dialogues
    said = [(u.agent, len(u.response_ids), round(u.rewards["credit"], 5)) for u in dialogue.utterances]
    assert [agent for agent, _, _ in said] == ["puppeteer", "solver", "puppeteer", "critic", "puppeteer"]
    assert [credit for _, _, credit in said] == [-0.07891, 1.0, -0.09709, 1.0, 1.0]
    assert [tokens for _, tokens, _ in said][1::2] == [6, 4]
    ((policy, tokens),) = batch.token_batches.items()
    found = rows(batch)
    assert policy == "puppeteer" and [row.advantage for row in found] == pytest.approx(
        [0.80507, 0.89291, 1.0], abs=1e-5
    )
    _, gradients = loss_and_gradients(trainer, tokens)
    for row, gradient in zip(found, gradients, strict=True):
        assert gradient.tolist() == pytest.approx([-row.advantage / 3] * len(gradient), rel=1e-5), "REINFORCE"


@pytest.mark.parametrize(("right", "last"), [(True, 0.8728), (False, -1.1272)])
def test_a_dialogue_that_is_not_ended_pays_the_outcome_to_the_last_naming(tmp_path, right, last):
    """Four replies of 3 tokens cost 0.15 log2(1 + t / 5) each, and nobody is asked once more."""

    def endless(request):
        if request.ask.role == "orchestrator":
            return "<next>writer</next>"
        return f"{int(request.example.answer) + (not right):02d}"

    values = puppeteer(tmp_path)
    (dialogue,) = played(scripted_trainer(values, endless)).dialogues
    namings = [u.rewards["credit"] for u in dialogue.utterances if u.role == "orchestrator"]
    assert namings == pytest.approx([-0.03946, -0.07281, -0.10171, last], abs=1e-4) and dialogue.outcome == 4
