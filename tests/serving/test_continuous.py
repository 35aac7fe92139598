"""Continuous batching: what a completion says does not depend on when it was asked for, or on who else asks."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import asked, build, lively

from maporl.serving.continuous import FEWEST, KEPT, ContinuousWeights
from trl_ext.process.waits import pause, result
from trl_ext.sampling.request import Draw
from trl_ext.sampling.sample import sample

STOP = frozenset({2, 9, 11})


def policy(name, model, tokenizer=None, adapter=None):
    """A policy as the engine sees it."""

    @contextmanager
    def active():
        if adapter is not None:
            model.set_adapter(adapter)
        yield model.get_base_model() if adapter is not None else model

    return SimpleNamespace(name=name, model=model, tokenizer=tokenizer, adapter=adapter, active=active)


def draws(number, names):
    """Requests of different lengths: greedy and drawn, with and without what ends them early."""
    rng = random.Random(number)
    prompts = [[rng.randrange(3, 19) for _ in range(rng.randrange(1, 14))] for _ in range(number)]
    kinds = [Draw(rng.randrange(1, 20), rng.choice([0.0, 0.8, 1.3]), stop_ids=rng.choice([STOP, frozenset()]))
             for _ in prompts]  # fmt: skip
    return asked(prompts, kinds, [("key", n) for n in range(number)], [rng.choice(names) for _ in prompts])


def staggered(engine, requests, seed):
    """Submit ``requests`` at times of their own, and return what was sampled for each."""
    rng, futures = random.Random(seed), []
    for request in requests:
        futures += engine.submit([request])
        pause(rng.choice([0, 0, 0.003, 0.01]))
    return [result(future, 60) for future in futures]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_completions_are_those_of_a_batch_that_is_sampled_at_once(tiny, architecture):
    model = lively(build(tiny, architecture)[0])
    requests = draws(24, ["one"])
    expected = sample(model, requests)
    engine = ContinuousWeights({"one": policy("one", model)}, batch_size=5)
    for seed in range(2):
        found = staggered(engine, requests, seed)
        assert [one.ids for one in found] == [one.ids for one in expected]
        for one, other in zip(found, expected, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            assert one.logprobs is None or one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine.running == 0


def test_adapters_of_one_base_share_a_batch(tiny):
    torch.manual_seed(0)
    shared = get_peft_model(lively(build(tiny, "llama")[0]), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "a")
    shared.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in shared.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    requests = draws(16, ["a", "b"])
    policies = {name: policy(name, shared, adapter=name) for name in ("a", "b")}
    expected = sample(shared, requests, adapters={"a": "a", "b": "b"})
    reads = []
    shared.get_base_model().register_forward_pre_hook(
        lambda module, arguments, options: reads.append(len(options["input_ids"])), with_kwargs=True
    )
    engine = ContinuousWeights(policies)
    futures = engine.submit(requests)
    assert [result(one, 60).ids for one in futures] == [one.ids for one in expected]
    assert max(reads) == len(requests), "both adapters' rows are read together"


def test_what_a_prompt_shares_with_an_earlier_one_is_not_read_again(tiny):
    model = lively(build(tiny, "llama")[0])
    system = [3 + n % 16 for n in range(20)]
    draw = Draw(5, 0.0)
    engine = ContinuousWeights({name: policy(name, model) for name in ("one", "two")})
    read = []
    model.register_forward_pre_hook(
        lambda module, arguments, options: read.append(options["input_ids"].shape[1]), with_kwargs=True
    )

    def said(prompt, name="one"):
        requests = asked([prompt], draw, policies=[name])
        expected = sample(model, requests)[0].ids
        read.clear()
        assert result(engine.submit(requests)[0], 60).ids == expected
        return expected, read[0]

    first, whole = said([*system, 4, 5])
    assert whole == 22
    assert said([*system, 6, 7, 8])[1] == 3  # the system prompt is kept
    # the conversation goes on: of its answer the last token was drawn and not read
    assert said([*system, 4, 5, *first, 9, 3])[1] == 3
    assert said([*system, 4, 5])[1] == 1  # the same again: the last token is read, for what follows it
    assert said([*system, 6, 7, 8], "two")[1] == 23  # another policy has other weights
    assert said(system[:FEWEST])[1] == FEWEST  # it shares 15 tokens, which are read as quickly
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert {group.kept.budget for group in engine._groups.values()} == {int(KEPT * weights)} and KEPT == 1 / 4


def test_who_gives_up_leaves_the_batch_and_a_failure_is_told_to_all(tiny, caplog):
    model = lively(build(tiny, "llama")[0])
    engine = ContinuousWeights({"one": policy("one", model)})
    endless = Draw(10**6, 0.0)
    gone, other = engine.submit(asked([[5], [6, 7]], endless, policies=["one"] * 2))
    pause(0.05)
    assert engine.running == 2 and gone.cancel()
    pause(0.1)
    assert engine.running == 1

    def broken(*arguments, **options):
        raise RuntimeError("out of memory")

    handle = model.register_forward_pre_hook(broken, with_kwargs=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        result(other, 30)
    handle.remove()
    [unknown] = engine.submit(asked([[5]], Draw(1, 0.0), policies=["nobody"]))
    with pytest.raises(KeyError, match="nobody"):
        result(unknown, 30)
    [again] = engine.submit(asked([[6, 7]], Draw(3, 0.0), policies=["one"]))
    assert len(result(again, 30).ids) == 3
