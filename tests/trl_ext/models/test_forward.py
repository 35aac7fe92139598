"""A row's numbers are those of a plain forward over the row alone, whatever stands beside it, and however it was
sampled."""

import pytest
import torch
from conformance import MORE, build
from fast_cases import some
from tiny_models import Plain, lively, sample
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from trl_ext import Learner, Policy, PPOv2Config
from trl_ext.models.forward import Reading, _close, head_width, length_regimes, reading_of, trunk_of
from trl_ext.ppo.batch import PADDING, Completion, build_token_batch
from trl_ext.ppo.prefix_tree import TreeLimits
from trl_ext.sampling.kv_cache import KVCache
from trl_ext.sampling.request import Draw

FULL = {"temperature": 1.0, "stop_ids": frozenset()}


def plain_logprobs(model, prompt, response, temperature=1.0):
    """By a forward for each token over the tokens before it, as in generation without a cache."""
    found, first = [], reading_of(model).first
    for n in range(len(response)):
        ids = torch.tensor([[*prompt, *response[:n]]])
        places = {"position_ids": torch.arange(ids.shape[1])[None] + first} if first else {}
        with torch.no_grad():
            found.append(
                float(model(input_ids=ids, **places).logits[0, -1].div(temperature).log_softmax(-1)[response[n]])
            )
    return found


def learner_of(model, tokenizer, tmp_path, **more):
    args = PPOv2Config(output_dir=str(tmp_path), report_to=[], use_cpu=True, temperature=1.0, **more)
    learner = Learner(Policy("p", model, tokenizer), args)
    learner.prepare(Plain(), updates=1)
    return learner


@pytest.mark.parametrize(("kind", "expected"), [
    ("llama", Reading(True, True, 0)),
    ("gpt2", Reading(True, True, 0)),
    ("bloom", Reading(False, True, 0)),  # its positions come from the mask
    ("bart", Reading(False, False, 0, gaps=False)),  # it counts columns
    ("roberta", Reading(True, True, 1, direct=False)),  # the padding token has id 0, and positions begin behind it
    ("mamba", Reading(False, True, 0, cached=False, gaps=False)),  # its state is recurrent
    ("rwkv", Reading(False, False, 0, cached=False, gaps=False, rows=False)),  # it knows no padding
    ("modernbert-decoder", Reading(True, True, 0, direct=False)),  # a layer stands before its head
    ("mpt", Reading(False, True, 0, gaps=False)),  # its biases count columns
    ("openai-gpt", Reading(True, True, 0, cached=False, gaps=False)),  # it has no cache at all
    ("recurrent_gemma", Reading(True, False, 0, gaps=False)),
])  # fmt: skip
def test_how_a_model_counts_is_asked_of_it(kind, expected):
    assert reading_of(build(kind)[0]) == expected


@pytest.mark.parametrize(
    "kind", some(["llama", "bart", "roberta", "rwkv", "recurrent_gemma", "bloom", "opt", "mamba"], 0, 1, 3, 7)
)
def test_rows_that_are_sampled_together_have_the_numbers_of_each_alone(kind, tmp_path):
    model, tokenizer = build(kind)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 20, (n,), generator=generator).tolist() for n in (3, 9, 5)]  # with the padding token, 0
    keys = [(1, n) for n in range(3)]
    together = sample(model, prompts, Draw(6, **FULL), keys)
    greedy = Draw(6, 0.0, stop_ids=frozenset())
    alone = [sample(model, [prompt], greedy)[0].ids for prompt in prompts]
    assert [row.ids for row in sample(model, prompts, greedy)] == alone
    learner = learner_of(model, tokenizer, tmp_path)
    rows = build_token_batch(
        [Completion(p, s.ids, False, str(n)) for n, (p, s) in enumerate(zip(prompts, together, strict=True))], "cpu"
    )
    with torch.no_grad():
        trained = learner.forward(rows).logprobs.view(3, 6)
    for prompt, sampled, own in zip(prompts, together, trained.tolist(), strict=True):
        expected = plain_logprobs(model, prompt, sampled.ids)
        assert own == pytest.approx(expected, abs=2e-4)
        if sampled.logprobs is not None:
            assert sampled.logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    "kind",
    some(
        ["rwkv", "mamba", "falcon_h1", "zaya", "deepseek_v4", "deepseek_v32", "mpt", "gpt_neo", "llama", "glm_moe_dsa"],
        0,
        2,
        4,
        8,
    ),
)
def test_turns_equal_prompts_and_rows_that_end_early_are_sampled_as_alone(kind):
    model, _ = build(kind)
    greedy, states = Draw(5, 0.0, stop_ids=frozenset({7, 9, 11})), KVCache()
    prompts = [[3, 4, 5], [3, 4, 5], [6, 8, 10, 12, 13, 14], [5, 4, 3]]
    for turn in range(3):
        known = [0 if turn == 0 else len(prompt) - 2 for prompt in prompts]  # two tokens of each prompt are new
        rows = sample(model, prompts, greedy, states=states, read=known)
        assert [row.ids for row in rows] == [sample(model, [prompt], greedy)[0].ids for prompt in prompts]
        prompts = [[*prompt, *row.ids, 15, 16] for prompt, row in zip(prompts, rows, strict=True)]


