"""A real vLLM in this process."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from maporl.integrations.vllm.checks import PROBE
from maporl.integrations.vllm.section import ColocateSection

ALPHABET = "".join(sorted(set(PROBE + "0123456789+*=?")))
HERE = ColocateSection(
    gpu_memory_utilization=0.2, max_model_len=128, options={"enforce_eager": True, "max_num_seqs": 8}
)
EXACT = 1e-3
"""The most nats between float32 log-probabilities here and in vLLM. Other weights are whole nats away."""


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture
def saved(tiny, tmp_path):
    """``saved(seed, tie=False)`` -> (model, tokenizer) from a folder, which vLLM reads too."""

    def save(seed, tie=False):
        model, tokenizer = tiny(seed=seed, alphabet=ALPHABET, hidden_size=128)
        model.config.tie_word_embeddings = tie
        folder = tmp_path / f"base-{seed}-{tie}"
        move(model, seed)
        if tie:
            model.tie_weights()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file({"linear.weight": torch.zeros(1, 128)}, folder / "value_head.safetensors")  # as a run saves it
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer

    return save


def move(model, seed):
    """Change all weights by much more than an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator).to(weight)
