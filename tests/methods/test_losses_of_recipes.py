"""What recipes really train on: statistics, loss weights, ratios and critics, through the trainer's own steps.

Every test reads the recipe's own file. The numbers were worked out by hand from the papers' formulas.
"""

import copy
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from invariant_runs import Processes
from played_games import perfect
from recipe_runs import loss_and_gradients, one_step_values, rollout_of
from recipe_runs import script as judged_answers
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.errors import ConfigError, refuse
from maporl.run import ResolvedRun
from maporl.training.doubts import doubts
from maporl.types import Example
from maporl.validation.load import from_dict, load


def calling(calls, right=lambda rollout: True, worker=lambda rollout: "seen"):
    """Return a script in which the planner of rollout k calls ``calls[k]`` workers, and then answers right or wrong."""

    def script(request):
        rollout = rollout_of(request)
        if request.ask.role == "worker":
            return worker(rollout)
        if request.turn < calls[rollout]:
            return f"<call>{rollout}{request.turn}</call>"
        return str(request.example.answer) if right(rollout) else "-1"

    return script


def of_role(batch, role):
    return [row for row in rows(batch) if row.utterance.role == role]


# -- R3: one main rollout counts once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [[3, 0], [9, 0]])
def test_more_workers_do_not_shrink_what_the_planner_of_matpo_learns(calls, tmp_path):
    """The gradient of each of the planner's tokens is A / 2 rollouts / length, however many workers were called."""
    one_question = {"training": {"per_device_train_batch_size": 1}, "branching": {"group": 2}}
    values = recipe_values("matpo", tmp_path, protocol={"calls": 9}, **one_question)
    trainer = scripted_trainer(values, calling(calls, right=lambda rollout: rollout == 0))
    batch = played(trainer)
    (tokens,) = batch.token_batches.values()
    _, gradients = loss_and_gradients(trainer, tokens)
    found = rows(batch)
    planner = [i for i, row in enumerate(found) if row.utterance.role == "planner"]
    assert len(planner) == sum(calls) + 2
    for i in planner:
        length = len(found[i].utterance.response_ids)
        assert gradients[i].tolist() == pytest.approx([-found[i].advantage / 2 / length] * length, rel=1e-5)
    assert {round(found[i].advantage, 3) for i in planner} == {0.707, -0.707}


@pytest.mark.parametrize("name", ["matpo", "m_grpo"])
def test_a_call_and_return_batch_may_be_cut_anywhere(name, tmp_path):
    """Micro-batches add up to the whole, and minibatches to the number of them times the whole."""
    values = recipe_values(name, tmp_path, questions=1, branching={"group": 3})
    trainer = scripted_trainer(values, calling([3, 1, 0], right=lambda rollout: rollout == 0))
    batch = played(trainer)
    for policy, tokens in batch.token_batches.items():
        whole, gradients = loss_and_gradients(trainer, tokens, shift=0.01)
        parts = [torch.tensor(group) for group in tokens.inseparable()]
        assert len(parts) > 1
        cut, cut_gradients = loss_and_gradients(trainer, tokens, parts, shift=0.01)
        assert cut == pytest.approx(whole, abs=1e-6)
        for gradient, other in zip(gradients, cut_gradients, strict=True):
            torch.testing.assert_close(gradient, other)
        if name == "matpo":
            trainer.args.num_mini_batches = 2
            halves = [loss_and_gradients(trainer, tokens.take(part), shift=0.01)[0]
                      for part in trainer.learning.minibatches(policy, tokens, 0, 0)]  # fmt: skip
            assert len(halves) == 2 and sum(halves) == pytest.approx(2 * whole, abs=1e-6), policy


# -- R7: M-GRPO -------------------------------------------------------------------------------------------------------


def m_grpo(tmp_path):
    """Return M-GRPO's trainer and batch with 1, 3, 2 and 2 calls and rewards 1, .1, .1 and 1."""
    values = recipe_values("m_grpo", tmp_path, questions=1, branching={"group": 4})
    trainer = scripted_trainer(values, calling([1, 3, 2, 2], right=lambda rollout: rollout in (0, 3)))
    return trainer, played(trainer)