def test_a_local_window_counts_tokens_and_not_columns(monkeypatch):
    """GPT-Neo's windows are 256 wide, so that no short forward shows them."""
    monkeypatch.setitem(MORE, "gpt_neo", {**MORE["gpt_neo"], "window_size": 6})
    model, _ = build("gpt_neo")
    states, greedy = KVCache(), Draw(4, 0.0, stop_ids=frozenset())
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 6]]
    said = sample(model, prompts, greedy, states=states)
    later = [
        [*prompt, *row.ids, 15, 16, 17][: 40 - 20 * n]
        for n, (prompt, row) in enumerate(zip(prompts, said, strict=True))
    ]
    again = sample(model, later, greedy, states=states, read=[13, 6])
    assert [row.ids for row in again] == [sample(model, [prompt], greedy)[0].ids for prompt in later]


def test_a_vocabulary_may_be_small_and_rule_tokens_out(tmp_path, monkeypatch):
    for size in (5, 40):
        monkeypatch.setitem(MORE, "llama", {"vocab_size": size})
        model, tokenizer = build("llama")
        model.lm_head.register_forward_hook(
            lambda _, given, logits: logits.index_fill(-1, torch.tensor([4]), float("-inf"))
        )
        assert reading_of(model) == Reading(True, True)
        learner = learner_of(model, tokenizer, tmp_path, entropy_coef=0.1)
        rows = build_token_batch([Completion([3, 1], [2, 3], False, "row")], "cpu")
        out = learner.forward(rows, entropies=True)
        (out.logprobs.sum() + out.entropies.sum()).backward()
        assert torch.isfinite(out.entropies).all() and torch.isfinite(model.model.embed_tokens.weight.grad).all()


def test_rows_are_cut_where_the_angles_of_positions_change():
    rows = build_token_batch(
        [
            Completion([5, 6], [7, 8, 9, 10, 11], False, "crosses"),
            Completion([5, 6], [7], False, "short"),
            Completion([5, 6, 7, 8, 9], [10, 11], False, "long"),
        ],
        "cpu",
    )
    (short, first), (longer, second) = rows.by_length([4])
    # the M = 8 tokens in order: 5 of "crosses" after 2 to 6 tokens, 1 of "short" after 2, 2 of "long" after 5 and 6
    assert first.tolist() == [0, 1, 2, 5] and second.tolist() == [3, 4, 6, 7]
    assert short.tree.lengths == [5, 3] and short.first == [2, 2]
    assert longer.tree.lengths == [7, 7] and longer.first == [5, 5]
    assert short.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    read = short.to_read(None)
    assert read.input_ids.tolist() == [[5, 6, 7, 8]] and read.index.tolist() == [1, 2, 3, 1], (
        "the short row begins the long one"
    )
    assert longer.to_read(None).index.tolist() == [4, 5, 4, 5]
    [(all_rows, everything)] = rows.by_length([100])
    assert everything.tolist() == list(range(8)) and all_rows.tree.lengths == [7, 3, 7]


