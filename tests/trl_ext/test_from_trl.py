"""What is taken from TRL: public names only, and an error of one sentence where the installed TRL lacks one."""

import ast
import importlib
import re
import sys
from types import ModuleType

import pytest
from folders import ROOT

import maporl.from_trl
from trl_ext.from_trl import NEWEST, OLDEST, MissingFromTRL, add_response_schema, public

OF_TRL = [*maporl.from_trl.NAMES, "add_response_schema"]


@pytest.mark.parametrize("name", OF_TRL)
def test_every_name_taken_from_trl_is_public(name):
    assert name in dir(importlib.import_module("trl")) and callable(public(name, "a test"))


def test_no_other_name_is_taken_from_trl():
    taken = {"maporl.from_trl": set(), "trl_ext.from_trl": set()}
    for module in taken:
        for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trl":
                assert node.module == "trl"
                taken[module] |= {alias.name for alias in node.names}
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "public":
                taken[module] |= {one.value for one in node.args[:1] if isinstance(one, ast.Constant)}
    assert taken == {"maporl.from_trl": set(maporl.from_trl.NAMES), "trl_ext.from_trl": {"add_response_schema"}}


def test_the_versions_of_trl_in_errors_are_those_of_the_constraints():
    tried = {name: (ROOT / name).read_text() for name in ("constraints-oldest.txt", "constraints.txt")}
    assert (
        f"\ntrl=={OLDEST}.0\n" in tried["constraints-oldest.txt"] and f"\ntrl=={NEWEST}.0\n" in tried["constraints.txt"]
    )
    assert f'"trl>={OLDEST},<2"' in (ROOT / "pyproject.toml").read_text()


def test_the_oldest_versions_are_the_lower_bounds():
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-oldest.txt").read_text().lower(), re.M))
    bounds = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text().lower())
    bounds = {name.replace("-", "_"): bound for name, bound in bounds}

    def numbers(version):
        return [int(part) for part in version.split(".") if part] + [0] * (3 - version.count(".") - 1)

    lower = {name: (oldest[name], bounds[name]) for name in oldest.keys() & bounds.keys()}
    assert len(lower) > 20
    assert {name for name, (one, other) in lower.items() if numbers(one) != numbers(other)} <= {"jsonschema"}


@pytest.fixture
def trl_1_99(monkeypatch):
    """A TRL that has moved everything."""
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    monkeypatch.setattr("trl_ext.from_trl.version", lambda name: "1.99.0")


@pytest.mark.parametrize("name, use", [
    ("SFTTrainer", "supervised training"),
    ("DPOConfig", "a stage of a loop that trains by DPO"),
    ("RewardTrainer", "a stage of a loop that trains the verifier"),
])  # fmt: skip
def test_a_name_that_trl_lacks_is_an_error_that_says_which_versions_have_it(trl_1_99, name, use):
    with pytest.raises(MissingFromTRL) as told:
        getattr(maporl.from_trl, name)
    assert str(told.value) == (
        f"TRL 1.99.0 has no public {name}, which {use} needs; TRL 1.14 to 1.16 has it: pip install 'trl>=1.14,<1.17'"
    )


def test_what_needs_no_trl_works_without_its_names(trl_1_99):
    with pytest.raises(MissingFromTRL, match=r"no public add_response_schema, which reading the calls of a model"):
        add_response_schema(None)
    with pytest.raises(AttributeError, match="has no attribute 'GRPOTrainer'"):
        maporl.from_trl.GRPOTrainer  # noqa: B018


def test_a_trainer_that_prepares_rows_in_another_way_is_refused():
    class Before:
        def _prepare_dataset(self, dataset):
            return None

        def _precompute_ref_logps(self, dataset):
            return None

    class Rows(maporl.from_trl.RowsAsTheyAre, Before):
        pass

    assert Rows()._prepare_dataset([1], "train") == [1] and Rows()._precompute_ref_logps([2], "train", 4) == [2]
    del Before._precompute_ref_logps
    with pytest.raises(MissingFromTRL, match=r"has no Before\._precompute_ref_logps, which a trainer that takes rows"):
        type("Rows", (maporl.from_trl.RowsAsTheyAre, Before), {})
