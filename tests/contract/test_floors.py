"""Imports: every module stands on a floor, and imports nothing from a floor above its own."""

import ast
import itertools
import re
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import pytest
from folders import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import make_house  # the map of the house, which this test reads

FLOORS = [
    {room.module for room in rooms} for _, rooms in itertools.groupby(make_house.rooms(), key=lambda room: room.floor)
]
"""From the ground up. Rooms of one floor may import each other, but neither rooms nor modules do so in a circle."""
FRONT = {"maporl", "maporl.__main__", "trl_ext"}
"""The fronts of the packages, which load names of all floors on first use, and the command. Nobody imports them."""
LIGHT = (
    "maporl.types", "maporl.decoding", "maporl.errors", "maporl.text", "maporl.hosts", "maporl.guard", "maporl.schedules", "maporl.http_client", "maporl.event_loop",
    "maporl.storage", "maporl.config",
    "maporl.evaluation", "maporl.tasks", "maporl.playground.tiny_programs", "maporl.playground.parts", "maporl.playground.hops",
    "maporl.playground.arithmetic", "maporl.playground.tiny_versions", "maporl.protocols", "maporl.report", "maporl.hub", "maporl.rewards.shaping",
    "maporl.rewards.rules", "maporl.rewards.build", "maporl.loops.plan", "trl_ext.ppo.options", "trl_ext.copies", "trl_ext.errors", "trl_ext.process.distributed", "trl_ext.process.threads",
    "trl_ext.process.random_states", "trl_ext.process.servant", "trl_ext.process.waits",
)  # fmt: skip
"""Rooms and modules that import no torch."""
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "datasets"}
OUTSIDE_TRL_EXT = HEAVY | {
    "huggingface_hub",
    "liger_kernel",
    "safetensors",
    "numpy",
    "deepspeed",
    "filelock",
    "psutil",
    "annotated_types",
}


class Import(NamedTuple):
    """One import; ``where`` is the file and the line."""

    module: str
    where: str
    imported: str


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PACKAGES = ("maporl", "trl_ext", "reward_server")
FILES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def room_of(module):
    return module if module in FRONT else ".".join(module.split(".")[: 1 if module.startswith("reward_server") else 2])


def floor_of(module):
    """The number of a module's floor, 0 at the ground; None for a module whose room stands on none."""
    return next((number for number, rooms in enumerate(FLOORS) if room_of(module) in rooms), None)


def imports_of(module):
    """Every import in a module's file, those inside functions included."""
    path = FILES[module]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            names = [
                f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in node.names if base != "__future__"
            ]
        else:
            continue
        for name in sorted(set(names)):
            yield Import(module, f"{path.relative_to(ROOT)}:{node.lineno}", name)


@cache
def all_imports():
    return [found for module in FILES for found in imports_of(module)]


def imports_inside():
    return [found for found in all_imports() if found.imported in FILES]


def floor_name(floor):
    return f"floor {floor} ({', '.join(sorted(FLOORS[floor]))})"


def test_the_map_says_of_each_room_what_its_docstring_says():
    assert make_house.PAGE.read_text(encoding="utf-8") == make_house.text(), "run make reference"
    floors = [room.floor for room in make_house.rooms()]
    assert floors == sorted(floors) and set(floors) == set(range(len(FLOORS)))


def test_every_room_has_a_folder_of_tests_and_every_folder_of_tests_is_on_the_map():
    rooms = {
        room.module.replace(".", "/") for room in make_house.rooms() if (ROOT / room.module.replace(".", "/")).is_dir()
    }
    tested = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    page = make_house.PAGE.read_text(encoding="utf-8").split("## Where the tests are")[1].split("## ")[0]
    beside = set(re.findall(r"^\| `tests/(\w+)` \|", page, re.MULTILINE))
    assert tested - {".", "trl_ext"} - beside == {room.removeprefix("maporl/") for room in rooms}
    assert {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} >= beside


