"""Tiny models of architectures that configurations do not build."""

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)


def build(tiny, architecture):
    """A tiny model and a tokenizer. Gemma 2 caps logits and has sliding windows; GPT-2 has learned positions."""
    model, tokenizer = tiny()
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    if architecture == "gemma2":
        config = Gemma2Config(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, sliding_window=8, final_logit_softcapping=3.0, attn_implementation="eager", **size,
        )  # fmt: skip
        return Gemma2ForCausalLM(config), tokenizer
    if architecture == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **size)), tokenizer
    return model, tokenizer


def lively(model):
    """The model with larger weights, so that greedy completions have different tokens."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model.eval()


def build_any(tiny, kind, attention="sdpa", dtype=torch.float64, **more):
    """A tiny model of any of transformers' decoders, with weights that make tokens matter to each other."""
    _, tokenizer = tiny()
    size = {
        "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**size, **more})
    return lively(AutoModelForCausalLM.from_config(config, attn_implementation=attention)).to(dtype), tokenizer