@pytest.mark.parametrize("limits", [None, TreeLimits(float("inf"), 1000.0, True)])
def test_longrope_reads_each_token_by_the_angles_for_what_precedes_it(limits, tmp_path, monkeypatch):
    model, tokenizer = build("phi3")
    assert length_regimes(model) == (16,)
    learner = learner_of(model, tokenizer, tmp_path)
    monkeypatch.setattr("trl_ext.learning.learner.tree_limits", lambda model: limits)
    prompts = [list(range(3, 3 + n)) for n in (3, 12, 16, 17, 12, 12)]
    sampled = sample(model, prompts, Draw(8, **FULL), [(1, n) for n in range(6)])
    rows = build_token_batch(
        [Completion(p, s.ids, False, str(n)) for n, (p, s) in enumerate(zip(prompts, sampled, strict=True))], "cpu"
    )
    with torch.no_grad():
        out = learner.forward(rows, entropies=True)
    assert out.values.shape == out.entropies.shape == (48,)
    for prompt, row, own in zip(prompts, sampled, out.logprobs.view(6, 8).tolist(), strict=True):
        expected = plain_logprobs(model, prompt, row.ids)
        assert own == pytest.approx(expected, abs=2e-4)
        assert row.logprobs == pytest.approx(expected, abs=2e-4)


def test_the_gradient_of_rows_that_cross_a_length_is_that_of_plain_forwards(tmp_path):
    model, tokenizer = build("phi3")
    learner = learner_of(model, tokenizer, tmp_path)
    prompt, response = list(range(3, 16)), [4, 9, 5, 7, 8, 6]
    rows = build_token_batch([Completion(prompt, response, False, "row")], "cpu")
    weights = torch.arange(1.0, 7.0)
    (learner.forward(rows).logprobs * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for n, token in enumerate(response):
        logits = model(input_ids=torch.tensor([[*prompt, *response[:n]]])).logits[0, -1]
        (weights[n] * logits.log_softmax(-1)[token]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-4, rtol=1e-3)


def test_the_cache_of_a_conversation_is_dropped_where_the_angles_change():
    model, _ = build("phi3")
    states, greedy = KVCache(), Draw(4, 0.0, stop_ids=frozenset())
    first = list(range(3, 13))
    said = sample(model, [first], greedy, states=states)[0].ids
    for more in ([5], [5, 6, 7, 8]):  # the next turn begins with 15 or with 18 tokens
        prompt = [*first, *said, *more]
        states = KVCache()
        sample(model, [first], greedy, states=states)
        again = sample(model, [prompt], greedy, states=states, read=[14])[0].ids
        assert again == sample(model, [prompt], greedy)[0].ids


def test_angles_that_follow_the_length_are_refused_beyond_the_context(monkeypatch):
    """With "dynamic" angles every length has its own, and a cache holds those of earlier lengths."""
    from trl_ext import PPOv2Trainer
    from trl_ext.chat.encoding import PromptTooLong

    angles = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    monkeypatch.setitem(MORE, "llama", {"rope_parameters": angles, "max_position_embeddings": 16})
    model, tokenizer = build("llama")
    args = PPOv2Config(output_dir="unused", report_to=[], use_cpu=True, response_length=8, total_episodes=8)
    parts = {"train_dataset": [{"prompt": "1+1=1+1=1"}] * 8, "reward_funcs": lambda prompts, completions: []}
    with pytest.raises(PromptTooLong, match="reads at most 16"):
        PPOv2Trainer(args, tokenizer, model, **parts)


CHUNKED = ["llama", "qwen3_moe", "mixtral", "gpt_oss", "gpt2", "opt", "xglm", "biogpt", "llama4_text", "mamba", "rwkv", "bart",
           "modernbert-decoder", "gemma2", "cohere", "granite", "bert"]  # fmt: skip


@pytest.mark.parametrize("kind", some(CHUNKED, 0, 3, 6, 9, 11, 16))
def test_logits_in_chunks_are_those_of_the_whole(kind, tmp_path):
    model, tokenizer = build(kind)
    answers = ([3, 4, 5], [6, 7, 8, 9, 10]), ([5, 4], [9, 8, 7])
    rows = build_token_batch([Completion(*answer, False, "row") for answer in answers], "cpu")
    found = []
    for chunk in (None, 2):
        learner = learner_of(model, tokenizer, tmp_path, logits_chunk=chunk, entropy_coef=0.1)
        torch.nn.init.normal_(learner.value_head.linear.weight, generator=torch.Generator().manual_seed(0))
        out = learner.forward(rows, entropies=True)
        model.zero_grad()
        (out.logprobs.sum() + out.entropies.sum() + out.values.sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((out.logprobs.detach(), out.entropies.detach(), out.values.detach(), gradients))
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-3)


def test_a_critics_head_is_as_wide_as_what_the_output_head_reads(tmp_path):
    model, tokenizer = build("opt")  # OPT-350m projects states of 1024 to embeddings of 512; here it is 32 to 16
    assert model.config.hidden_size == 32 and head_width(model) == 16
    learner = learner_of(model, tokenizer, tmp_path)
    assert learner.value_head.linear.weight.shape == (1, 16)
    rows = build_token_batch([Completion([3, 4], [5, 6], False, "row")], "cpu")
    assert learner.forward(rows).values.shape == (2,)


def test_a_model_without_the_part_that_its_class_names_has_its_transformer_found():
    model, _ = build("llama4_text")
    assert model.base_model_prefix == "language_model" and trunk_of(model) is model.model


def test_a_head_that_reads_several_streams_is_refused(tmp_path):
    model, tokenizer = build("prophetnet")
    rows = build_token_batch([Completion([3, 4], [5, 6], False, "row")], "cpu")
    with pytest.raises(ValueError, match=r"the output head Linear reads \[1, 2, 3, 32\] for tokens \[1, 3\]; expected"):
        learner_of(model, tokenizer, tmp_path).forward(rows)


@pytest.mark.parametrize(("kind", "places"), [("llama", True), ("gpt2", True), ("mixtral", True), ("bart", False)])
def test_half_precision_does_not_make_a_model_count_otherwise(kind, places):
    config = CONFIG_MAPPING[kind](**build(kind)[0].config.to_dict())
    found = reading_of(lively(AutoModelForCausalLM.from_config(config)).to(torch.bfloat16))
    assert (found.positions, found.padding) == (places, places)


def test_a_model_is_asked_with_several_ordinary_tokens():
    """Special tokens stand at the ends of a vocabulary. In SmolLM2 they have activations in which rounding shows."""
    model, seen = build("llama")[0], set()
    size = model.config.vocab_size
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.update(inputs[0].flatten().tolist()))
    reading_of(model)
    asked = seen - {PADDING}
    assert len(asked) >= 6 and min(asked) >= size // 11 and max(asked) <= size * 9 // 11


