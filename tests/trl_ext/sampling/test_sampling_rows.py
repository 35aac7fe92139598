"""Rows of one batch that are sampled differently: each as if it were alone."""

import random

import pytest
import torch
from tiny_models import build_any, lively, sample
from transformers import MambaConfig, MambaForCausalLM

from maporl import Agent, Team
from maporl.decoding import Sampling as Settings
from maporl.engines.base import Request
from maporl.engines.text import TextEngine
from maporl.engines.transcript import Transcript
from maporl.types import Ask, Example, Stop
from trl_ext.ppo.options import Decoding, PPOOptions
from trl_ext.sampling.kv_cache import KVCache
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.request import Draw


def mixture(generator, rows):
    """Different samplings, with greedy rows, short rows and rows with stop strings among them."""
    choices = [1, 3, 9, 14], [0.0, 0.5, 1.0, 1.7], [1.0, 0.8, 0.5], [0, 2, 5], [(), ("1",), ("23", "4")]
    return [Draw(*map(generator.choice, choices), frozenset([2])) for _ in range(rows)]


@pytest.mark.parametrize("seed", range(8))
def test_a_row_does_not_depend_on_the_sampling_of_its_neighbours(tiny, seed):
    """In float64, where the rounding of other batch sizes cannot change a token."""
    model, tokenizer = build_any(tiny, "llama")
    generator = random.Random(seed)
    prompts = [[generator.randrange(3, len(tokenizer)) for _ in range(generator.randint(2, 9))] for _ in range(12)]
    each = mixture(generator, 12)
    keys = [("row", seed, number) for number in range(12)]
    together = sample(model, prompts, each, keys, states=KVCache(None), tokenizer=tokenizer)
    alone = [
        sample(model, [p], one, [k], tokenizer=tokenizer)[0] for p, one, k in zip(prompts, each, keys, strict=True)
    ]
    assert [row.ids for row in together] == [row.ids for row in alone]
    assert len({len(row.ids) for row in together}) > 2
    for one, row, draw in zip(together, alone, each, strict=True):
        assert (one.logprobs is None) == (draw.temperature == 0) == (row.logprobs is None)
        assert len(one.ids) <= draw.max_tokens
        if one.logprobs is not None:
            assert one.logprobs == pytest.approx(row.logprobs, abs=1e-5)


def test_a_greedy_draw_is_cut_by_nothing():
    assert Draw(5, 0.7, 0.9, 20).decoding == Decoding(0.7, 0.9, 20)
    assert Draw(5, 0.0, 0.9, 20).decoding == Decoding(0.0)


def test_rows_without_a_key_draw_from_torchs_state_and_others_by_their_keys(tiny):
    model, _ = build_any(tiny, "llama")
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(sample(model, [[3, 4], [5, 6]], Draw(20), [("a",), None]))
    assert found[0] == found[1] and found[0][0] == found[2][0] and found[0][1].ids != found[2][1].ids


def test_batches_hold_the_longest_rows_that_are_in_them(tiny, monkeypatch):
    """20 tokens: 2 rows of 5 + 5, or 4 rows of 3 + 2."""
    from trl_ext.sampling import batch as module

    sizes = []
    monkeypatch.setattr(module.Batch, "run", lambda self: sizes.append(len(self.rows)))
    long, short = Draw(5, 1.0), Draw(2, 1.0)
    model, _ = tiny()
    sample(model, [[3] * 5] * 2 + [[3] * 3] * 4, [long] * 2 + [short] * 4, batch_tokens=20)
    assert sizes == [2, 4]


def test_models_with_recurrent_states_sample_rows_that_are_alike_together(tiny):
    _, tokenizer = tiny()
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0)
    model = lively(MambaForCausalLM(config))
    greedy, short = Draw(6, 0.0), Draw(2, 1.0)
    own = [greedy, short, greedy, short]
    found = sample(model, [[3, 4]] * 4, own, [("k", n) for n in range(4)])
    assert [len(one.ids) for one in found] == [6, 2, 6, 2] and found[0].ids == found[2].ids


# -- the engine ---------------------------------------------------------------------------------------------------


def request(number, sampling=None):
    ask, example = Ask("ann", [{"role": "user", "content": "1+2="}]), Example("e", "", "")
    return Request(ask, example, 0, number, Transcript(), f"r {number}", "shared", ("k", number), sampling=sampling)


@pytest.fixture
def engine(tiny):
    model, tokenizer = tiny()
    team = Team([Agent("ann", lively(model), tokenizer, policy="shared")])
    team.find_stop_ids(PPOOptions())
    return TextEngine(team.policies, OwnWeights(team.policies, 64), 8)


def test_requests_of_one_batch_have_their_own_temperature_length_and_stop_strings(engine):
    run = Decoding(1.0)
    first = engine.generate([request(n) for n in range(6)], run)
    word = first[3].text[0]
    own = [None, Settings(0.0), Settings(max_tokens=2), Settings(stop=[word]), None]
    found = engine.generate([request(n, one) for n, one in enumerate([*own, None])], run)
    assert found[0].response_ids == first[0].response_ids and found[4].response_ids == first[4].response_ids
    assert found[1].logprobs is None and found[0].logprobs is not None
    assert found[2].response_ids == first[2].response_ids[:2]
    ids, tokenizer = found[3].response_ids, engine.policies["shared"].tokenizer
    assert found[3].stop is Stop.STOP and word in tokenizer.decode(ids) and word not in tokenizer.decode(ids[:-1])


def test_a_completion_that_a_stop_string_ends_says_so_and_the_policys_own_strings_give_way(engine):
    voice = engine.policies["shared"].voice
    alphabet = list("0123456789+*= :;?ab")
    voice.end_at(voice.stop_ids, alphabet)
    own = engine.generate([request(n) for n in range(8)], Decoding(1.0))
    assert all(r.stop is not Stop.LENGTH for r in own)
    free = [request(n, Settings(stop=[])) for n in range(8)]
    assert any(len(r.response_ids) == 8 and r.stop is Stop.LENGTH for r in engine.generate(free, Decoding(1.0)))
    own = [request(n, Settings(stop=alphabet)) for n in range(8)]
    ended = engine.generate(own, Decoding(1.0))
    assert {r.stop for r in ended} <= {Stop.STOP, Stop.EOS} and any(r.stop is Stop.STOP for r in ended)
    assert all(len(r.response_ids) < 8 for r in ended)
