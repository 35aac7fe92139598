"""Rows that begin alike are a tree of tokens, of which a forward of the update reads every token once."""

import random
from dataclasses import replace

import pytest
import torch
from fast_cases import some
from tiny_models import OPTIONS, Plain, answers, build, build_any, filled, gradient_of, learner_of, lively

from trl_ext import PPOv2Config
from trl_ext.learning import learner as learner_module
from trl_ext.learning.central_critic import CentralCritic
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.models import tree_attention
from trl_ext.models.forward import base_of, tree_limits
from trl_ext.models.tree_attention import TreeMask
from trl_ext.ppo.batch import Completion, build_token_batch, concatenated
from trl_ext.ppo.prefix_tree import PrefixTree, TreeLimits

FAR = TreeLimits(longest=float("inf"), free=1e9)
"""Attention costs nothing, so whatever begins alike is read as one tree."""

EXACT = {"atol": 1e-9, "rtol": 1e-9}


@pytest.fixture
def rows_only(monkeypatch):
    return lambda: [
        monkeypatch.setattr(f"trl_ext.{module}.tree_limits", lambda model: None)
        for module in ("learning.learner", "models.forward")
    ]


# -- the tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_every_token_of_a_tree_is_read_once_and_sees_what_stood_before_it_in_its_row(seed, monkeypatch):
    monkeypatch.setattr("trl_ext.ppo.prefix_tree.WORTHWHILE", 1.0)
    generator = random.Random(seed)
    rows = [[generator.randrange(2) for _ in range(generator.randint(2, 9))] for _ in range(generator.randint(1, 9))]
    tree = PrefixTree.of(rows)
    index = generator.sample(range(len(rows)), generator.randint(1, len(rows)))
    chosen, tree = [rows[row] for row in index], tree.take(index)
    assert tree == replace(PrefixTree.of(chosen), rank=tree.rank), "some rows of a tree are the tree of these rows"
    layout = tree.layout(FAR)
    prefixes = {tuple(row[: end + 1]) for row in chosen for end in range(len(row) - 1)}
    if layout is None:
        assert len(set(tree.chains)) * (max(map(len, chosen)) - 1) <= len(prefixes) + max(map(len, chosen)) * 2
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
    # 99 more tokens on a line of s cost 99 (500 + 2 s + 99), and a row alone costs 199 * 699: it joins while s <= 403
    assert sizes == [4, 4, 4]
    assert all(len(group) == 1 for group in PrefixTree.of([[1, *row[100:]] for row in rows]).trees(FAR)[1:])


def test_rows_that_share_little_are_read_as_rows_and_long_rows_beyond_a_window_too():
    rows = PrefixTree.of([[1, *[number] * 30] for number in range(2, 8)])
    assert rows.layout(TreeLimits(float("inf"), 64.0)) is None, "one shared token is not worth attention over the rest"
    shared = PrefixTree.of([[1] * 30 + [number] * 5 for number in range(2, 8)])
    assert shared.layout(TreeLimits(35, 64.0)) is not None and shared.layout(TreeLimits(34, 64.0)) is None
    assert shared.layout(None) is None


def test_trees_are_read_only_if_they_save_a_quarter_of_the_tokens():
    """Six rows of which 40 tokens are read: 12 + 6 x 28 = 180 tokens of 240 as a tree, or 11 + 6 x 29 = 185."""
    limits = TreeLimits(float("inf"), 1000.0)
    for shared, worthwhile in ((12, True), (11, False)):
        tree = PrefixTree.of([[1] * shared + [number] * (41 - shared) for number in range(2, 8)])
        assert tree.worthwhile(limits) is worthwhile and (tree.layout(limits) is not None) is worthwhile
        assert tree.reads(limits) == (180 if worthwhile else 6 * 41)


def test_micro_batches_keep_trees_together_and_count_what_is_read():
    completions = answers()
    rows = build_token_batch([replace(c, trajectory=None) for c in completions], "cpu")
    everything = torch.arange(len(rows))
    for most_rows, most_tokens in ((4, None), (100, 60), (6, 90), (1, None)):
        parts = rows.microbatches(everything, most_rows, most_tokens, FAR)
        assert sorted(torch.cat(parts).tolist()) == everything.tolist()
        for part in parts:
            taken = rows.take(part)
            assert len(set(taken.tree.chains)) <= most_rows
            assert most_tokens is None or taken.tree.reads(FAR) <= most_tokens or len(set(taken.tree.chains)) == 1
            assert taken.to_read(FAR).input_ids.numel() <= taken.tree.reads(FAR)
    prompts = [[number] * 9 for number in (5, 4, 3)]
    shuffled = [Completion(prompts[i % 3], [10 + i] * (1 + i), True, str(i)) for i in range(15)]
    parts = build_token_batch(shuffled, "cpu").microbatches(torch.arange(15), 5, None, FAR)
    assert [{row % 3 for row in part.tolist()} for part in parts] == [{0}, {1}, {2}], (
        "a prompt's answers stand together"
    )


