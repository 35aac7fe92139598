"""Shared fixtures: tiny real models. No network."""

import gc
import os
import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).parent.parent / "benchmarks")
)  # last: benchmarks/reward_server.py has a package's name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("MAPORL_TRACEBACK", "1")  # whole traces, for whoever reads a failure

import pytest
from processes import ask_each_kind_of_model_once, leave_files_to_the_system

from maporl.config import imports
from maporl.config.schema import TinySection

leave_files_to_the_system()

collect_ignore = ["support/mcp_test_server.py", "support/open_env_server.py"]
"""Servers that tests start by their path. They import what only their own extras install."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while tests and libraries are imported, nor later among what these have made.

    That is half a million objects, which each full collection would look through for a third of a second. Of what the
    tests make, little is garbage: looking for it as often as Python does took a fifteenth of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish():
    ask_each_kind_of_model_once()


def pytest_unconfigure():
    """Look for no garbage at the end, either: pytest and Python would go through all objects seven times."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Begin with the tests of whole processes, which take longest, so that no worker waits for one at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/system/"))


@pytest.fixture
def tiny():
    """``tiny(architecture, seed=0, **section)`` -> (model, tokenizer): 2 layers, width 64, characters."""
    import torch  # here, because the process that hands out tests needs none of it

    from maporl.tiny import build_tiny_model, build_tiny_tokenizer

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


@pytest.fixture
def forgotten(monkeypatch, tmp_path):
    """The modules that a test writes below its folder and imports are gone after it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_FOLDERS", set())
    yield
    specs = {name: sys.modules[name].__spec__ for name in set(sys.modules) - before}
    places = {
        name: [spec.origin or "", *(spec.submodule_search_locations or [])] for name, spec in specs.items() if spec
    }
    for name, found in places.items():
        if any(place.startswith(str(tmp_path)) for place in found):
            del sys.modules[name]
