"""Configurations parse, base.yaml shows every key, and wrong configurations are refused."""

import dataclasses
import inspect
import itertools
import re
import sys
from collections import Counter

import pytest
import yaml
from folders import ROOT
from transformers import TrainingArguments

from maporl.config.parse import json_schema, to_yaml
from maporl.config.schema import Config, RunOptions, TrainingOptions
from maporl.errors import ConfigError
from maporl.training.args import MultiAgentPPOConfig
from maporl.validation.load import from_dict, load
from trl_ext.learning.config import PPOv2Config
from trl_ext.ppo.options import LearnerOptions, PPOOptions

sys.path.insert(0, str(ROOT / "docs"))
import make_base  # what writes the file that shows every key

CONFIGS = [p for p in sorted((ROOT / "configs" / "ppo").rglob("*.yaml")) if p.stem != "common"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_configuration_parses_and_survives_a_round_trip(path):
    config = load(path)
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


def test_base_yaml_shows_every_key_at_its_default():
    shown = yaml.safe_load((ROOT / "configs/ppo/base.yaml").read_text())
    minimal = {k: shown[k] for k in ("output_dir", "task")} | {"agents": {"ann": {"tiny": {}}}}
    assert shown == yaml.safe_load(to_yaml(from_dict(minimal)))


def test_base_yaml_is_written_from_the_options_and_the_registries():
    shown = make_base.FILE.read_text(encoding="utf-8")
    assert shown == make_base.text(), "run make reference"
    lines = shown.splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" *\w+:", line)]
    bare = [lines[number].strip() for number in keys if not lines[number - 1].strip().startswith("#")]
    assert bare == ["ann:"] and len(keys) > 150 and max(map(len, lines)) <= 120
    listed = {name for _, registry in itertools.chain(*make_base.REGISTRIES.values()) for name in registry}
    assert len(listed) > 100 and all(re.search(rf"^ *#.*\b{name}\b", shown, re.MULTILINE) for name in listed)


def test_every_key_has_a_help_text_of_its_own():
    left, seen, bare = [Config], set(), []
    while left:
        kind = left.pop()
        seen.add(kind)
        bare += [f"{kind.__name__}.{f.name}" for f in dataclasses.fields(kind) if not f.metadata.get("help")]
        left += [below for f in dataclasses.fields(kind) for below in make_base.sections(f.type) if below not in seen]
    assert bare == [] and len(seen) > 35
    schema = json_schema()
    shown = [option for section in [schema, *schema["$defs"].values()] for option in section["properties"].values()]
    assert all(option.get("description") for option in shown) and len(shown) > 300


def test_every_option_of_a_part_has_a_help_text_of_its_own():
    parts = {part for _, named in itertools.chain(*make_base.REGISTRIES.values()) for part in named.values()}
    options = [(part.__name__, field) for part in parts for field in make_base.options_of(part)]
    assert [f"{name}.{f.name}" for name, f in options if not f.metadata.get("help")] == [] and len(options) > 350


