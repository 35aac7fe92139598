"""The engine that samples from the models of its process: how many rows it samples at a time."""

from contextlib import nullcontext

import pytest
import torch

from trl_ext.sampling import own_weights
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.own_weights import OwnWeights, fitting_rows
from trl_ext.sampling.request import Draw, TokenRequest

GIB = 2**30


@pytest.mark.parametrize(("row_bytes", "free", "rows"), [
    (80_000_000, 79 * GIB, 256),  # a quarter is 21.2e9, and 256 rows take 20.5e9
    (80_000_000, 76 * GIB, 128),  # a quarter is 20.4e9
    (80_000_000, 39 * GIB, 128),  # a quarter is 10.5e9, and 128 rows take 10.2e9
    (80_000_000, 38 * GIB, 64),
    (80_000_000, GIB, 64),  # what 64 rows take is not asked
    (1, 0, 64),
    (1, 1024, 256),
    (1, 1023, 128),
])  # fmt: skip
def test_a_quarter_of_the_free_memory_decides_how_many_rows_are_sampled_at_a_time(row_bytes, free, rows):
    assert fitting_rows(row_bytes, free) == rows


@pytest.fixture
def batch_sizes(monkeypatch):
    """The most rows of each call of sampling."""
    sizes = []

    def sample(model, requests, tokenizers, batch_size, *others):
        sizes.append(batch_size)
        return [Sampled([]) for _ in requests]

    monkeypatch.setattr(own_weights, "sample", sample)
    return sizes


def engine_of(model, tokenizer, **options):
    class Weights:
        name, adapter = "p", None

        def active(self):
            return nullcontext(self.model)

    weights = Weights()
    weights.model, weights.tokenizer = model, tokenizer
    return OwnWeights({"p": weights}, **options)


def test_the_longest_row_counts_and_the_memory_that_is_free_at_first(tiny, monkeypatch, batch_sizes):
    """Llama in float32: 2 layers of width 64 with 64 numbers of keys, and 170 inside."""
    model, tokenizer = tiny("llama")
    token, read = 4 * 2 * 2 * 64, 4 * (8 * 64 + 4 * 170)
    config = model.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert (config.num_hidden_layers, heads, config.hidden_size, config.intermediate_size) == (2, 64, 64, 170)
    asked = []
    row = 100 * token + 60 * read  # 60 tokens of a prompt and 40 new ones

    def free_bytes(device):
        asked.append(str(device))
        return 4 * 128 * row if len(asked) == 1 else 0

    monkeypatch.setattr(own_weights, "free_bytes", free_bytes)
    engine = engine_of(model.to("meta"), tokenizer)
    for prompts, new in (([60, 5], 40), ([5, 61], 40), ([5], 10), ([60], 40)):
        engine.submit([TokenRequest("p", [3] * length, Draw(new)) for length in prompts])
    assert batch_sizes == [128, 64, 256, 128] and asked == ["meta"]
    engine_of(model, tokenizer, batch_size=7).submit([TokenRequest("p", [3], Draw(1))])
    monkeypatch.setattr(own_weights, "free_bytes", lambda device: None)
    engine_of(model, tokenizer).submit([TokenRequest("p", [3], Draw(1))])
    assert batch_sizes[4:] == [7, 64], "a number that is set, and a device that cannot tell"


def test_a_cpu_samples_64_rows_at_a_time(tiny, monkeypatch, batch_sizes):
    monkeypatch.setattr(own_weights, "free_bytes", lambda device: pytest.fail("a CPU is not asked"))
    model, tokenizer = tiny()
    engine_of(model.to(torch.bfloat16), tokenizer).submit([TokenRequest("p", [3], Draw(1))])
    assert batch_sizes == [64]
