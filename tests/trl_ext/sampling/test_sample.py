"""Sampling: a row's completion depends only on its own prompt and its own random numbers."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_models import build, build_any, lively, sample
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention

from trl_ext.models.forward import reading_of
from trl_ext.sampling.batch import Row, inverse_cdf
from trl_ext.sampling.kv_cache import KVCache, RoomyLayer, plain_states
from trl_ext.sampling.request import Draw, TokenRequest
from trl_ext.sampling.sample import generate
from trl_ext.sampling.sample import sample as sample_requests

PROMPTS = [[5], [6, 7, 8, 9], [10, 11], [6, 7, 8, 9], [12, 13, 14, 15, 16, 17, 18], [10, 11]]
STOP = frozenset({2, 9, 11})


def alone(model, prompt, new):
    """Greedy decoding of one row, written out without padding and without a cache."""
    ids = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in STOP:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_greedy_answers_are_those_of_every_row_alone(tiny, architecture):
    model = lively(build(tiny, architecture)[0])
    expected = [alone(model, prompt, 12) for prompt in PROMPTS]
    assert len({len(e) for e in expected}) > 1, "rows end at different times"
    for options in ({}, {"batch_size": 2}, {"batch_tokens": 30}):
        found = sample(model, PROMPTS, Draw(12, 0.0, stop_ids=STOP), **options)
        assert [answer.ids for answer in found] == expected


def test_equal_prompts_are_read_once_and_ended_rows_leave(tiny):
    model = lively(build(tiny, "llama")[0])
    reading_of(model)  # by forwards of its own
    sizes = []
    model.register_forward_pre_hook(
        lambda module, arguments, options: sizes.append(options["input_ids"].shape), with_kwargs=True
    )
    answers = generate(model, PROMPTS, Draw(12, 1.0, stop_ids=STOP))
    assert sizes[0] == (4, 7)
    lengths = sorted(map(len, answers))
    assert [s[0] for s in sizes[1:]] == sorted((s[0] for s in sizes[1:]), reverse=True) and sizes[-1][0] < 6, lengths


def test_samples_follow_the_models_distribution_and_carry_its_log_probabilities(tiny):
    model, _ = build(tiny, "llama")
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([[5, 6]])).logits[0, -1] / 0.7, -1)
    torch.manual_seed(0)
    found = sample(model, [[5, 6]] * 20000, Draw(1, 0.7), batch_size=20000)
    counts = torch.bincount(torch.tensor([one.ids[0] for one in found]), minlength=len(expected)) / 20000
    # 4.5 standard deviations of each share
    assert bool(((counts - expected).abs() < 4.5 * (expected * (1 - expected) / 20000).sqrt() + 1e-9).all())
    for one in found[:50]:
        assert one.logprobs == pytest.approx([float(expected[one.ids[0]].log())], abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mamba"])  # rows of a batch, and those of transformers' own generation
def test_the_likeliest_tokens_of_those_that_are_asked_for_are_told_at_each_place(tiny, kind):
    model = lively(build_any(tiny, kind, "eager", torch.float32)[0])
    tops, draws = [3, 0, 99, 3], [Draw(4, 0.7, 0.9, 5), Draw(4, 1.0), Draw(4, 1.0), Draw(2, 0.0)]
    asked = [TokenRequest("", PROMPTS[n], draws[n], (n,), top=top) for n, top in enumerate(tops)]
    found = sample_requests(model, asked)
    for request, one in zip(asked, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + one.ids])).logits[0, len(request.prompt_ids) - 1 : -1]
        whole = torch.log_softmax(logits.float() / (request.draw.temperature or 1), -1)
        count = min(request.top, whole.shape[1])
        if not count or one.logprobs is None:
            assert one.top is None, "nobody has asked, or no other one can come"
            continue
        assert [[token for token, _ in line] for line in one.top] == whole.topk(count).indices.tolist()
        told = torch.tensor([[logprob for _, logprob in line] for line in one.top])
        torch.testing.assert_close(told, whole.topk(count).values, atol=1e-5, rtol=0)
    bare = sample_requests(model, [replace(request, top=0) for request in asked])
    assert [(one.ids, one.logprobs) for one in bare] == [(one.ids, one.logprobs) for one in found]


def test_tokens_that_cannot_come_are_no_alternatives():
    row = Row(TokenRequest("", [5], Draw(1, 0.5), top=3), None)
    row.note_top(torch.tensor([1.0, -torch.inf]))
    assert row.top == [[(0, 0.0)]]


def test_top_p_leaves_out_the_tail(tiny):
    model, _ = build(tiny, "llama")
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([[5, 6]])).logits[0, -1], -1)
    ordered = probabilities.sort(descending=True)
    kept = ordered.indices[: int((ordered.values.cumsum(0) < 0.5).sum()) + 1].tolist()
    torch.manual_seed(0)
    sampled = {one[0] for one in generate(model, [[5, 6]] * 2000, Draw(1, 1.0, top_p=0.5), batch_size=2000)}
    assert sampled == set(kept)


@pytest.mark.parametrize(
    "architecture, share", [("llama", None), ("gpt2", None), ("llama", 0.0), ("llama", 0.3), ("llama", 0.7)]
)
def test_kept_states_give_the_answers_of_reading_all_again(tiny, architecture, share, monkeypatch):
    """Three turns, with suffixes of different lengths, rows that end at different times, forks, and a new row.

    With a ``share`` the budget is this share of what the three turns would keep at most, which is 98,304 bytes or more.
    """
    model = lively(build(tiny, architecture)[0])
    budget = None if share is None else int(share * 98_304)
    states, prompts, known, read = KVCache(budget), [list(p) for p in PROMPTS], [0] * 6, []
    monkeypatch.setattr("trl_ext.sampling.kv_cache.free_bytes", lambda device: None)
    model.register_forward_pre_hook(
        lambda module, arguments, options: read.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    for turn in range(3):
        read.clear()
        answers = sample(model, prompts, Draw(8, 0.0, stop_ids=STOP), batch_size=4, states=states, read=known)
        if turn and budget is None:
            assert read[0] <= 5, "only what is new is read"
        if budget is not None:
            assert states.bytes <= states.largest <= budget
            assert states.bytes == sum(block.bytes for block in {place.block for place in states._kept.values()})
            assert not states._taken
            assert bool(states.largest) is (share > 0)
        assert [a.ids for a in answers] == [alone(model, p, 8) for p in prompts]
        prompts = [p + a.ids for p, a in zip(prompts, answers, strict=True)]
        known = [len(p) for p in prompts]
        prompts = [p + [3 + row] * (1 + row % 4) for row, p in enumerate(prompts)]
        if turn == 1:
            prompts = [*prompts[:4], [*prompts[3][: known[3]], 19, 20], [15, 16, 5]]
            known = [*known[:4], known[3], 0]
    largest, forgotten = states.take_counts()
    assert (forgotten == 0 and largest >= 98_304) if budget is None else forgotten > 0
    states.clear()
    assert len(states) == 0 == states.bytes


def test_kept_states_take_half_of_the_free_memory_unless_told_otherwise(tiny, monkeypatch):
    model = lively(build(tiny, "llama")[0])
    for free, kept in ((2**30, True), (0, False), (None, True)):  # a device that cannot tell sets no limit
        monkeypatch.setattr("trl_ext.sampling.kv_cache.free_bytes", lambda device, free=free: free)
        states = KVCache()
        sample(model, PROMPTS, Draw(4, 0.0, stop_ids=STOP), states=states, read=[0] * 6)
        assert len(states) == (len({tuple(p) for p in PROMPTS}) if kept else 0)
        assert states._limit == (sys.maxsize if free is None else free // 2)


def test_conversations_that_were_kept_first_are_forgotten_first():
    """Four blocks of one row and 100 bytes each, in a budget of two; the first one is being read meanwhile."""
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=torch.zeros(1, 1, 5, 5), values=torch.zeros(1, 1, 5, 0))])
    states = KVCache(200)

    def keep(name):
        states.keep([name], cache, torch.ones(1, 5), [0], [5])

    keep("a")
    taken = states.take(["a", "unknown"])
    assert taken[0] is not None and taken[1] is None and len(states) == 0 and states.bytes == 100
    for name in "bc":
        keep(name)
    assert list(states._kept) == ["c"] and states.bytes == 200 and states.forgotten == 1
    del taken
    assert states.bytes == 100
    keep("d")
    assert list(states._kept) == ["c", "d"]
    states.keep(["e", "f", "g"], SimpleNamespace(layers=[SimpleNamespace(keys=torch.zeros(3, 1, 5, 5), values=torch.zeros(3, 1, 5, 0))]),
                torch.ones(3, 5), [0, 1, 2], [5, 5, 5])  # fmt: skip
    assert list(states._kept) == ["e", "f"] and states.bytes == 200
    assert states.take_counts() == (200, 4), "b, c, d, g"
    assert states.take_counts() == (200, 0)
    states.clear()
    assert states.take_counts() == (200, 0) and states.take_counts() == (0, 0), (
        "the largest size is since the last call"
    )


def test_states_are_kept_only_where_columns_do_not_count(tiny):
    """Gemma 2's sliding windows count columns. Padding between a row's states would move them, so none are kept."""
    assert plain_states(build(tiny, "llama")[0]) == "everywhere"
    model, _ = build(tiny, "gemma2")
    assert plain_states(model) == "windowed"
    states = KVCache()
    sample(model.eval(), PROMPTS, Draw(8, 0.0, stop_ids=STOP), states=states, read=[0] * 6)
    assert len(states) == 0
    # the trap itself: padding inside a row, beyond the window of 8, changes the logits
    ids = torch.randint(3, 20, (1, 24), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids[:, :12], torch.zeros(1, 6, dtype=torch.long), ids[:, 12:]], 1)
    mask = (torch.arange(30) < 12) | (torch.arange(30) >= 18)
    positions = (mask.long().cumsum(0) - 1).clamp(min=0).unsqueeze(0)
    for architecture, same in (("llama", True), ("gemma2", False)):
        model, _ = build(tiny, architecture)
        with torch.no_grad():
            plain = model.eval()(ids).logits[0, -1]
            inside = model(padded, attention_mask=mask.long().unsqueeze(0), position_ids=positions).logits[0, -1]
        assert torch.allclose(plain, inside, atol=1e-4) is same


def test_a_step_of_decoding_copies_its_own_keys_only_and_equals_the_library_cache():
    """Keys go into memory with room, which is moved once in 64 steps.

    The cache of transformers copies all in each step.
    """
    torch.manual_seed(0)
    plain, roomy = DynamicLayer(), RoomyLayer()
    seen, rows = [], 3
    for step in range(140):
        new = [torch.randn(rows, 2, 5 if step == 0 else 1, 4) for _ in range(2)]
        for expected, found in zip(plain.update(*new), roomy.update(*new), strict=True):
            assert torch.equal(expected, found)
        seen.append(roomy.keys)  # which keeps its memory, so that no later one gets the same place
        if step == 100:  # a row ends and leaves the batch
            for layer in (plain, roomy):
                layer.batch_select_indices(torch.tensor([0, 2]))
            rows = 2
    places = [keys.data_ptr() for keys in seen]
    moved = [step for step in range(1, 140) if places[step] != places[step - 1]]
    assert moved == [65, 101], "after 64 tokens, and after the batch got smaller, whose memory has room for 64 more"


@pytest.mark.skipif(not hasattr(sdpa_attention, "pack_gqa"), reason="this transformers repeats the keys itself")
def test_heads_that_share_keys_read_them_once_in_a_step_of_decoding(monkeypatch):
    """Without a mask, torch's kernel for processors reads the keys once for each head of queries, six times as
    slowly."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=1, max_position_embeddings=64)  # fmt: skip
    model, shapes = lively(LlamaForCausalLM(config)).eval(), []
    reading_of(model)  # by forwards of its own
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        shapes.append((query.shape[1:3], key.shape[1], options.get("enable_gqa", False)))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    found = generate(model, [[5, 6, 7], [8, 9, 10]], Draw(4, 0.0))
    assert shapes[1:] == [((1, 4), 1, False)] * 3, "four queries of a row beside each other, for one head of keys"
    monkeypatch.undo()
    for prompt, answer in zip([[5, 6, 7], [8, 9, 10]], found, strict=True):
        for count, token in enumerate(answer):  # read from the beginning, without any cache
            assert model(torch.tensor([prompt + answer[:count]])).logits[0, -1].argmax() == token