def test_distributions_are_compared_and_not_what_nobody_samples():
    one = torch.tensor([5.0, 4.0, 3.0, -20.0])
    assert _close(one, torch.tensor([5.0, 4.0, 3.0, -19.0]), 1e-4) and _close(one, one + 7.0, 1e-4)
    assert not _close(one, torch.tensor([5.0, 4.1, 3.0, -20.0]), 1e-4)
    assert not _close(one, torch.tensor([5.0, 4.0, 3.0, -torch.inf]), 1e-4)


@pytest.mark.parametrize("architecture", ["mamba", "falcon_h1", "rwkv", "recurrent_gemma"])
@pytest.mark.parametrize("cut", some([{}, {"top_k": 4, "top_p": 0.9}], 1))
def test_what_is_sampled_by_transformers_depends_on_no_batch_and_tells_log_probabilities(architecture, cut):
    """So the options that cut batches may change on resume, and ratios to the sampler have something to compare with."""
    model, tokenizer = build(architecture)
    prompts = [tokenizer.encode(text) for text in ("1+1=", "20+30=", "3+4=", "5+6=7;")]
    keys = [(number,) for number in range(4)]
    said = [
        sample(model, prompts, Draw(5, stop_ids=frozenset(), temperature=0.7, **cut), keys, batch_size=rows)
        for rows in (1, 3, 4)
    ]
    for alone, *others in zip(*said, strict=True):
        assert all(other.ids == alone.ids for other in others)
        assert all(other.logprobs == pytest.approx(alone.logprobs, abs=1e-4) for other in others)
    for prompt, one in zip(prompts, said[-1], strict=True):
        assert one.logprobs == pytest.approx(plain_logprobs(model, prompt, one.ids, 0.7), abs=1e-3)
