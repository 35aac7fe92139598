"""The hub is asked once whether it is there, before a library asks it six times for each file."""

import socket
from contextlib import contextmanager

import datasets.config
import pytest
from huggingface_hub import constants
from transformers import AutoConfig

from maporl.config.parse import parse_config
from maporl.errors import ConfigError
from maporl.integrations.hub.pull import download
from maporl.tasks import build_task
from maporl.tasks.base import TaskError
from maporl.team.loading import load_tokenizers
from trl_ext.models.weights import WeightsError, read_pretrained
from trl_ext.process import hub

SENTENCE = (
    r"is not in the cache .*, and http://127\.0\.0\.1:\d+ does not answer \(.*\); look at the network, or name a "
)


@contextmanager
def port(answers):
    """A port of this machine on which somebody listens, who never answers, or nobody."""
    listener = socket.create_server(("127.0.0.1", 0))
    name = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if not answers:
        listener.close()
    yield name
    listener.close()


@pytest.fixture
def unreachable(monkeypatch):
    """A hub at a port where nobody listens, and how often it was asked whether it is there."""
    asked = []
    probe = hub._probe
    monkeypatch.setattr(hub, "_asked", None)
    monkeypatch.setattr(hub, "_probe", lambda address: asked.append(address) or probe(address))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with port(answers=False) as name:
        monkeypatch.setattr(constants, "ENDPOINT", name)
        yield asked


def test_all_that_needs_a_hub_that_is_not_there_is_refused_in_one_sentence_after_one_question(unreachable):
    with pytest.raises(WeightsError, match=rf"^'nobody/model' {SENTENCE}"):
        read_pretrained(AutoConfig, "nobody/model")
    with pytest.raises(TaskError, match=rf"^nobody/data: 'nobody/data' {SENTENCE}.* or give the path of a \.jsonl"):
        len(build_task({"name": "gsm8k", "source": "nobody/data"}, "train", 0))
    with pytest.raises(Exception, match=rf"^'nobody/team' {SENTENCE}"):
        download("nobody/team")
    assert len(unreachable) == 1
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_agents_with_the_same_model_are_refused_once_and_others_beside_it(unreachable):
    models = {"ann": "nobody/a", "bob": "nobody/a", "eve": "nobody/b"}
    values = {"output_dir": "x", "task": {"name": "toy_sum"}, "protocol": {"name": "debate"}}
    config = parse_config(values | {"agents": {name: {"model": model} for name, model in models.items()}}, "x")
    with pytest.raises(ConfigError, match=r"^agents\.ann\.model: 'nobody/a' is not in the cache") as refusal:
        load_tokenizers(config)
    (note,) = refusal.value.__notes__
    assert note.startswith("error: agents.eve.model: 'nobody/b' is not in the cache")


def test_a_hub_that_takes_the_question_and_says_nothing_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    with port(answers=True) as name:
        assert hub._probe(name).startswith(f"{name} does not answer (")


def test_what_is_on_this_machine_asks_nobody(unreachable, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_pretrained(AutoConfig, tmp_path).model_type == "llama"
    assert unreachable == []


def test_an_error_of_a_file_that_is_there_stays_its_own(unreachable):
    assert hub.not_cached("nobody/model", ValueError("is damaged")) == ""


def test_who_wants_no_network_is_told_so_and_nobody_is_asked(unreachable, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=r"HF_HUB_OFFLINE is set, so nothing is downloaded; unset it$"):
        read_pretrained(AutoConfig, "nobody/model")
    assert unreachable == []