def test_m_grpo_compares_the_main_agent_over_rollouts_and_workers_over_aligned_replies(tmp_path):
    _, batch = m_grpo(tmp_path)
    assert {u.rewards["credit"] for d in batch.dialogues for u in d.utterances} == {1.0, 0.1}
    planner, worker = of_role(batch, "planner"), of_role(batch, "worker")
    assert [round(abs(row.advantage), 4) for row in planner] == [0.8660] * 12
    assert [round(abs(row.advantage), 4) for row in worker] == [0.9842] * 8
    assert [row.weight for row in worker] == pytest.approx([8, 8 / 3, 8 / 3, 8 / 3, 4, 4, 4, 4])
    assert [row.weight for row in planner] == pytest.approx([1 / 2] * 2 + [1 / 4] * 4 + [1 / 3] * 6)


def test_m_grpo_gives_each_rollout_of_the_main_agent_one_ratio_and_a_quarter_of_the_loss(tmp_path):
    """With new - old = .01 at every token, the ratio of a rollout is exp(.01 n) for its n planner tokens."""
    trainer, batch = m_grpo(tmp_path)
    tokens = batch.token_batches["planner"]
    trainer.args.cliprange = 10.0
    _, gradients = loss_and_gradients(trainer, tokens, shift=0.01)
    by_rollout = {}
    for i, row in enumerate(rows(batch)[: len(tokens)]):
        by_rollout.setdefault(batch.samples["planner"][i].columns.values["rollout"], []).append((i, row))
    assert [len(found) for found in by_rollout.values()] == [2, 4, 3, 3]
    for found in by_rollout.values():
        length = sum(len(row.utterance.response_ids) for _, row in found)
        expected = -found[0][1].advantage * float(torch.exp(torch.tensor(0.01 * length))) / 4
        for i, _ in found:
            assert gradients[i].tolist() == pytest.approx([expected] * len(gradients[i]), rel=1e-4)


def test_a_trajectory_is_never_cut(tmp_path):
    trainer, batch = m_grpo(tmp_path)
    tokens = batch.token_batches["planner"]
    tokens.tree = replace(tokens.tree, shared=[0] * len(tokens))  # as if templates rewrote what was said before
    trainer.args.num_mini_batches = 2
    cuts = trainer.learning.minibatches("planner", tokens, 0, 0) + tokens.microbatches(torch.arange(len(tokens)), 1)
    for part in cuts:
        rollouts = {batch.samples["planner"][i].columns.values["rollout"] for i in part.tolist()}
        assert len(part) == sum({0: 2, 1: 4, 2: 3, 3: 3}[rollout] for rollout in rollouts)


def test_forked_dialogues_have_no_trajectories(tmp_path):
    values = recipe_values("mhgpo", tmp_path, ppo={"ratio": "trajectory"})
    with pytest.raises(ConfigError, match=r"ppo.ratio: a trajectory is an agent's words in one dialogue"):
        from_dict(values)


# -- R8: one term for an action ---------------------------------------------------------------------------------------


def test_marft_gives_an_utterance_of_two_tokens_the_gradient_of_one_of_eight(tmp_path):
    """Two utterances of 2 and 8 tokens with A = 1: -.5 for every token. A token mean gave -.2 and -.8."""
    values = recipe_values("marft_action", tmp_path, questions=2, protocol={"turns": 1})
    lengths = iter([1, 7])  # and a token that ends the utterance
    trainer = scripted_trainer(values, lambda request: "1" * (next(lengths) if request.ask.agent == "actor" else 1))
    tokens = played(trainer).token_batches["actor"]
    assert sorted(tokens.sampled_mask.sum(1).tolist()) == [2, 8]
    tokens.advantages = tokens.sampled_mask.float()
    _, gradients = loss_and_gradients(trainer, tokens)
    for gradient in gradients:
        assert gradient.tolist() == pytest.approx([-0.5] * len(gradient))


