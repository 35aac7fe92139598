"""The schema with which editors complete and check configurations."""

import jsonschema
import pytest
import yaml
from folders import ROOT

from maporl.validation.editor_schema import editor_schema


@pytest.fixture(scope="module")
def validator():
    """A validator of the schema, which takes a fifth of a second to build and to check."""
    kind = jsonschema.validators.validator_for(editor_schema())
    kind.check_schema(editor_schema())
    return kind(editor_schema())


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/ppo/**/*.yaml")), ids=lambda f: f.stem)
def test_every_configuration_satisfies_the_schema(file, validator):
    validator.validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("values", [
    {"updates": "many"},
    {"agents": {"ann": {"modle": "x"}}},
    {"unknown": 1},
    {"ppo": {"kl_in": "nowhere"}},
    {"ppo": {"lam": 1.5}},
    {"task": {"name": "toy_smu"}},
    {"task": {"name": "toy_sum", "turns": 2}},
    {"task": {"name": "toy_sum", "largest": "nine"}},
    {"task": {"name": "toy_sum", "split": "eval"}},
    {"pythonpath": 3},
    {"task": {"name": "toy_sum", "held_out": 1}},
    {"protocol": {"name": "debate", "trns": 2}},
    {"protocol": {"name": "debate", "turns": [2]}},
    {"protocol": {"name": "debate", "step_judge": {"agent": "ann", "sample": 3}}},
    {"protocol": {"name": "game", "game": "kuhn_poker", "options": {"cards": 9}}},
    {"reward": {"rules": ["zero_sm"]}},
    {"reward": {"rules": [{"cost": {"per_tokn": 0.1}}]}},
    {"reward": {"rules": [{"cost": {}, "own": {}}]}},
    {"advantage": {"post": [{"whiten": {"kye": ["prompt"]}}]}},
    {"loop": {"stages": [{"train": "sft", "build": {"threshold": {"abve": 0.5}}}]}},
], ids=str)  # fmt: skip
def test_the_schema_refuses_what_the_reader_refuses(values, validator):
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(values)


@pytest.mark.parametrize("values", [
    {"task": {"largest": 9}},  # of a file that another one extends
    {"task": {"name": "mine:Sums", "anything": 1}, "pythonpath": "src"},
    {"pythonpath": ["src", "lib"], "protocol": {"name": "mine:Relay"}, "ppo": {"objective": "mine:clipped"}},
    {"reward": {"sources": {"mine:half": 0.1}}, "advantage": {"returns": "mine:whole", "post": [{"mine:Times": {"by": 3.0}}]}},
    {"task": {"name": "toy_sum", "largest": 9, "seed": 3}},
    {"protocol": {"name": "chain", "turns": 2, "pass": "pass", "agents": ["ann"], "sampling": {"solver": {"top_p": 0.5}}}},
    {"protocol": {"name": "debate", "step_judge": {"agent": "ann", "samples": 3}}},
    {"reward": {"rules": ["own", {"mine:rule": {"anything": 1}}, {"cost": None}]}},
    {"loop": {"stages": [{"train": "sft", "build": {"threshold": {"above": 0.5}}}]}},
], ids=str)  # fmt: skip
def test_the_schema_accepts_what_the_reader_accepts(values, validator):
    validator.validate(values)


def test_the_options_of_a_part_have_their_help():
    conditions = editor_schema()["properties"]["task"]["allOf"]
    (options,) = [c["then"]["properties"] for c in conditions if c["if"]["properties"]["name"]["const"] == "toy_sum"]
    assert options["largest"]["type"] == "integer" and options["largest"]["default"] == 49
    assert options["largest"]["description"]
