"""What a forward of the update reads: shared prefixes once, a token budget, logits in chunks. Results do not change."""

import pickle
from dataclasses import replace

import pytest
import torch
from fast_cases import some
from one_policy import trainer_of
from tiny_models import build, learner_of

from trl_ext import PPOv2Config
from trl_ext.ppo.advantages import assign_advantages
from trl_ext.ppo.batch import Completion, GlobalBatch, build_token_batch
from trl_ext.process import distributed


def conversations():
    """Completions of six conversations: four of three turns, one of two turns, and one of a single turn.

    The prompt of a turn holds all earlier turns.
    """
    generator = torch.Generator().manual_seed(3)

    def words(least, most):
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(3, 20, (count,), generator=generator).tolist()

    answers = []
    for name, turns in enumerate((3, 1, 3, 2, 3, 3)):
        so_far = words(2, 9)
        for turn in range(turns):
            sampled = words(1, 6)
            answers.append(Completion(list(so_far), sampled, True, f"{name}, turn {turn}", head=turn, score=1.0))
            so_far += sampled + words(1, 3)
    return answers


def apart(tree):
    """The same rows, of which each is read alone."""
    return replace(tree, shared=[0] * len(tree.shared))


def rows_with_old_logprobs(learner, together=True):
    rows = build_token_batch(conversations(), "cpu")
    if not together:
        rows.tree = apart(rows.tree)
    learner.annotate(rows)
    generator = torch.Generator().manual_seed(4)
    rows.advantages = torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask
    rows.returns = torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask
    return rows


def gradients(learner, rows):
    measures = learner.accumulate(rows, torch.arange(len(rows)))
    found = [
        p for m in (learner.model, learner.value_head, learner.critic.model) if m is not None for p in m.parameters()
    ]
    return measures, torch.cat([p.grad.flatten() for p in found if p.grad is not None])


def test_a_conversation_is_read_once_and_its_turns_are_found_in_it():
    rows = build_token_batch(conversations(), "cpu")
    assert len(rows) == 15 and len(set(rows.tree.chains)) == 6
    assert rows.tree.chains[:3] == [2, 2, 2], "the last turn holds the earlier ones"
    found = rows.to_read(None)
    read, index = found.input_ids, found.index
    assert read.shape[0] == 6 and len(index) == int(rows.sampled_mask.sum())
    inside = (index + 1) % read.shape[1] != 0  # the token after a position that is scored is the action itself
    assert torch.equal(read.flatten()[index[inside] + 1], rows.input_ids[rows.sampled_mask][inside])
    half = rows.take(torch.tensor([1, 0, 3]))  # without the longest row of its group, the next longest serves
    assert half.to_read(None).input_ids.shape[0] == 2


@pytest.mark.parametrize("critic", ["head", "model"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_reading_conversations_once_gives_the_gradient_of_reading_every_turn(tiny, tmp_path, architecture, critic):
    found = []
    for together in (True, False):
        model, tokenizer = build(tiny, architecture)
        learner = learner_of(
            model, tokenizer, tmp_path, critic=critic, entropy_coef=0.01, kl_coef=0.1, kl_in="loss", kl_estimator="k3"
        )
        rows = rows_with_old_logprobs(learner, together)
        found.append((rows, *gradients(learner, rows)))
    (rows, measures, gradient), (plain_rows, plain_measures, plain) = found
    torch.testing.assert_close(rows.old_logprobs, plain_rows.old_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.values, plain_rows.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, plain, atol=1e-5, rtol=1e-5)
    assert plain.abs().max() > 1e-2
    assert measures["loss"] == pytest.approx(plain_measures["loss"], abs=1e-5)


@pytest.mark.parametrize(
    "options", [{"max_tokens_per_microbatch": 40}, {"max_tokens_per_microbatch": 1}, {"logits_chunk": 7},
                {"per_device_train_batch_size": 2}, {"logits_chunk": 7, "gradient_checkpointing": True}],
)  # fmt: skip
@pytest.mark.parametrize("architecture", some(["llama", "gemma2"], 1))
def test_budgets_and_chunks_change_memory_and_no_gradient(tiny, tmp_path, architecture, options):
    results = []
    for more in ({}, options):
        model, tokenizer = build(tiny, architecture)
        learner = learner_of(model, tokenizer, tmp_path, entropy_coef=0.01, **more)
        results.append(gradients(learner, rows_with_old_logprobs(learner))[1])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


def test_pieces_keep_to_the_budget_with_padding_and_read_what_is_longer_alone():
    rows = build_token_batch(conversations(), "cpu")
    everything = torch.arange(len(rows))
    for budget in (20, 45, 80):
        parts = rows.microbatches(everything, most_rows=16, most_tokens=budget)
        assert sorted(torch.cat(parts).tolist()) == list(range(15))
        for part in parts:
            microbatch = rows.take(part)
            groups = len(set(microbatch.tree.chains))
            assert groups * microbatch.input_ids.shape[1] <= budget or groups == 1
    whole = 6 * rows.input_ids.shape[1]
    assert [len(rows.microbatches(everything, 16, budget)) for budget in (whole, whole - 1)] == [1, 2], "none is wasted"
    assert [len(set(rows.take(p).tree.chains)) for p in rows.microbatches(everything, most_rows=4)] == [4, 2]


def test_logits_exist_for_one_chunk_at_a_time(tiny, tmp_path, monkeypatch):
    model, tokenizer = tiny("llama")
    learner = learner_of(model, tokenizer, tmp_path, logits_chunk=7)
    learner.checked = True  # as after the first update, which repeats the forward
    seen = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape[1]))
    rows = rows_with_old_logprobs(learner)
    _, forward = learner.annotate(rows)
    seen.clear()
    learner.accumulate(rows, torch.arange(len(rows)), forward)
    assert max(seen) == 7 and sum(seen) == int(rows.sampled_mask.sum()), (
        "the chunks of the forward that is reused, again in the backward"
    )