@pytest.mark.parametrize(
    ("shift", "advantage", "expected"),
    # two tokens of ratio 1.15 have 1.3225, two of .85 have .7225: beyond the clip, where the loss is flat on one side
    [(1.15, 1.0, 0.0), (1.15, -1.0, 1.3225), (0.85, 1.0, -0.7225), (0.85, -1.0, 0.0), (1.05, 1.0, -1.1025)],
)
def test_turn_ppo_clips_a_turn_as_a_whole(tmp_path, shift, advantage, expected):
    trainer = scripted_trainer(recipe_values("turn_ppo", tmp_path), perfect)
    (tokens,) = played(trainer).token_batches.values()
    assert set(tokens.sampled_mask.sum(1).tolist()) == {2}, "a move, and its end"
    tokens.advantages = advantage * tokens.sampled_mask.float()
    _, gradients = loss_and_gradients(trainer, tokens, shift=math.log(shift))
    for gradient in gradients:
        assert gradient.tolist() == pytest.approx([expected / len(tokens)] * 2, abs=1e-6)


def test_archer_adds_the_log_probabilities_of_an_utterance(tmp_path):
    """Utterances of 2 and 9 tokens with A = 1: each of their tokens has the gradient -1/n of n utterances, and not of
    all tokens."""
    values = recipe_values("archer", tmp_path, ppo={"response_length": 12})
    trainer = scripted_trainer(values, lambda request: "nonsense" if request.turn else "U")
    tokens = played(trainer).token_batches["shared"]
    assert {2, 9} == set(tokens.sampled_mask.sum(1).tolist())
    tokens.advantages = tokens.sampled_mask.float()
    _, gradients = loss_and_gradients(trainer, tokens)
    for gradient in gradients:
        assert gradient.tolist() == pytest.approx([-1 / len(tokens)] * len(gradient), rel=1e-4)


# -- R10: CoMAS -------------------------------------------------------------------------------------------------------


def test_comas_whitens_over_the_tokens_of_an_agent(tmp_path):
    """Scores 1, .5 and 0 with 2, 10 and 10 tokens; the scorer's reply has the score 0."""
    values = recipe_values("comas", tmp_path, protocol={"rounds": 1}, training={"per_device_train_batch_size": 4})
    trainer = scripted_trainer(values, lambda request: "1")
    batch = trainer.score(trainer.collected())
    uttered = [d.utterances[0] for d in batch.dialogues[:3]]
    for utterance, (credit, length) in zip(uttered, [(1, 2), (0.5, 10), (0, 10)], strict=True):
        utterance.agent = utterance.policy = "ann"
        utterance.rewards["credit"] = credit
        utterance.response_ids = (utterance.response_ids * 10)[:length]
    for dialogue in batch.dialogues:
        for utterance in dialogue.utterances:
            utterance.trainable = any(utterance is u for u in uttered)
    trained = rows(trainer.advantage(batch))
    assert [row.advantage for row in trained] == pytest.approx([2.0725, 0.5527, -0.9672], abs=1e-4)


def test_comas_draws_other_speakers_whenever_a_question_is_asked(tmp_path):
    """One question is asked twice in each of four updates: eight draws, and two processes draw the same eight."""
    values = recipe_values("comas", tmp_path, ppo={"num_mini_batches": 1})

    def speakers(trainer):
        found = {}
        for update in range(4):
            trainer.state.global_step = update
            batch = trainer.next_batch()
            batch.examples = [Example("the same", "1+1=", "2")] * len(batch.examples)
            for dialogue in trainer.collect(batch).dialogues:
                found[update, dialogue.prompt] = "".join(u.agent[0] for u in dialogue.utterances)
        return found

    def trainer_of(questions):
        values["training"]["per_device_train_batch_size"] = questions
        return scripted_trainer(copy.deepcopy(values), lambda request: "1")

    alone = speakers(trainer_of(2))
    assert len(alone) == len(set(alone.values())) == 8
    processes = Processes(2)
    with processes.together():
        trainers = [trainer_of(1) for _ in range(2)]
        first, second = processes.run([partial(speakers, trainer) for trainer in trainers])
    assert first | second == alone and len(first) == len(second) == 4


