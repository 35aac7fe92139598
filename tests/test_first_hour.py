"""What newcomers met in their first hour: mistakes that were found late, not at all, or were told in words that did not help."""

import dataclasses

import pytest
import yaml

from maporl.config.parse import parse_config, read_values, to_yaml
from maporl.config.safe_yaml import dump_yaml, parse_yaml
from maporl.errors import ConfigError
from maporl.validation.load import from_dict

TINY = {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1, "heads": 2}
BASE = {
    "output_dir": "runs/first_hour",
    "task": {"name": "toy_sum", "largest": 9},
    "agents": {"ann": {"tiny": TINY}, "bob": {"tiny": TINY}},
    "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "ppo": {"response_length": 4},
    "training": {"per_device_train_batch_size": 8, "use_cpu": True},
    "evaluation": {"questions": 0},
}


def written(folder, changes=None):
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({**BASE, "output_dir": str(folder / "run"), **(changes or {})}))
    return file


# -- what a bare word in YAML and in an override means ------------------------------------------------------------------

WORDS = {
    "0123": "0123", "-012": "-012", "00": "00", "0": 0, "7": 7, "+7": 7, "1_000": 1000, "0x1F": 31, "0b11": "0b11",
    "1e5": 1e5, "1e-5": 1e-5, "2E+3": 2e3, "1.e5": 1e5, ".5": 0.5, "1.5e3": 1.5e3, "012.5": 12.5, "1e": "1e", "e5": "e5",
    "1.2.3": "1.2.3", "._": "._", ".inf": float("inf"), "12:30:45": "12:30:45", "190:20:30.15": "190:20:30.15",
    "2024-01-31": "2024-01-31", "2024-99-99": "2024-99-99", "2001-12-14 21:59:43": "2001-12-14 21:59:43", "=": "=", "<<": "<<",
    "yes": True, "off": False, "y": "y", "~": None, "null": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("word", "value"), WORDS.items())
def test_a_bare_word_means_what_people_expect(word, value):
    assert (parse_yaml(word), type(parse_yaml(word))) == (value, type(value))


@pytest.mark.parametrize("word", [*WORDS, "'", '"', "a: b", "# a", "1e5\n", " x", "\u2028", "é"])
def test_what_is_written_is_read_again(word):
    for value in (word, {word: word}, [word], 1e-5, 1e22, float("inf"), True, None, 0, -7, ("a", 1)):
        read = parse_yaml(dump_yaml(value))
        assert read == ([*value] if isinstance(value, tuple) else value) and type(read) is not tuple


def test_an_override_is_a_text_where_a_text_is_expected_and_a_number_where_a_number_is(tmp_path):
    overrides = ["agents.ann.tiny.alphabet=0123", "training.learning_rate=1e-4", "updates=1e2", "seed=010", "output_dir=2024-01-31"]
    config = parse_config(read_values(written(tmp_path), [*overrides, "protocol.separator=="]))
    assert config.agents["ann"].tiny.alphabet == "0123" and config.protocol["separator"] == "="
    assert (config.training.learning_rate, config.updates, config.seed, config.output_dir) == (1e-4, 100, 10, "2024-01-31")
    assert parse_config(yaml.safe_load(to_yaml(config))) == parse_config(parse_yaml(to_yaml(config))) == config
    options = parse_config(read_values(written(tmp_path), ["training.lr_scheduler_kwargs={min_lr: 1e-6}"])).training
    assert options.lr_scheduler_kwargs == {"min_lr": 1e-6}


@pytest.mark.parametrize(
    ("override", "key", "got"),
    [
        ("agents.ann.tiny.alphabet=1234", "agents.ann.tiny.alphabet", "1234"),
        ("agents.ann.role=no", "agents.ann.role", "False"),
        ("output_dir=1e5", "output_dir", "100000.0"),
        ("protocol.later={question}", "later", r"\{'question': None\}"),
    ],
)
def test_a_text_that_needs_quotes_is_told_so(tmp_path, override, key, got):
    with pytest.raises(ConfigError, match=rf"{key}: expected a text, got {got}; put a text .* in quotes: {key.split('.')[-1]}: \"TEXT\""):
        from_dict(read_values(written(tmp_path), [override]))
    quoted = override.replace("=", '="', 1) + '"'
    from_dict(read_values(written(tmp_path), [quoted])) if "alphabet" in key or "role" in key else None