def test_a_draw_that_rounds_to_one_never_takes_a_token_of_probability_zero():
    """1 - 2^-25 is below 1 in float64 and equals 1 in float32, in which probabilities are added up."""
    probabilities = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.0, 0.75], [1.0, 0.0, 0.0]])
    draw = torch.full((3,), 1 - 2**-25, dtype=torch.float64)
    assert float(draw[0]) < 1.0 and float(draw[0].float()) == 1.0
    assert inverse_cdf(probabilities, draw).tolist() == [1, 2, 0]
    assert inverse_cdf(probabilities, torch.zeros(3, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_sums_that_rounding_makes_grow_never_take_a_token_of_probability_zero(monkeypatch):
    """An accelerator adds up in parallel.

    Neighbouring sums may then differ although the token between has probability 0.
    """
    probabilities = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.1, 0.2, 0.0, 0.7]])
    sums = torch.tensor([[0.5, 0.5001, 0.8001, 1.0001], [0.1, 0.3, 0.3001, 1.0001]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda values, dim: sums)
    draw = torch.tensor([0.50003, 0.30002], dtype=torch.float64)
    assert torch.searchsorted(sums, (draw * 1.0001).float().unsqueeze(1), right=True).tolist() == [[1], [2]]
    assert inverse_cdf(probabilities, draw).tolist() == [0, 3]


def test_the_output_head_reads_one_whole_row_for_each_prompt(tiny):
    """torch multiplies a slice of a batch of hidden states by as many copies of the head's weights as there are
    rows."""
    model, _ = build(tiny, "llama")
    reading_of(model)  # by forwards of its own
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    generate(model, PROMPTS, Draw(4, 0.0, stop_ids=STOP))
    assert len(seen) > 1 and seen[0].shape[:2] == (len({tuple(p) for p in PROMPTS}), 1)
    assert all(hidden.shape[1] == 1 and hidden.is_contiguous() for hidden in seen)
