"""Rows that begin alike are a tree of tokens, of which a forward of the update reads every token once."""

import random
from dataclasses import replace

import pytest
import torch
from test_update_layouts import Plain, learner_of
from tiny_models import build, build_float64

from trl_ext import learner as learner_module
from trl_ext.central_critic import CentralCritic
from trl_ext.forward import tree_limits
from trl_ext.learner import Learner
from trl_ext.prefix_tree import PrefixTree, TreeLimits
from trl_ext.token_batch import Completion, build_token_batch, concatenated

FAR = TreeLimits(longest=float("inf"), free=1e9)
"""Attention costs nothing, so whatever begins alike is read as one tree."""


def words(generator, least, most):
    return [generator.randrange(3, 20) for _ in range(generator.randint(least, most))]


def answers(seed=0):
    """Three prompts with five answers each, of which two go on: one by another turn, and one by three ways to go on."""
    generator = random.Random(seed)
    found = []
    for group in range(3):
        prompt = words(generator, 9, 12)
        for number in range(5):
            answer = words(generator, 1, 5)
            found.append(Completion(prompt, answer, True, f"{group}.{number}", group=(group,), head=0))
            said = prompt + answer + words(generator, 1, 3)
            for turn in range((0, 1, 3, 0, 0)[number]):
                found.append(Completion(said, words(generator, 2, 4), True, f"{group}.{number}.{turn}", head=1))
    found.append(replace(found[2], label="the same answer again"))
    generator.shuffle(found)
    return [replace(c, weight=1.0 + i % 3, trajectory=(i // 2,)) for i, c in enumerate(found)]


def filled(learner, completions, seed=4):
    """A token batch with everything that the loss reads, and a value mask that leaves out some tokens."""
    rows = build_token_batch(completions, "cpu")
    learner.compute_old_logprobs_and_values(rows)
    generator = torch.Generator().manual_seed(seed)
    shape = rows.sampled_mask.shape
    rows.advantages, rows.returns, rows.ref_logprobs = (
        torch.randn(shape, generator=generator).to(rows.old_logprobs.dtype) * rows.sampled_mask for _ in range(3)
    )
    rows.value_mask &= torch.rand(shape, generator=generator) < 0.7
    return rows


def gradient_of(learner, rows, *more):
    measures = learner.accumulate(rows, torch.arange(len(rows)))
    modules = [m for m in (learner.model, learner.value_head, learner.value_model, *more) if m is not None]
    found = {id(p): p for module in modules for p in module.parameters() if p.grad is not None}
    return measures, torch.cat([p.grad.flatten().double() for p in found.values()])


@pytest.fixture
def rows_only(monkeypatch):
    """Make every model read rows."""
    return lambda: [
        monkeypatch.setattr(f"trl_ext.{module}.tree_limits", lambda model: None)
        for module in ("learner", "forward", "multi_adapter")
    ]


# -- the tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_every_token_of_a_tree_is_read_once_and_sees_what_stood_before_it_in_its_row(seed):
    generator = random.Random(seed)
    rows = [[generator.randrange(2) for _ in range(generator.randint(2, 9))] for _ in range(generator.randint(1, 9))]
    tree = PrefixTree.of(rows)
    index = generator.sample(range(len(rows)), generator.randint(1, len(rows)))
    chosen, tree = [rows[row] for row in index], tree.take(index)
    assert tree == replace(PrefixTree.of(chosen), rank=tree.rank), "some rows of a tree are the tree of these rows"
    layout = tree.layout(FAR)
    prefixes = {tuple(row[: end + 1]) for row in chosen for end in range(len(row) - 1)}
    if layout is None:
        assert len(set(tree.chains())) * (max(map(len, chosen)) - 1) <= len(prefixes) + max(map(len, chosen)) * 2
        return
    seen = layout.seen(torch.device("cpu"))[:, 0]
    width = layout.row.shape[1]
    used = set()
    for number, row in enumerate(chosen):
        for end in range(len(row) - 1):
            line, place = divmod(int(layout.place[number, end]), width)
            used.add((line, place))
            visible = seen[line, place].nonzero().flatten().tolist()
            ids = [chosen[layout.row[line, k]][layout.column[line, k]] for k in visible]
            assert ids == row[: end + 1] and layout.column[line, visible].tolist() == list(range(end + 1))
    assert len(used) == len(prefixes), "a token that several rows share has one place"
    assert bool(seen.any(-1).all()), "padding sees itself, because attention over nothing is NaN"


def test_a_tree_grows_until_attention_costs_more_than_the_prefix():
    prompt = list(range(100))
    rows = [prompt + [1000 + number] * 100 for number in range(12)]
    tree = PrefixTree.of(rows)
    assert len(tree.trees(FAR)) == 1
    sizes = [len(group) for group in tree.trees(TreeLimits(float("inf"), 500.0))]
    # a row joins a tree of s tokens while s <= 449: 100 more tokens cost (500 + 2 s + 100) * 100, and alone 199 * 699
    assert sizes == [3, 3, 3, 3]
    assert all(len(group) == 1 for group in PrefixTree.of([[1, *row[100:]] for row in rows]).trees(FAR)[1:])


def test_rows_that_share_little_are_read_as_rows_and_long_rows_beyond_a_window_too():
    rows = PrefixTree.of([[1, *[number] * 30] for number in range(2, 8)])
    assert rows.layout(TreeLimits(float("inf"), 64.0)) is None, "one shared token is not worth attention over the rest"
    shared = PrefixTree.of([[1] * 30 + [number] * 5 for number in range(2, 8)])
    assert shared.layout(TreeLimits(35, 64.0)) is not None and shared.layout(TreeLimits(34, 64.0)) is None
    assert shared.layout(None) is None


def test_micro_batches_keep_trees_together_and_count_what_is_read():
    completions = answers()
    rows = build_token_batch([replace(c, trajectory=None) for c in completions], "cpu")
    everything = torch.arange(len(rows))
    for most_rows, most_tokens in ((4, None), (100, 60), (6, 90), (1, None)):
        parts = rows.microbatches(everything, most_rows, most_tokens, FAR)
        assert sorted(torch.cat(parts).tolist()) == everything.tolist()
        for part in parts:
            taken = rows.take(part)
            assert len(set(taken.tree.chains())) <= most_rows
            assert most_tokens is None or taken.tree.reads(FAR) <= most_tokens or len(set(taken.tree.chains())) == 1
            assert taken.to_read(FAR).input_ids.numel() <= taken.tree.reads(FAR)
    prompts = [
        {tuple(completions[row].prompt_ids[:9]) for row in part.tolist()}
        for part in rows.microbatches(everything, 8, None, FAR)
    ]
    assert [len(found) for found in prompts] == [1, 1, 1], "the answers to a prompt stand together"


def test_rows_of_two_batches_share_no_line():
    parts = [build_token_batch(answers(), "cpu") for _ in range(2)]
    joint = concatenated(parts)
    read = joint.to_read(FAR)
    assert read.layout is not None
    owners = read.layout.row // len(parts[0])
    real = read.layout.end > torch.arange(1, owners.shape[1] + 1).numpy()  # padding and leaves end right behind
    for line in range(len(owners)):
        assert len(set(owners[line][real[line]].tolist())) == 1


# -- equal results ---------------------------------------------------------------------------------------------------


OPTIONS = {"entropy_coef": 0.01, "kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "cliprange": 10.0}
"""With a clip range of 10 the gradient has no kinks, at which rounding would decide."""


def compared(make, rows_only, completions, tolerance):
    """Read trees, then rows, with a new learner each, and compare everything that the update sees."""
    found = []
    for trees in (True, False):
        learner, more = make()
        if not trees:
            rows_only()
        batch = filled(learner, completions)
        limits = learner_module.tree_limits(learner_module.base_of(learner.model))
        read = [batch.take(part).to_read(limits) for part in learner._microbatches(batch, 16)]
        assert any(one.layout is not None for one in read) is trees
        found.append((batch, *gradient_of(learner, batch, *more), sum(one.input_ids.numel() for one in read)))
    (batch, measures, gradient, tokens), (plain, plain_measures, plain_gradient, plain_tokens) = found
    assert tokens < 0.75 * plain_tokens
    for name in ("old_logprobs", "values", "ref_logprobs"):
        torch.testing.assert_close(getattr(batch, name), getattr(plain, name), **tolerance)
    torch.testing.assert_close(gradient, plain_gradient, **tolerance)
    assert plain_gradient.abs().max() > 1e-3
    for name, value in plain_measures.items():
        assert measures[name] == pytest.approx(value, abs=1e3 * tolerance["atol"], rel=1e3 * tolerance["rtol"])


EXACT = {"atol": 1e-9, "rtol": 1e-9}
SOFTMAX_IN_FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize(
    ("architecture", "tolerance"),
    [("llama", EXACT), ("qwen2", EXACT), ("qwen3", EXACT), ("gpt2", EXACT), ("gpt_neox", EXACT), ("mistral", EXACT),
     ("gemma2", SOFTMAX_IN_FLOAT32), ("gemma3", EXACT)],
)  # fmt: skip
def test_trees_and_rows_give_the_same_update(tiny, tmp_path, rows_only, architecture, tolerance):
    def make():
        model, tokenizer = build_float64(tiny, architecture)
        return learner_of(model, tokenizer, tmp_path, **OPTIONS), ()

    compared(make, rows_only, answers(), tolerance)
