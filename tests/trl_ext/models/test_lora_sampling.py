"""Rows of one batch go through different adapters of one base (trl_ext/models/lora_sampling.py), each as if it were
alone."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from tiny_models import build, lively, sample

from trl_ext.learning.policy import Policy
from trl_ext.models import lora_sampling
from trl_ext.models.lora_sampling import mixed, mixes
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.request import Draw, TokenRequest

PROMPTS = [[3, 4, 5], [3, 4, 6, 7], [3, 4, 5], [8, 9], [3, 4, 6, 7], [5, 5, 5, 5, 5]]
NAMES = ["ann", "bob", "cyd", "bob", "ann", "cyd"]


def lora(rank=4, alpha=8, targets=("q_proj", "v_proj"), **more):
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM", **more)


def team(model, configurations):
    """The model with one lively adapter for each configuration."""
    shared = None
    for name, configuration in configurations.items():
        if shared is None:
            shared = get_peft_model(model, configuration, adapter_name=name)
        else:
            shared.add_adapter(name, configuration)
    torch.manual_seed(1)
    for name, parameter in shared.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return shared.eval()


DIFFERENT = {
    "ann": lora(),
    "bob": lora(rank=2, alpha=3, use_rslora=True),
    "cyd": lora(rank=8, alpha=8, targets=("q_proj", "down_proj")),
}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_ranks_scales_and_layers_may_differ(tiny, architecture):
    configurations = DIFFERENT
    if architecture == "gpt2":
        ways = lora(targets=["c_attn"]), lora(2, 3, ["c_attn", "c_fc"]), lora(3, 9, ["c_fc"])
        configurations = dict(zip(DIFFERENT, ways, strict=True))
    shared = team(lively(build(tiny, architecture)[0]), configurations).double()
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [3, 4, 5, 6], [11, 12, 13, 14]])
    rows = ["bob", "ann", "cyd", "bob"]
    with torch.no_grad():
        with mixed(shared, rows) as choose:
            choose(rows)
            together = shared(ids).logits
            choose(rows[::-1])
            turned = shared(ids.flip(0)).logits.flip(0)
        assert torch.equal(turned, together), "a batch may have other rows than the one before"
        for number, name in enumerate(rows):
            shared.set_adapter(name)
            alone = shared(ids[number : number + 1]).logits[0]
            assert torch.allclose(alone, together[number], atol=1e-9)
    assert not torch.allclose(together[0], together[2]), "the adapters differ"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_that_is_alone_needs_no_mask_until_the_base_is_read_beside_it(tiny, dtype, monkeypatch):
    shared = team(lively(build(tiny, "llama")[0]), {"bob": DIFFERENT["bob"]}).to(dtype)
    ids, masks, most = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]), [], 1e-6 if dtype is torch.float64 else 0.1
    mask = lora_sampling._Rows.mask
    monkeypatch.setattr(lora_sampling._Rows, "mask", lambda rows, parts: masks.append(parts) or mask(rows, parts))
    with torch.no_grad():
        adapted = shared(ids).logits
        with shared.disable_adapter():
            plain = shared(ids).logits
        with mixed(shared, ["bob"]) as choose:
            choose(["bob", "bob"])
            assert torch.allclose(shared(ids).logits, adapted, atol=most, rtol=most) and masks == []
            choose(["bob", None])
            beside = shared(ids).logits
        assert len(masks) == 4 and torch.allclose(beside[0], adapted[0], atol=most, rtol=most)
        assert torch.allclose(beside[1], plain[1], atol=most, rtol=most)
    assert float((adapted - plain).abs().max()) > 0.5


def test_a_batch_that_shrinks_and_reads_equal_prompts_once_samples_as_each_adapter_alone(tiny):
    shared = team(lively(build(tiny, "llama")[0]), DIFFERENT)
    keys = [(7, number) for number in range(len(PROMPTS))]
    drawn = Draw(12, 1.0, stop_ids=frozenset(range(3, 9)))
    together = sample(shared, PROMPTS, drawn, keys, NAMES, batch_size=4)
    assert len({len(answer.ids) for answer in together}) > 1, "rows leave the batch at different times"
    for name in DIFFERENT:
        shared.set_adapter(name)
        alone = sample(shared.get_base_model(), PROMPTS, drawn, keys, batch_size=4)
        for one, other, owner in zip(alone, together, NAMES, strict=True):
            if owner == name:
                assert one.ids == other.ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_gradients_reach_the_adapter_of_the_row_and_no_other(tiny):
    shared = team(lively(build(tiny, "llama")[0]), {"ann": lora(), "bob": lora()})
    for name, parameter in shared.named_parameters():
        parameter.requires_grad_("lora_" in name)
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    with mixed(shared, ["ann", "bob"]) as choose:
        choose(["ann", "bob"])
        logits = shared(ids).logits
    logits[0].logsumexp(-1).sum().backward()  # of ann's row
    grads = {name: parameter.grad for name, parameter in shared.named_parameters() if "lora_" in name}
    assert all(bool(grad.any()) for name, grad in grads.items() if ".ann." in name)
    assert not any(bool(grad.any()) for name, grad in grads.items() if ".bob." in name)


def test_the_layers_are_those_of_before_even_after_an_error(tiny):
    shared = team(lively(build(tiny, "llama")[0]), DIFFERENT)
    layers = [layer for layer in shared.modules() if isinstance(layer, LoraLayer)]
    hooked = layers[0].forward = partial(layers[0].forward)
    with pytest.raises(RuntimeError, match="out of memory"), mixed(shared, NAMES) as choose:
        assert all("forward" in vars(layer) and layer.forward is not hooked for layer in layers)
        choose(NAMES)
        raise RuntimeError("out of memory")
    assert layers[0].forward is hooked and not any("forward" in vars(layer) for layer in layers[1:])


def test_an_adapter_of_the_head_and_those_of_experts_read_alone(tiny):
    """What else is more than an ordinary LoRA stands in ``test_adapters.py``."""
    model = build(tiny, "llama")[0]
    assert not mixes(model, "ann") and not mixes(model, None)
    shared = team(model, {"ann": lora(targets=["q_proj", "lm_head"]), "bob": lora()})
    assert not mixes(shared, "ann") and mixes(shared, "bob")
    shared.config.num_local_experts = 4
    assert not mixes(shared, "bob")


def test_adapters_of_one_base_share_a_batch_unless_told_otherwise(tiny):
    model, tokenizer = tiny("llama")
    shared = team(model, {"ann": lora(), "bob": lora()})
    policies = {name: Policy(name, shared, tokenizer, name) for name in ("ann", "bob")}
    assert {OwnWeights(policies).group(one) for one in policies.values()} == {("mixed", id(shared))}
    apart = OwnWeights(policies, mix=False)
    assert [apart.group(one) for one in policies.values()] == [("plain", "ann"), ("plain", "bob")]
    # alone, a CPU mixes it still, and elsewhere PEFT's own way is taken
    alone = Policy("ann", shared, tokenizer, "ann")
    assert OwnWeights({"ann": alone}).group(alone)[0] == "mixed"
    shared.to("meta")
    assert OwnWeights({"ann": alone}).group(alone) == ("plain", "ann")


def test_two_policies_of_one_batch_each_answer_by_their_own_adapter(tiny):
    model, tokenizer = tiny("llama")
    shared = team(lively(model), {"ann": lora(), "bob": lora()})
    policies = {name: Policy(name, shared, tokenizer, name) for name in ("ann", "bob")}
    engine = OwnWeights(policies, 8)
    asked = [TokenRequest(name, PROMPTS[0], Draw(12, 1.0), (7,)) for name in ("ann", "bob")]
    ann, bob = engine.together(asked, "mixed")
    assert [engine.together([one], "mixed")[0].ids for one in asked] == [ann.ids, bob.ids] and ann.ids != bob.ids