def test_rows_of_two_batches_share_no_line():
    parts = [build_token_batch(answers(), "cpu") for _ in range(2)]
    assert torch.equal(concatenated(parts[:1]).input_ids, parts[0].input_ids)
    joint = concatenated(parts)
    first, second = joint.trajectory.view(2, -1).tolist()
    assert max(first) < min(second), "nor a trajectory"
    read = joint.to_read(FAR)
    assert read.layout is not None
    owners = read.layout.row // len(parts[0])
    real = read.layout.end > torch.arange(1, owners.shape[1] + 1).numpy()  # padding and leaves end right behind
    for line in range(len(owners)):
        assert len(set(owners[line][real[line]].tolist())) == 1


def test_attention_goes_by_blocks_and_the_mask_stays_a_mask_for_all_else(monkeypatch):
    """16 answers of 100 tokens to a prompt of 300 are a line of 1,885 tokens, in 15 blocks with one row's keys each."""
    rows = PrefixTree.of([[5] * 300 + [number] * 100 for number in range(10, 26)])
    layout = rows.layout(replace(FAR, blocks=True))
    mask = TreeMask.of(layout, torch.device("cpu"))
    plain = layout.seen(torch.device("cpu"))
    width = plain.shape[-1]
    assert width == 1890 and mask.seen.numel() < 0.3 * plain.numel(), "1,883 tokens in 15 blocks of the same size"
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, 2, width, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    kernel, sizes = tree_attention.scaled_dot_product_attention, []
    monkeypatch.setattr(
        tree_attention, "_attend", lambda *a, _do=tree_attention._attend, **k: (sizes.append(k), _do(*a, **k))[1]
    )
    found = kernel(*states, attn_mask=mask, dropout_p=0.0, scale=0.3, is_causal=False)
    assert len(sizes) == 1
    torch.testing.assert_close(found, kernel(*states, attn_mask=plain, scale=0.3), **EXACT)
    for other in (mask[:, :, :, :width], mask.detach(), mask.clone()):
        assert type(other) is torch.Tensor and torch.equal(other, plain)


# -- equal results ---------------------------------------------------------------------------------------------------


NEARLY = {"atol": 1e-6, "rtol": 1e-6}
"""RMS norms compute in float32 within a model of float64."""
ROUNDED = {"atol": 1e-5, "rtol": 1e-5}
"""The value head, entropies and the softmax of eager attention are in float32, whatever the model's dtype is."""


def compared(make, rows_only, completions, tolerance, measures_within=1e-4):
    """Read trees, then rows, with a new learner each, and compare everything that the update sees."""
    found = []
    for trees in (True, False):
        learner, *more = make()
        if not trees:
            rows_only()
        batch = filled(learner, completions)
        limits = learner_module.tree_limits(base_of(learner.model))
        read = [batch.take(part).to_read(limits) for part in learner.microbatches(batch)]
        assert any(one.layout is not None for one in read) is trees
        found.append((batch, *gradient_of(learner, batch, *more), sum(one.input_ids.numel() for one in read)))
    (batch, measures, gradient, tokens), (plain, plain_measures, plain_gradient, plain_tokens) = found
    assert tokens < 0.75 * plain_tokens
    for name in ("old_logprobs", "values"):
        torch.testing.assert_close(getattr(batch, name), getattr(plain, name), **tolerance)
    assert len(gradient) == len(plain_gradient) and plain_gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, plain_gradient, **tolerance)
    for name, value in plain_measures.items():
        assert measures[name] == pytest.approx(value, abs=measures_within, rel=measures_within)


@pytest.mark.parametrize(("kind", "attention", "tolerance"), [
    ("gpt_neox", "sdpa", EXACT),
    ("gpt2", "sdpa", EXACT),  # learned positions
    ("llama", "sdpa", NEARLY),
    ("qwen2", "sdpa", NEARLY),
    ("qwen3", "sdpa", NEARLY),
    ("gemma3_text", "sdpa", NEARLY),
    ("llama", "eager", ROUNDED),
    ("gemma2", "eager", ROUNDED),
])  # fmt: skip
def test_trees_and_rows_give_the_same_update(tiny, tmp_path, rows_only, kind, attention, tolerance):
    def make():
        if kind == "gpt2":
            model, tokenizer = build(tiny, kind)
            model = lively(model).double()
        else:
            more = {"query_pre_attn_scalar": 8} if kind == "gemma2" else {}
            model, tokenizer = build_any(tiny, kind, attention, **more)
        return [learner_of(model, tokenizer, tmp_path, critic="none", **OPTIONS)]

    compared(make, rows_only, answers(), tolerance)