def test_minibatches_keep_conversations_whole(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, num_mini_batches=3, gradient_accumulation_steps=3)
    rows = build_token_batch(conversations(), "cpu")
    parts = [set(part.tolist()) for part in trainer.learning.minibatches("policy", rows, 0, epoch=0)]
    assert set().union(*parts) == set(range(15)) and sum(map(len, parts)) == 15
    whole = [{0, 1, 2}, {3}, {4, 5, 6}, {7, 8}, {9, 10, 11}, {12, 13, 14}]
    assert all(any(one <= part for part in parts) for one in whole)


def test_rows_that_are_dropped_are_indexed_on_the_device_of_the_rows():
    """Rows of weight 0 leave a batch by an index on the rows' device; an index of another device would be refused."""
    rows = GlobalBatch.of(build_token_batch(conversations(), "meta"))
    assert {rows.process.device.type, rows.row.device.type} == {"meta"}
    own = build_token_batch(conversations(), "cpu")
    kept = GlobalBatch.of(own).take(torch.tensor([4, 1]))
    assert kept.process.tolist() == [0, 0] and kept.row.tolist() == [4, 1]
    assert [len(kept.rows), kept.back(own).labels] == [2, [own.labels[4], own.labels[1]]]


def scored(completions):
    """Rows with log-probabilities, values and scores that differ."""
    rows = build_token_batch(completions, "cpu")
    torch.manual_seed(2)
    for name in ("old_logprobs", "ref_logprobs", "values"):
        setattr(rows, name, torch.where(rows.sampled_mask, torch.randn(rows.input_ids.shape), 0.0))
    rows.weight[1::3] = 0.0
    return rows


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dropped", [False, True])
def test_rows_of_two_processes_have_advantages_over_all_rows(monkeypatch, tmp_path, rank, dropped):
    """What processes send each other, without prompts, gives the advantages that all rows together would have."""
    options = PPOv2Config(output_dir=str(tmp_path), report_to=[], use_cpu=True, kl_coef=0.1, lam=0.9)
    whole = scored([replace(c, score=float(n)) for n, c in enumerate(conversations())])
    parts = [whole.take(torch.arange(4)), whole.take(torch.arange(4, len(whole)))]
    monkeypatch.setattr(distributed, "size", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    sent = [pickle.loads(pickle.dumps(part.without_prompts())) for part in parts]
    monkeypatch.setattr(distributed, "all_gather", lambda value: sent)
    gathered = GlobalBatch.of(parts[rank])
    metrics, expected = assign_advantages(gathered.rows, options), assign_advantages(whole, options)
    assert metrics == pytest.approx(expected, abs=1e-6)
    kept = gathered.rows.weight.nonzero().flatten() if dropped else torch.arange(len(whole))
    found = gathered.take(kept).back(parts[rank])
    places = [row for row in kept.tolist() if (row >= 4) == bool(rank)]
    right = whole.take(torch.tensor(places))
    assert found.labels == right.labels and found.tree.lengths == right.tree.lengths and found.first == right.first
    for name in ("advantages", "returns", "values", "old_logprobs"):
        torch.testing.assert_close(getattr(found, name), getattr(right, name))
    for name in ("input_ids", "value_mask", "sampled_mask", "weight", "group", "sample"):
        assert torch.equal(getattr(found, name), getattr(right, name)), name
    assert float(right.advantages.abs().sum()) > 1.0


def test_what_processes_send_each_other_does_not_grow_with_prompts():
    def sent(prompt):
        rows = build_token_batch([Completion([3] * prompt, [4, 5], True, f"row {n}") for n in range(64)], "cpu")
        return len(pickle.dumps(rows.without_prompts()))

    assert sent(2000) == sent(2)
    assert sent(2) < 64 * 400
