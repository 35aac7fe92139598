"""An engine is one module and one line of ``ENGINES``."""

import sys
from dataclasses import dataclass
from importlib import import_module

import pytest

from maporl.config import json_schema
from maporl.config.engines import IN_PYTHON, EngineEntry
from maporl.engines import ENGINES
from maporl.engines.base import Engine, Reply
from maporl.engines.text import TextEngine
from maporl.errors import ConfigError
from maporl.integrations.vllm.colocated import ColocatedServer
from maporl.integrations.vllm.server import RemoteServer, Server
from maporl.runs.build import build_player
from maporl.runs.train import train
from maporl.storage.run_folder import RunFolder
from maporl.types import from_record
from maporl.validation.load import from_dict
from trl_ext.sampling.engine import TokenEngine

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "alphabet": "0123456789+=;?"}


@dataclass
class Parrot(Engine):
    """Says one word, whatever it is asked."""

    word: str
    remote = True

    def generate(self, requests, decoding):
        return [Reply(self.word) for _ in requests]


def build(setup):
    """What ``ENGINES`` asks a module for."""
    (options,) = setup.options.values()
    assert setup.policies == {} and setup.sampling.response_length == 3
    return Parrot(**options)


@pytest.fixture
def parrot(monkeypatch):
    monkeypatch.setitem(ENGINES, "parrot", EngineEntry(__name__))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def config(folder, **bob):
    return from_dict({
        "output_dir": str(folder), "task": {"name": "toy_sum", "largest": 9}, "updates": 1,
        "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}"},
        "agents": {"ann": {"tiny": TINY}, "bob": {"engine": "parrot", **bob}}, "ppo": {"response_length": 3},
        "training": {"per_device_train_batch_size": 2, "use_cpu": True}, "evaluation": {"questions": 2},
    })  # fmt: skip


def test_an_engine_of_ones_own_is_a_module_and_a_line(tmp_path, parrot):
    train(config(tmp_path, engine_options={"word": "7"}), resume=False, quiet=True)
    dialogues = RunFolder(tmp_path).read_dialogues()
    utterances = [u for d in dialogues for u in from_record(d).utterances]
    assert {u.text for u in utterances if u.agent == "bob"} == {"7"} and len(utterances) == 8
    assert all(u.trainable == (u.agent == "ann" and bool(u.response_ids)) for u in utterances)
    player = build_player(config(tmp_path / "x", engine_options={"word": "8"}))
    assert player.engines["parrot"].word == "8" and sorted(player.engines) == ["parrot", "transformers"]


def test_what_goes_with_another_engine_is_refused(tmp_path, parrot):
    with pytest.raises(ConfigError, match=r"agents\.bob\.api: goes with engine: openai, got engine 'parrot'"):
        config(tmp_path, api={"model": "m"})
    with pytest.raises(ConfigError, match=r"agents\.bob\.engine: unknown 'parot'; did you mean 'parrot'\? known:"):
        config(tmp_path, engine="parot")
    with pytest.raises(ConfigError, match=r"engine_options: engine 'openai' takes its options from agents\.bob\.api"):
        config(tmp_path, engine="openai", api={"model": "m"}, engine_options={"word": "7"})


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("parrot", IN_PYTHON)])
def test_what_the_table_says_of_an_engine_is_what_its_class_says(name):
    module = import_module(ENGINES[name].module)
    assert callable(module.build)
    kinds = [
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Engine | TokenEngine)
    ]
    (kind,) = [
        kind for kind in kinds if kind not in (Engine, TextEngine, TokenEngine, ColocatedServer, RemoteServer, Server)
    ]
    assert kind.remote == ENGINES[name].remote
    assert name in json_schema()["$defs"]["AgentSection"]["properties"]["engine"]["enum"]
