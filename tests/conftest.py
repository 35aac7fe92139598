"""Shared fixtures: tiny real models. No network."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch

from maporl.config.schema import TinySection
from maporl.team.tiny import build_tiny_model, build_tiny_tokenizer


@pytest.fixture
def tiny():
    """``tiny(architecture, seed=0, **section)`` -> (model, tokenizer): 2 layers, width 64, characters."""

    def build(architecture="llama", seed=0, **section):
        torch.manual_seed(seed)
        section = TinySection(architecture=architecture, **{"hidden_size": 64, "layers": 2, **section})
        tokenizer = build_tiny_tokenizer(section)
        return build_tiny_model(section, tokenizer), tokenizer

    return build


DATA = [Path(__file__).parent / "golden/data"]
if "MAPORL_TEST_DATA" in os.environ:
    DATA.append(Path(os.environ["MAPORL_TEST_DATA"]))


@pytest.fixture(params=DATA, ids=["excerpts", "whole"][: len(DATA)])
def data(request):
    """A folder of data sets: the excerpts in ``golden/data``, and whole ones in the same form where they are given."""
    return request.param