@pytest.mark.parametrize(
    "options", some([{}, {"gradient_checkpointing": True}, {"logits_chunk": 7, "entropy_coef": 0.01},
                {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
                {"per_device_train_batch_size": 5}, {"max_tokens_per_microbatch": 90}, {"ratio": "trajectory"}], 2, 3, 5, 6),
)  # fmt: skip
def test_trees_and_rows_agree_with_every_way_to_cut_and_recompute(tiny, tmp_path, rows_only, options, monkeypatch):
    """A block of 5 queries makes attention go by blocks on these short lines."""
    monkeypatch.setattr("trl_ext.ppo.prefix_tree.BLOCK", 5)
    monkeypatch.setattr("trl_ext.models.tree_attention.BLOCK", 5)

    def make():
        model, tokenizer = build_any(tiny, "llama")
        return [learner_of(model, tokenizer, tmp_path, critic="none", **{**OPTIONS, **options})]

    compared(make, rows_only, answers(), ROUNDED if "entropy_coef" in options else NEARLY)


@pytest.mark.parametrize("critic", ["head", "adapter", "model", "central"])
@pytest.mark.parametrize("own_prompts", some([False, True], 1))
def test_trees_and_rows_agree_for_every_critic(tiny, tmp_path, rows_only, critic, own_prompts):
    """With LoRA, and with prompts of the critic's own, which have another tree."""
    from peft import LoraConfig, get_peft_model

    def make():
        model, tokenizer = build_any(tiny, "llama")
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        torch.manual_seed(2)
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
        if critic != "central":
            return [learner_of(adapted, tokenizer, tmp_path, critic=critic, **OPTIONS)]
        args = PPOv2Config(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, temperature=1.0, per_device_train_batch_size=16,
            **OPTIONS,
        )  # fmt: skip
        central = CentralCritic(model, args, outputs=3)
        torch.nn.init.normal_(central.head.linear.weight)
        learner = Learner(Policy("policy", adapted, tokenizer), args, critic="central", central_values=central.values)
        learner.prepare(Plain(), updates=1)
        return [learner, central.model, central.head]

    completions = answers()
    if own_prompts:
        completions = [replace(c, critic_prompt_ids=[9, 8, 7, *c.prompt_ids]) for c in completions]
    compared(make, rows_only, completions, ROUNDED)


@pytest.mark.parametrize("mixed", [False, True])
def test_trees_and_rows_agree_within_the_rounding_of_half_precision(tiny, tmp_path, rows_only, mixed):
    class Mixed(Plain):
        mixed_precision = "bf16"

    def make():
        model, tokenizer = build_any(tiny, "llama", dtype=torch.float32 if mixed else torch.bfloat16)
        learner = learner_of(model, tokenizer, tmp_path, critic="head", **OPTIONS)
        if mixed:
            learner.prepare(Mixed(), updates=1)
            torch.nn.init.normal_(learner.value_head.linear.weight)
        return [learner]

    found = []
    for trees in (True, False):
        (learner,) = make()
        if not trees:
            rows_only()
        batch = filled(learner, answers())
        learner.accumulate(batch, torch.arange(len(batch)))
        parameters = [*learner.model.parameters(), *learner.optimizer.masters.values()]
        grads = torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])
        found.append((batch.old_logprobs, grads))
    (logprobs, gradient), (plain_logprobs, plain_gradient) = found
    assert (logprobs - plain_logprobs).abs().mean() < 0.02 * plain_logprobs.abs().mean()
    assert torch.nn.functional.cosine_similarity(gradient, plain_gradient, dim=0) > 0.999


# -- what must read rows ---------------------------------------------------------------------------------------------


def test_what_cannot_read_trees_reads_rows(tiny, tmp_path):
    """Recurrent layers, attention by chunks, a bias by distance along the line, and kernels with masks of their own."""
    state = {"num_heads": 4, "n_groups": 1, "state_size": 8, "expand": 1}
    for kind, more in (("mamba", {}), ("mamba2", state), ("bloom", {})):
        assert tree_limits(build_any(tiny, kind, "eager", **more)[0]) is None, kind
    model, _ = build_any(tiny, "llama")
    assert tree_limits(model) is not None
    model.config._attn_implementation = "flash_attention_2"
    assert tree_limits(model) is None
    model, tokenizer = build_any(tiny, "mamba", "eager", torch.float32)
    learner = learner_of(model, tokenizer, tmp_path, critic="none", **OPTIONS)
    rows = filled(learner, answers())
    assert all(rows.take(part).to_read(None).position_ids is None for part in learner.microbatches(rows))
    assert gradient_of(learner, rows)[1].abs().max() > 0


def test_rows_longer_than_a_sliding_window_are_read_alone(tiny, tmp_path, rows_only):
    window = 16
    model, tokenizer = build_any(tiny, "mistral", sliding_window=window)
    limits = tree_limits(model)
    assert limits.longest == window
    completions = answers()
    for length, together in ((window, True), (window + 1, False)):
        fitting = [c for c in completions if len(c.prompt_ids + c.response_ids) <= length]
        assert max(len(c.prompt_ids + c.response_ids) for c in fitting) == length
        rows = build_token_batch(fitting, "cpu")
        assert (rows.to_read(limits).layout is not None) is together
    learner = learner_of(model, tokenizer, tmp_path, critic="none", **OPTIONS)
    logprobs = filled(learner, completions).old_logprobs
    rows_only()
    torch.testing.assert_close(logprobs, filled(learner, completions).old_logprobs, **NEARLY)