# -- RLAnything --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ann", "judge"])
def test_the_loss_of_rl_anything_is_a_mean_over_tokens_and_then_over_rows(tmp_path, policy):
    """The gradient of each token is A / rows / length: a long row counts as much as a short one."""

    def script(request):
        said = judged_answers(request)
        return f"so {said}" if request.rng_key[-2] % 2 else said

    trainer = scripted_trainer(one_step_values(tmp_path), script)
    tokens = played(trainer).token_batches[policy]
    _, gradients = loss_and_gradients(trainer, tokens)
    assert len({len(gradient) for gradient in gradients}) > 1
    for i, gradient in enumerate(gradients):
        advantage = float(tokens.advantages[i][tokens.sampled_mask[i]][0])
        expected = [-advantage / len(tokens) / len(gradient)] * len(gradient)
        assert gradient.tolist() == pytest.approx(expected, rel=1e-4)


# -- REINFORCE++ ------------------------------------------------------------------------------------------------------


def test_reinforce_pp_subtracts_the_kl_to_come_and_whitens_over_the_tokens_of_an_agent(tmp_path):
    """Scores 1, .5 and 0 of three tokens each, whose log-ratios to the reference are .1, -.05 and .2, with KL weight
    .1."""
    alone = {"agents": ["ann"], "turns": 1}
    values = recipe_values("reinforce_pp", tmp_path, questions=3, protocol=alone, ppo={"kl_coef": 0.1})
    trainer = scripted_trainer(values, lambda request: "12")
    ann = trainer.learners["ann"]
    compute = ann.annotate

    def with_another_reference(tokens):
        found, said = compute(tokens), tokens.sampled_mask
        assert said.sum(1).tolist() == [3, 3, 3]
        tokens.ref_logprobs[said] = tokens.old_logprobs[said] - torch.tensor([0.1, -0.05, 0.2] * 3)
        return found

    ann.annotate = with_another_reference
    batch = trainer.score(trainer.collected())
    for dialogue, credit in zip(batch.dialogues, (1.0, 0.5, 0.0), strict=True):
        dialogue.utterances[0].rewards["credit"] = credit
    tokens = trainer.advantage(batch).token_batches["ann"]
    assert tokens.advantages[tokens.sampled_mask].tolist() == pytest.approx(
        [1.1431, 1.1662, 1.1546, -0.0115, 0.0115, 0, -1.1662, -1.1431, -1.1546], abs=1e-4
    )


# -- R12: MATPO's reward ----------------------------------------------------------------------------------------------


def test_matpo_pays_for_the_form_of_the_workers(tmp_path):
    """acc 1 0 1 0, format 1 1 1 0, form of the replies 1 .5 0 1."""
    values = recipe_values("matpo", tmp_path, branching={"group": 4}, training={"per_device_train_batch_size": 1})
    replies = {0: ["Answer: 1"], 1: ["Answer: 1", "no"], 2: ["no"], 3: ["Answer: 1"]}
    asked = dict.fromkeys(replies, 0)

    def script(request):
        rollout = rollout_of(request)
        if request.ask.role == "worker":
            asked[rollout] += 1
            return replies[rollout][asked[rollout] - 1]
        if request.turn < len(replies[rollout]):
            return "<call>x</call>"
        return {0: request.example.answer, 1: "Answer: -1", 2: request.example.answer, 3: "none"}[rollout]

    batch = played(scripted_trainer(values, script))
    credits = [{round(u.rewards["credit"], 6) for u in d.utterances} for d in batch.dialogues]
    assert credits == [{1.0}, {0.075}, {0.95}, {0.05}]
    expected = [0.9126, -0.8415, 0.8178, -0.8889]
    for row, sample in zip(rows(batch), batch.samples["shared"], strict=True):
        assert row.advantage == pytest.approx(expected[sample.columns.values["rollout"]], abs=1e-4)


# -- R4: a central critic ---------------------------------------------------------------------------------------------


def wordy(request):
    """Name the speaker and the turn, and answer rightly in the second turn only, which is then played."""
    return f"{request.ask.agent[0]}{request.turn} Answer: {request.example.answer if request.turn else -1}"


