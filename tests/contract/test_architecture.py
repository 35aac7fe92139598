"""The architecture: layers, imports, budgets of lines of code, public names, and the pages that say so."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache

import pytest
from folders import ROOT

import maporl

sys.path.insert(0, str(ROOT / "docs"))
import make_architecture  # the page of the architecture, which this test reads
import weigh
from make_architecture import FILES, all_imports, package_of, steps

PACKAGES = make_architecture.packages()
FRONT = {package.module for package in PACKAGES if package.layer is None}
"""Modules that load names of all layers on first use, and the command. Nobody imports them."""
COUNTED = re.compile(r"(\| [\d,]+) \| [\d,]+ \|$", re.MULTILINE)
LIGHT = (
    "maporl.types", "maporl.decoding", "maporl.errors", "maporl.text", "maporl.hosts", "maporl.guard", "maporl.schedules", "maporl.http_client", "maporl.event_loop",
    "maporl.storage", "maporl.config",
    "maporl.evaluation", "maporl.studies.crossplay.result", "maporl.datasets", "maporl.tasks", "maporl.methods.documents", "maporl.methods.parts",
    "maporl.playground.arithmetic", "maporl.methods.games", "maporl.methods.tiny_versions", "maporl.protocols", "maporl.report", "maporl.integrations.hub", "maporl.rewards.shaping",
    "maporl.rewards.rules", "maporl.rewards.build", "maporl.loops.plan", "trl_ext.ppo.options", "trl_ext.copies", "trl_ext.errors", "trl_ext.process.distributed", "trl_ext.process.threads",
    "trl_ext.process.random_states", "trl_ext.process.servant", "trl_ext.process.waits",
)  # fmt: skip
"""Packages and modules that import no torch."""
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets"}
LIGHTER = {"huggingface_hub", "liger_kernel", "llguidance", "safetensors", "numpy", "deepspeed", "filelock", "psutil"}
OUTSIDE_TRL_EXT = HEAVY | LIGHTER | {"annotated_types"}


def imports_inside():
    return [found for found in all_imports() if found.imported in FILES]


def test_the_page_says_what_the_code_and_the_budgets_say():
    """But for the last column, the lines of code, which would make the page stale with every line."""
    shown, made = make_architecture.PAGE.read_text(encoding="utf-8"), make_architecture.text({})
    assert COUNTED.sub(r"\1", shown) == COUNTED.sub(r"\1", made), "run make reference"
    assert len(COUNTED.findall(shown)) == len(PACKAGES) + 4
    layers = [package.layer for package in PACKAGES if package.layer is not None]
    assert layers == sorted(layers) and set(layers) == set(range(layers[-1] + 1))
    assert {"maporl", "maporl.__main__", "trl_ext"} == FRONT


def test_every_package_has_a_folder_of_tests_and_every_folder_of_tests_is_on_the_page():
    """A package within another one is tested in the folder of the outer one, or in one of its own there."""
    folders = {package.path for package in PACKAGES if (ROOT / package.path).is_dir()}
    outer = {path for path in folders if not any(path.startswith(f"{other}/") for other in folders)}
    tested = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    tested -= {path.removeprefix("maporl/") for path in folders - outer}
    page = make_architecture.PAGE.read_text(encoding="utf-8").split("## Where the tests are")[1].split("## ")[0]
    beside = set(re.findall(r"^\| `tests/(\w+)` \|", page, re.MULTILINE))
    assert tested - {".", "trl_ext"} - beside == {path.removeprefix("maporl/") for path in outer}
    assert {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} >= beside


def test_the_page_names_files_and_tables_that_exist():
    page = make_architecture.PAGE.read_text(encoding="utf-8").split("## Where does a new line belong?")[1]
    named = re.findall(r"`(\w+)` (?:in|of) `([\w.]+/[\w/.]+\.py)`", page)
    assert len(named) > 12
    assert [(name, file) for name, file in named if name not in re.findall(r"\w+", (ROOT / file).read_text())] == []
    files = set(re.findall(r"`((?:maporl|trl_ext|docs|tests|configs|benchmarks)/[\w/.]+)`", page))
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_companions_are_used_through_their_public_face():
    """Which is the package itself, and the modules that its docstring names."""
    for path in (path for path, budget in weigh.budgets().items() if budget.kind == "companion"):
        name = path.replace("/", ".")
        shown = {name, *re.findall(r":\w+:`([\w.]+)`", importlib.import_module(name).__doc__)}
        used = [
            i for i in imports_inside() if f"{i.imported}.".startswith(f"{name}.") and not i.module.startswith(name)
        ]
        assert [i.where for i in used if i.imported not in shown and i.imported.rpartition(".")[0] not in shown] == []


def test_extensions_lie_above_the_core():
    kinds = {package: weigh.budgets()[package.path].kind for package in PACKAGES if package.layer is not None}
    highest = max(package.layer for package, kind in kinds.items() if kind != "extension")
    assert [package.path for package, kind in kinds.items() if kind == "extension" and package.layer <= highest] == []


def test_the_table_of_decisions_says_what_their_pages_say():
    assert make_architecture.INDEX.read_text(encoding="utf-8") == make_architecture.index(), "run make reference"
    found = make_architecture.decisions()
    assert [one.number for one in found] == sorted({one.number for one in found}) and len(found) > 40
    paths = {package.path for package in PACKAGES}
    for one in found:
        assert set(one.packages) <= paths, f"{one.file.name}: a package that is not on docs/architecture.md"
        headings = re.findall(r"^#+ .+$", one.file.read_text(encoding="utf-8"), re.M)[1:]
        assert headings == ["## Context", "## Decision", "## Consequences"], one.file.name


def test_no_package_is_above_its_budget():
    faults = weigh.faults()
    assert not faults, "\n".join(faults)
    assert [package.path for package in PACKAGES if package.path not in weigh.budgets()] == []
    assert set(weigh.budgets()) <= {package.path for package in PACKAGES}, "give it a row in docs/architecture.md"


MODULE = '''"""Docstring."""

import os
from typing import (
    TYPE_CHECKING,
)

if TYPE_CHECKING:
    from ast import AST  # an import


def f(a):  # counts
    """Two lines
    of docstring."""
    # a comment

    text = """counts

    three times"""
    return (
        a + text
    )
'''


def test_a_line_of_code_is_no_blank_comment_docstring_or_import():
    assert weigh.lines_of_code(MODULE) == 7
    assert weigh.lines_of_code("") == weigh.lines_of_code('"""Words."""\n# more\nimport os\n') == 0
    assert weigh.lines_of_code("class A:\n    x: int = 1\n    '''What x is.'''\n") == 3, "Python keeps no such text"


def test_a_budget_that_is_exceeded_missing_or_of_nothing_is_named(tmp_path):
    files = {
        "maporl/text.py": "a = 1\nb = 2\n",
        "maporl/tasks/base.py": "a = 1\n",
        "maporl/grading/values.py": "a = 1\nb = 2\nc = 3\n",
        "maporl/words/__init__.py": "a = 1\n",
        "trl_ext/ppo/losses.py": "a = 1\n",
        "tests/test_text.py": "a = 1\n",
        "docs/budget.yaml": "companion: {maporl/grading: 3}\n"
        "core: {maporl/text.py: 1, maporl/tasks: 10, trl_ext/ppo: 1}\nextension: {maporl/integrations/hub: 20}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [fault.partition(";")[0] for fault in weigh.faults(tmp_path)] == [
        "maporl/text.py: its budget is 1 lines of code, and it has 2",
        "maporl/words: it has 1 lines of code and no budget",
        "maporl/integrations/hub: it has no module, and docs/budget.yaml gives it 20 lines of code",
    ]
    assert weigh.sums(weigh.weigh(tmp_path), tmp_path) == {
        "companion": (1, 3, 3), "core": (3, 4, 12), "extension": (1, 0, 20), "all": (5, 7, 35)
    }  # fmt: skip


def test_trl_ext_does_not_know_who_is_built_on_it():
    assert [
        str(path) for name, path in FILES.items() if name.startswith("trl_ext") and "maporl" in path.read_text()
    ] == []


def test_every_module_has_a_layer():
    missing = [module for module in FILES if package_of(module) is None]
    assert not missing, f"give these modules a row in docs/architecture.md: {', '.join(missing)}"


def test_no_module_imports_from_a_layer_above_its_own():
    faults = [
        f"{found.where}: `{own.path}` of layer {own.layer} imports {found.imported} of layer {other.layer}"
        for own, other, found in steps()
        if other.layer > own.layer
    ]
    assert not faults, f"{len(faults)} imports go upward:\n" + "\n".join(faults)


def test_nothing_but_the_version_is_taken_from_the_front_of_the_package():
    faults = []
    for module in FILES:
        for node in ast.walk(ast.parse(FILES[module].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "maporl" and module != "maporl.__main__":
                taken = [a.name for a in node.names if f"maporl.{a.name}" not in FILES and a.name != "__version__"]
                faults += [
                    f"{FILES[module].relative_to(ROOT)}:{node.lineno}: takes {name}; import it from its package"
                    for name in taken
                ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("place_of", [package_of, str], ids=["packages", "modules"])
def test_neither_packages_nor_modules_import_each_other_in_a_circle(place_of):
    """Imports inside functions count. Every import that is part of a circle is named."""
    inside = [found for found in imports_inside() if not FRONT & {found.module, found.imported}]
    steps = {(place_of(f.module), place_of(f.imported)): f for f in inside}
    steps = {(one, other): f for (one, other), f in steps.items() if one != other}

    nearby = {}
    for one, other in steps:
        nearby.setdefault(one, set()).add(other)

    @cache
    def reached(place):
        found, left = set(), [place]
        while left:
            new = nearby.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    faults = [
        f"{f.where}: {one} imports {other} ({f.imported})" for (one, other), f in steps.items() if one in reached(other)
    ]
    assert not faults, "imports that close a circle:\n" + "\n".join(faults)


def test_trl_ext_is_for_people_who_have_trl_alone():
    allowed = OUTSIDE_TRL_EXT | {"trl_ext"} | set(sys.stdlib_module_names)
    own = [found for found in all_imports() if found.module.split(".")[0] == "trl_ext"]
    faults = [f"{f.where}: imports {f.imported}" for f in own if f.imported.split(".")[0] not in allowed]
    assert not faults, "\n".join(faults)


FROM_TRL = {"trl_ext.from_trl", "maporl.from_trl"}
"""The only modules of the packages that import TRL, which moves its parts."""


def test_trl_is_imported_in_one_module_of_each_package():
    faults = [
        f"{found.where}: imports {found.imported}; take it from {found.module.split('.')[0]}.from_trl"
        for found in all_imports()
        if found.imported.split(".")[0] == "trl" and found.module not in FROM_TRL
    ]
    by_name = re.compile(r"""(?:import_module|__import__|importorskip|find_spec|getattr\(sys\.modules)\(\s*["']trl\b""")
    faults += [
        f"{path.relative_to(ROOT)}: imports TRL by a text"
        for path in FILES.values()
        if by_name.search(path.read_text())
    ]
    assert not faults, "\n".join(faults)
    assert {found.module for found in all_imports() if found.imported.split(".")[0] == "trl"} == FROM_TRL


OF_TRL_ITSELF = {"benchmarks/trl_ppo.py": {"trl.experimental.ppo"}}
"""What runs a TRL of its own beside maporl, and imports from this module of it."""


def test_examples_tests_and_benchmarks_take_public_names_of_trl_only():
    faults = []
    for folder in ("examples", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                    called = getattr(node.func, "attr", getattr(node.func, "id", None))
                    names = [str(node.args[0].value)] * (called in ("importorskip", "import_module"))
                faults += [
                    f"{name}:{node.lineno}: {one}"
                    for one in names
                    if one.startswith("trl.") and one not in OF_TRL_ITSELF.get(name, ())
                ]
    assert not faults, "take the name from trl itself: " + "; ".join(faults)


def test_light_modules_import_no_torch():
    """One interpreter imports them all, one after the other, and names the module that imports a heavy library."""
    light = [
        m for m in FILES if any(m == one or m.startswith(f"{one}.") for one in LIGHT) and not m.endswith("__main__")
    ]
    assert len(light) > 60
    code = f"""
import importlib, sys
for name in {light!r}:
    before = {HEAVY!r} & set(sys.modules)
    importlib.import_module(name)
    if brought := sorted(({HEAVY!r} & set(sys.modules)) - before):
        print(f"{{name}} imports {{', '.join(brought)}}")
import maporl
for table in (maporl.PROTOCOLS, maporl.rewards.rules.RULES, maporl.rewards.build.SOURCES, maporl.loops.plan.BUILDERS):
    assert all(callable(table[name]) for name in table if name != "verifier")  # a model, which needs torch
assert {{"maporl.methods.ssl", "maporl.methods.oni"}} <= set(sys.modules) and not {HEAVY!r} & set(sys.modules)
import maporl.training.run_record  # with which maporl check describes a run
assert "datasets" not in sys.modules, "a check waits for what training alone needs"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", done.stdout


def test_what_one_paper_uses_stands_alone():
    """The module of a paper imports none of another's, and a table of a lower package names each of its parts."""
    within = [
        f"{f.where}: {f.imported}"
        for f in imports_inside()
        if f.module.startswith("maporl.methods.")
        and f.imported.startswith("maporl.methods.")
        and f.imported != "maporl.methods.sections"
        and not (f.module.startswith("maporl.methods.games.") and f.imported.startswith("maporl.methods.games."))
    ]
    assert within == [], "what two methods use belongs into the package of its kind"
    named = set()
    for found in FILES.values():
        named |= set(re.findall(r'"(maporl\.methods\.[\w.]+):\w+"', found.read_text()))
    shared = {"maporl.methods.games", "maporl.methods.games.plans"}
    assert named == {name for name in FILES if name.startswith("maporl.methods.")} - shared


def test_every_public_name_resolves():
    for package in (maporl, importlib.import_module("trl_ext")):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
            package.Nobody  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'Debat'; did you mean 'Debate'\? dir\(maporl\) lists"):
        maporl.Debat  # noqa: B018


@pytest.mark.parametrize("package", ["maporl", "trl_ext"])
def test_a_fresh_import_lists_every_public_name(package):
    """``dir`` is what a notebook completes names from. It lists them before anyone has used them, and loads nothing."""
    script = (
        f"import sys, {package}\n"
        f"assert set({package}.__all__) <= set(dir({package}))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
