"""Packed weights: the same products on a CPU, while tokens are sampled, and of the weights as they are then."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import lively, sample
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trl_ext.sampling import packed_weights
from trl_ext.sampling.packed_weights import FEWEST_STEPS, SMALLEST, packed
from trl_ext.sampling.request import Draw

PROMPTS = [[5], [6, 7, 8, 9], [12, 13, 14, 15]]
HERE = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
pytestmark = pytest.mark.skipif(not HERE, reason="no processor on which weights are packed")


def model_of(dtype=torch.float32, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=320, max_position_embeddings=128, **sizes, **more)
    return lively(LlamaForCausalLM(config)).to(dtype).eval()


def packed_layers(model):
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "forward" in vars(layer)]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_products_are_those_of_the_plain_weights(dtype, most):
    model, ids = model_of(dtype, attention_bias=True), torch.randint(320, (3, 7), generator=torch.Generator())
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with packed(model):
            # keys and values of 256 x 256, too: 7 layers in each of two blocks, and the head
            assert len(packed_layers(model)) == 15 and SMALLEST <= 256 * 256
            found = model(input_ids=ids).logits
            model.lm_head.weight.zero_()
            assert torch.equal(model(input_ids=ids).logits, found), "the copies are what is read"
        assert packed_layers(model) == [] and not model(input_ids=ids).logits.any()
    assert float((found - plain).abs().max()) <= most * float(plain.abs().max())


def test_completions_are_sampled_with_packed_weights_where_that_pays_and_with_those_of_the_moment():
    model, seen = model_of(), []
    model.register_forward_pre_hook(lambda *_: seen.append(len(packed_layers(model))))
    few = sample(model, PROMPTS, Draw(FEWEST_STEPS - 1, 0.0))
    assert set(seen) == {0}
    seen.clear()
    many = sample(model, PROMPTS, Draw(FEWEST_STEPS, 0.0))
    assert set(seen) == {15} and packed_layers(model) == []
    assert [answer.ids[:-1] for answer in many] == [answer.ids for answer in few]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))  # each token's scores become the next token's
        rolled = sample(model, PROMPTS, Draw(FEWEST_STEPS, 0.0))
    assert [a.ids[0] for a in rolled] == [(a.ids[0] + 1) % 320 for a in many]


def test_an_error_leaves_no_packed_weights_behind():
    model = model_of()

    def fail(*_):
        if packed_layers(model):
            raise RuntimeError("out of luck")

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        sample(model, PROMPTS, Draw(FEWEST_STEPS, 1.0))
    assert packed_layers(model) == []


def test_gradients_autocast_and_other_dtypes_take_the_plain_weights():
    model, ids = model_of(), torch.arange(5, 12)[None]
    layer, rows = model.lm_head, torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        halved = layer(rows)
    with packed(model):
        model(input_ids=ids).logits.sum().backward()
        assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert torch.equal(layer(rows), halved)
        with pytest.raises(RuntimeError, match="dtype"), torch.no_grad():
            layer(rows.double())  # as without packing


def test_what_is_small_or_wrapped_or_not_plain_multiplies_as_it_is(monkeypatch):
    lora = get_peft_model(model_of(), LoraConfig(r=4, target_modules=["q_proj"]))
    bare = lora.get_base_model()
    with packed(bare):
        names = packed_layers(bare)
        assert len(names) == 15 and not any("lora_" in name for name in names)
        assert "model.layers.0.self_attn.q_proj.base_layer" in names
        with packed(bare):  # a second call finds them packed, and leaves them so
            pass
        assert packed_layers(bare) == names
    wrapped = bare.lm_head.forward = bare.lm_head.forward  # as hooks of accelerate do
    with packed(bare):
        assert len(packed_layers(bare)) == 15 and vars(bare.lm_head)["forward"] is wrapped
    assert vars(bare.lm_head)["forward"] is wrapped
    small = model_of()
    with packed(small.double()):
        assert packed_layers(small) == []
    monkeypatch.setattr(packed_weights, "free_bytes", lambda device: 1_000_000)  # the copies have 3.1 MB
    model = model_of()
    with packed(model):
        assert packed_layers(model) == []