def maac(tmp_path):
    return scripted_trainer(recipe_values("maac", tmp_path), wordy)


def test_maac_has_one_critic_that_reads_what_the_others_said(tmp_path):
    trainer = maac(tmp_path)
    ann, bob = trainer.learners.values()
    assert ann.critic.central_values == bob.critic.central_values and ann.value_head is bob.value_head is None
    batch = played(trainer)
    samples = [s for s in batch.samples["ann"] if s.utterance.turn == 1]
    assert len(samples) == 4
    for sample in samples:
        read = ann.tokenizer.decode(sample.critic_prompt_ids)
        first = next(u.text for d in batch.dialogues for u in d.utterances
                     if d.prompt == sample.columns.values["prompt"] and u.agent == "bob" and u.turn == 0)  # fmt: skip
        assert first.startswith("b0") and f"bob, turn 1: {first}" in read


def norm_of(central):
    parameters = [*central.model.parameters(), *central.head.parameters()]
    return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))


def test_the_central_critic_learns_from_all_agents_at_once(tmp_path):
    """Its gradient is the sum of what ann's rows and bob's rows give, and only its own optimizer moves it."""
    trainer = maac(tmp_path)
    central = trainer.learning.central
    batch = played(trainer)
    gradients = []
    for name, tokens in batch.token_batches.items():
        tokens.returns = tokens.value_mask.float()
        trainer.learners[name].accumulate(tokens, torch.arange(len(tokens)))
        gradients.append(central.head.linear.weight.grad.clone())
    ann, both = gradients
    assert ann.abs().sum() > 0 and not torch.equal(ann, both)
    torch.testing.assert_close(both, 2 * ann)  # both agents read the same words, and earn the same
    own = {id(p) for p in [*central.model.parameters(), *central.head.parameters()]}
    for learner in trainer.learners.values():
        assert own.isdisjoint(id(p) for group in learner.optimizer.param_groups for p in group["params"])
    before, expected = central.head.linear.weight.clone(), norm_of(central)
    assert central.step() == pytest.approx(expected, rel=1e-5)
    assert not torch.equal(before, central.head.linear.weight) and central.head.linear.weight.grad is None


def test_a_central_critic_is_saved_and_resumed(tmp_path):
    trainer, other = maac(tmp_path / "a"), maac(tmp_path / "b")
    trainer.update(played(trainer))
    folder = tmp_path / "critic"
    folder.mkdir()
    trainer.checkpoint_others()["central_critic"].save(folder)
    other.checkpoint_others()["central_critic"].load(folder)
    one, two = trainer.learning.central, other.learning.central
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert torch.equal(one.head.linear.weight, two.head.linear.weight)


# -- warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("maac", ["protocol.turns=1"], "critic_context: joint"),
        (
            "rloo",
            ["advantage.scale=std", "ppo.kl_in=loss", "ppo.kl_estimator=k3"],
            r"baseline loo with scale std is baseline mean, times n / \(n - 1\)",
        ),
        ("marft_action", ["ppo.aggregation=token_mean"], "ratio sequence with aggregation token_mean"),
    ],
)
def test_what_works_but_is_hardly_meant_is_warned_about(recipe, changes, words):
    assert refuse(doubts(ResolvedRun(load(recipe)))) == []
    (warning,) = refuse(doubts(ResolvedRun(load(recipe, changes))))
    assert re.search(words, warning)


@pytest.mark.parametrize(
    ("agents", "training", "words"),
    [
        ({"bob": {"tokenizer": "other"}}, {}, "differ in tokenizer"),
        ({"bob": {"load_in_4bit": True, "lora": {}}}, {}, "quantized"),
        ({}, {"placement": "split"}, "placement: split"),
    ],
)
def test_a_central_critic_that_cannot_be_is_refused(agents, training, words, tmp_path):
    values = recipe_values("maac", tmp_path, training=training)
    values["agent_defaults"] = {"model": "some/model"}
    values["agents"] |= agents
    with pytest.raises(ConfigError, match=words):
        from_dict(values)
