"""Modules that have moved are found under their old names too, with one warning that says the new one."""

from importlib import import_module
from importlib.util import find_spec

import pytest
from folders import ROOT
from processes import run

from maporl.config.imports import extension
from maporl.moved import MOVED, MovedModules


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_leads_to_a_module_that_is_there(old):
    assert find_spec(MOVED[old]) is not None
    assert MovedModules().find_spec(old).loader_state == MOVED[old]
    assert not list(ROOT.glob(f"{old.replace('.', '/')}*")), "a file of the old name is left"


def test_an_old_name_is_the_module_in_its_new_place():
    with pytest.warns(FutureWarning, match=r"^maporl\.tasks\.grading is maporl\.grading now; "):
        old = import_module("maporl.tasks.grading.units")
    new = import_module("maporl.grading.units")
    assert old is new and new.__spec__.name == "maporl.grading.units"
    assert extension("maporl.environments.adapters.open_env:OpenEnv", "x").__module__ == "maporl.integrations.open_env"
    with pytest.raises(ModuleNotFoundError, match=r"maporl\.grading\.nothing"):
        import_module("maporl.tasks.grading.nothing")
    assert find_spec("maporl.nothing") is None


def test_a_script_sees_each_warning_once(tmp_path):
    script = tmp_path / "old.py"
    script.write_text(
        "from maporl.crossplay.entrants import read_entrants\nfrom maporl.crossplay.entrants import Entrant\n"
    )
    done = run([script])
    assert done.returncode == 0 and done.stderr.count("FutureWarning: maporl.crossplay is ") == 1, done.stderr
    assert f"{script}:1: FutureWarning" in done.stderr