GOOD = {"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}, "bob": {"tiny": {}}}}
BAD = {
    "unknown key": ({"updatez": 4}, r"unknown key 'updatez'; did you mean 'updates'"),
    "unknown nested key": ({"ppo": {"gama": 1}}, r"unknown key 'ppo.gama'; did you mean 'gamma'"),
    "unknown key of an agent": ({"agents": {"ann": {"tiny": {}, "modle": "x"}}}, r"agents\.ann\.modle'; did you mean 'model'"),
    "not a number": ({"training": {"learning_rate": "fast"}}, r"training\.learning_rate: .*number.*got 'fast'"),
    "unknown protocol": ({"protocol": {"name": "debat"}}, r"unknown 'debat'; did you mean 'debate'"),
    "unknown option of a protocol": ({"protocol": {"name": "debate", "turnz": 2}}, r"turnz'; did you mean 'turns'"),
    "broken template": ({"protocol": {"name": "debate", "later": "{othrs}"}}, r"later: it may use .*othrs"),
    "unknown task": ({"task": {"name": "gsm9k"}}, r"unknown 'gsm9k'; did you mean 'gsm8k'"),
    "operands the wrong way round": ({"task": {"name": "toy_sum", "largest": 0}}, r"largest: expected more than smallest=0, got 0"),
    "no agents": ({"agents": {}}, r"agents: .*at least one"),
    "neither model nor tiny": ({"agents": {"ann": {}}}, r"agents\.ann: give either 'model' .* got neither"),
    "missing folder": ({"agents": {"ann": {"model": "./nowhere"}}}, r"agents\.ann\.model: no folder './nowhere'"),
    "nobody learns": ({"agents": {"ann": {"tiny": {}, "trainable": False}}}, r"none is trainable"),
    "unknown source": ({"reward": {"sources": {"lable": 1}}}, r"unknown 'lable'; did you mean 'label'"),
    "indivisible minibatches": ({"ppo": {"num_mini_batches": 3}}, r"num_mini_batches: 3 does not divide the 8"),
    "greedy training": ({"ppo": {"temperature": 0}}, r"temperature: expected more than 0, got 0; greedy play is for evaluation"),
    "a Huber loss that is linear everywhere": ({"ppo": {"huber_delta": 0}}, r"huber_delta: expected more than 0, got 0"),
    "two stops": ({"ppo": {"stop_token": "eos", "stop_token_id": 3}}, r"exclude each other"),
    "critic without adapter, for all": ({"training": {"critic": "adapter"}}, r"training\.critic: 'adapter' needs a LoRA, and agents\.ann"),
    "checkpointing under a critic's adapter": (
        {"agents": {"ann": {"tiny": {}, "lora": {}, "critic": "adapter"}}, "training": {"gradient_checkpointing": True}},
        r"agents\.ann\.critic: 'adapter' excludes training\.gradient_checkpointing",
    ),
    "infinite option of ppo": ({"ppo": {"gamma": float("inf")}}, r"ppo\.gamma"),
    "infinite weight": ({"reward": {"sources": {"label": float("inf")}}}, r"reward\.sources\.label"),
    "no sources": ({"reward": {"sources": {}}}, r"reward\.sources: .*at least one"),
    "negative token": ({"ppo": {"stop_token_id": -1}}, r"stop_token_id: expected a token id of at least 0.* got -1"),
    "character twice": ({"agents": {"ann": {"tiny": {"alphabet": "aa"}}}}, r"alphabet: expected every character once"),
    "width and heads": ({"agents": {"ann": {"tiny": {"hidden_size": 30, "heads": 4}}}}, r"hidden_size=30 is not divisible by heads=4"),
    "defaults that are not a mapping": ({"agent_defaults": 5}, r"agent_defaults: expected options of agents by name, got 5"),
    "agent that is not a mapping": ({"agents": {"ann": 5}}, r"agents\.ann"),
    "speaker twice": ({"protocol": {"name": "debate", "agents": ["ann", "ann"]}}, r"protocol\.agents: 'ann' is listed several times; list it once"),
    "no speakers": ({"protocol": {"name": "debate", "agents": []}}, r"protocol\.agents: expected some of \['ann', 'bob'\], got \[\]"),
    "nobody who speaks learns": (
        {"agents": {"ann": {"tiny": {}, "trainable": False}, "bob": {"tiny": {}}}, "protocol": {"name": "debate", "agents": ["ann"]}},
        r"of \['ann'\] none is trainable.* add one of \['bob'\]",
    ),
    "opening that asks nothing": ({"protocol": {"name": "debate", "opening": "Answer!"}}, r"opening: it must contain \{question\}"),
    "task that is not a name": ({"task": {"name": ["toy_sum"]}}, r"task\.name: unknown \['toy_sum'\]; did you mean"),
    "template without operands": ({"task": {"name": "toy_sum", "template": "{a}"}}, r"template: it must contain \{b\}"),
    "template with other braces": ({"task": {"name": "toy_sum", "template": "{a}{b}{c}"}}, r"template: it may use \['a', 'b', 'op'\] in braces, but has \{c\}"),
    "critic without adapter": ({"agents": {"ann": {"tiny": {}, "critic": "adapter"}}}, r"'adapter' needs a LoRA"),
    "shared weights that differ": (
        {"agents": {"ann": {"tiny": {}, "policy": "p"}, "bob": {"tiny": {"layers": 1}, "policy": "p"}}},
        r"share policy 'p' but differ in tiny",
    ),
    "reserved option": ({"task": {"name": "toy_sum", "split": "eval"}}, r"task\.split: is set by the run itself"),
    "two lengths": ({"ppo": {"total_episodes": 10}}, r"length of a run is set by 'updates'"),
    "unknown optimizer": ({"training": {"optim": "adam8"}}, r"training\.optim.*adamw_torch_fused.*adamw_bnb_8bit"),
    "quantised weights that train": (
        {"agents": {"ann": {"model": "org/model", "load_in_8bit": True}}}, r"agents\.ann\.load_in_8bit: quantised weights cannot be trained; add lora",
    ),
    "two quantisations": (
        {"agents": {"ann": {"model": "org/model", "load_in_4bit": True, "load_in_8bit": True, "lora": {}}}}, "load_in_4bit and load_in_8bit exclude each other",
    ),
    "attention of a server": (
        {"reward": {"sources": {"verifier": 1.0}, "verifier": {"urls": ["http://h"], "attn_implementation": "sdpa"}}}, "attn_implementation: servers choose their own",
    ),
    "change of a verifier that learns": (
        {"reward": {"sources": {"verifier": 1.0}, "verifier": {"tiny": {}, "learn_every": 1, "on_change": "warn"}}}, "on_change: a verifier that learns changes all the time",
    ),
    "name that cannot be a folder": ({"agents": {"../x": {"tiny": {}}}}, r"'../x' cannot be the name of a folder"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_each_guard_fires_with_what_where_and_the_remedy(change, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({**GOOD, **change})


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="task: this key is required"):
        from_dict({"output_dir": "x", "agents": {"ann": {"tiny": {}}}})


FILES = {
    "a misspelt name": ({}, [], r"no such configuration file; did you mean .*quickstart\.yaml"),
    "a key twice": ({"one": "seed: 1\nseed: 2\n"}, [], "'seed' stands twice"),
    "a list": ({"one": "- 1\n"}, [], "expected a mapping"),
    "a circle": ({"one": "extends: two.yaml\n", "two": "extends: one.yaml\n"}, [], r"one\.yaml: extends itself, by way of two\.yaml"),
    "a name that is too long": ({"one": "extends: " + "x" * 5000}, [], "File name too long"),
    "a list of files": ({"one": "extends: two.yaml\n", "two": "extends: [a]\n"}, [], "extends: expected the name of one file"),
    "no text": ({"one": "extends: two.yaml\n", "two": b"seed: \xff\n"}, [], r"two\.yaml: not readable as YAML"),
    "a broken override": ({"one": yaml.safe_dump(GOOD)}, ["ppo={"], r"--set ppo=\{: the value is not YAML"),
    "an override of another kind": ({"one": yaml.safe_dump(GOOD)}, ["agents.ann=5"], r"agents\.ann"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "overrides", "message"), FILES.values(), ids=FILES.keys())
def test_files_that_are_no_configurations_and_broken_overrides_are_refused(tmp_path, files, overrides, message):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "one.yaml", overrides) if files else load(ROOT / "configs/ppo/quickstrt.yaml")


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"output_dir: '.*/file' is a file; expected a new or empty folder"):
        from_dict({**GOOD, "output_dir": str(tmp_path / "file" / "run")})


def test_overrides_extends_and_agent_defaults_merge(tmp_path):
    (tmp_path / "under.yaml").write_text(
        yaml.safe_dump({**GOOD, "seed": 3, "agents": {"ann": {}, "bob": {"tiny": {"layers": 5}}}})
    )
    over = tmp_path / "over.yaml"
    over.write_text("extends: under.yaml\nagent_defaults: {tiny: {layers: 2}, critic: none}\nupdates: 7\n")
    config = load(over, ["training.learning_rate=1e-4", "ppo.num_ppo_epochs=2"])
    assert (config.seed, config.updates, config.ppo.num_ppo_epochs, config.training.learning_rate) == (3, 7, 2, 1e-4)
    assert (config.agents["ann"].tiny.layers, config.agents["bob"].tiny.layers) == (2, 5)
    assert config.agents["bob"].critic == "none"


def test_no_option_of_training_is_declared_twice():
    """A YAML section, a trainer's arguments and the command line share one dataclass, or inherit from it."""
    kinds = (PPOOptions, LearnerOptions, PPOv2Config, TrainingOptions, RunOptions, MultiAgentPPOConfig, Config)
    declared = Counter(name for kind in kinds for name in inspect.get_annotations(kind))
    assert [name for name, times in declared.items() if times > 1] == [] and len(declared) > 80
    yaml_section = {f.name: f.default for f in dataclasses.fields(TrainingOptions)}
    argument = {f.name: f.default for f in dataclasses.fields(MultiAgentPPOConfig) if f.name in yaml_section}
    assert argument == yaml_section and yaml_section["learning_rate"] is None
    theirs = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    own = {"learning_rate", "lr_scheduler_type", "report_to", "gradient_checkpointing", "optim"}
    shared = {name: default for name, default in yaml_section.items() if name in theirs and name not in own}
    assert shared == {name: theirs[name] for name in shared} and len(shared) >= 9