def test_the_forms_of_a_question_on_the_map_are_classes():
    page = make_house.PAGE.read_text(encoding="utf-8").split("### The forms of a question")[1].split("## ")[0]
    forms = re.findall(r"^\| `(\w+)` \| `([\w/]+)` \| (.+) \|$", page, re.M)
    assert 10 < len(forms) <= 18
    classes = {name for path in FILES.values() for name in re.findall(r"^class (\w+)", path.read_text(), re.M)}
    named = {name for form, _, text in forms for name in (form, *re.findall(r"`([A-Z]\w+)`", text))}
    assert named - classes == set()
    assert all((ROOT / room).is_dir() for _, room, _ in forms)


def test_the_table_of_decisions_says_what_their_pages_say():
    assert make_house.INDEX.read_text(encoding="utf-8") == make_house.index(), "run make reference"
    found = make_house.decisions()
    assert [one.number for one in found] == sorted({one.number for one in found}) and len(found) > 40
    rooms = {room.path for room in make_house.rooms()}
    for one in found:
        assert set(one.rooms) <= rooms, f"{one.file.name}: a room that is not on the map"
        headings = re.findall(r"^#+ .+$", one.file.read_text(encoding="utf-8"), re.M)[1:]
        assert headings == ["## Context", "## Decision", "## Consequences"], one.file.name


def test_trl_ext_does_not_know_who_is_built_on_it():
    assert [
        str(path) for name, path in FILES.items() if name.startswith("trl_ext") and "maporl" in path.read_text()
    ] == []


def test_every_module_stands_on_a_floor():
    homeless = [module for module in FILES if module not in FRONT and floor_of(module) is None]
    assert not homeless, f"give these modules a floor in FLOORS: {', '.join(homeless)}"


def test_no_module_imports_from_a_floor_above_its_own():
    faults = []
    for found in imports_inside():
        if found.module in FRONT or (found.imported == "maporl" and found.module.startswith("maporl.")):
            continue  # the next test looks at the front
        own, other = floor_of(found.module), floor_of(found.imported)
        if own is not None and other is not None and other > own:
            faults.append(
                f"{found.where}: {found.module} of {floor_name(own)} imports {found.imported} of {floor_name(other)}"
            )
    assert not faults, f"{len(faults)} imports go upward:\n" + "\n".join(faults)


def test_nothing_but_the_version_is_taken_from_the_front_of_the_package():
    faults = []
    for module in FILES:
        for node in ast.walk(ast.parse(FILES[module].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "maporl" and module != "maporl.__main__":
                taken = [a.name for a in node.names if f"maporl.{a.name}" not in FILES and a.name != "__version__"]
                faults += [
                    f"{FILES[module].relative_to(ROOT)}:{node.lineno}: takes {name}; import it from its room"
                    for name in taken
                ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("place_of", [room_of, str], ids=["rooms", "modules"])
def test_neither_rooms_nor_modules_import_each_other_in_a_circle(place_of):
    """Imports inside functions count. Every import that is part of a circle is named."""
    steps = {(place_of(f.module), place_of(f.imported)): f for f in imports_inside()}
    steps = {(one, other): f for (one, other), f in steps.items() if one != other and not FRONT & {one, other}}

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
        m for m in FILES if any(m == room or m.startswith(f"{room}.") for room in LIGHT) and not m.endswith("__main__")
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
for table in (maporl.rewards.rules.RULES, maporl.rewards.build.SOURCES, maporl.loops.plan.BUILDERS):
    assert all(callable(part) for part in table.values())
assert {{"maporl.methods.ssl", "maporl.methods.oni"}} <= set(sys.modules) and not {HEAVY!r} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", done.stdout


def test_what_one_paper_uses_stands_alone():
    """The module of a paper imports none of another's, and a table of a lower room names each of its parts."""
    within = [
        f"{f.where}: {f.imported}"
        for f in imports_inside()
        if room_of(f.module) == room_of(f.imported) == "maporl.methods"
    ]
    assert within == [], "what two methods use belongs into the room of its kind"
    named = set()
    for found in FILES.values():
        named |= set(re.findall(r'"(maporl\.methods\.\w+):\w+"', found.read_text()))
    assert named == {name for name in FILES if name.startswith("maporl.methods.")}
