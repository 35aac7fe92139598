"""The tables of parts: a part that is written as a text is imported when it is looked up, and not before."""

import importlib
import subprocess
import sys
from fractions import Fraction

import pytest
from folders import ROOT

from maporl.config.imports import Parts, look_up
from maporl.errors import ConfigError
from maporl.methods.marti import Margin
from maporl.rewards.rules import RULES, build_rules


def test_a_part_is_imported_when_it_is_read_and_stays():
    table = Parts({"fractions": "fractions:Fraction", "own": 3})
    assert list(table) == ["fractions", "own"] and "half" not in table and table.get("half") is None
    assert table["fractions"](1, 2) == 0.5 and table.data["fractions"] is table["fractions"]
    assert dict(table)["own"] == 3 and list(table.items())[1] == ("own", 3)
    table["half"] = 0.5
    assert table["half"] == 0.5


def test_a_part_whose_package_is_missing_is_told_where_it_is_named():
    table = Parts({"half": "fractions:Fraction", "own": "maporl.nothing:No", "other": "no_such_library:No", "sum": sum})
    assert list(table) == ["half", "own", "other", "sum"] and list(table.installed()) == ["half", "sum"]
    for name, says in (
        ("own", "own needs maporl.nothing, which this copy of maporl lacks; install all of it: pip install "),
        ("other", "other needs the package no_such_library; pip install no_such_library"),
    ):
        with pytest.raises(ConfigError, match=f"^a.part: {says}"):
            look_up(name, table, "a.part")


def test_a_table_knows_the_name_of_a_part_that_nobody_has_imported():
    table = Parts({"margin": "maporl.methods.marti:Margin", "again": "maporl.methods.marti:Margin", "half": Fraction})
    assert [table.name_of(part) for part in (Margin, Fraction, int)] == ["margin", "half", None]
    assert isinstance(table.data["margin"], str)


def test_a_configuration_without_a_method_imports_none_and_one_with_it_imports_its_module_alone():
    """Also where the folder of maporl itself is one of the user's folders, and where nothing is imported yet."""
    code = """
import sys
from maporl.config.imports import _FOLDERS
from maporl.rewards.rules import build_rules
methods = lambda: sorted(name for name in sys.modules if name.startswith("maporl.methods."))
build_rules(["own", {"mix": {"weights": {"format": 1.0}}}])
assert methods() == ["maporl.methods.sections"], methods()
_FOLDERS.update(map(__import__("pathlib").Path, [sys.argv[1]]))
[rule] = build_rules([{"tier": {"proximity": "near"}}])
assert rule.bonus(1.0) == 0.5 and methods() == ["maporl.methods.sections", "maporl.methods.ssl"], methods()
"""
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_method_has_its_short_name_and_that_of_its_module():
    short, whole = build_rules(["margin", "maporl.methods.marti:Margin"])
    assert short == whole == Margin() and RULES["margin"] is Margin


@pytest.mark.parametrize("package", ["maporl.tasks", "maporl.protocols", "maporl.environments.games"])
def test_the_parts_of_a_table_are_names_of_its_package(package):
    module = importlib.import_module(package)
    table = next(value for name, value in vars(module).items() if name in ("TASKS", "PROTOCOLS", "GAMES"))
    assert len(table) > 7 and all(getattr(module, part.__name__) is part for part in table.values())
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {package} import Nothing")
