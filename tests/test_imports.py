"""The user's own Python in a configuration: ``MODULE:OBJECT``."""

import functools
import subprocess
import sys
import types

import pytest

from maporl.config import imports
from maporl.config.imports import import_folder, import_modules, import_name, is_import, look_up
from maporl.errors import ConfigError

TASK = '''
import random
from dataclasses import dataclass

from maporl import Example, Grade, Task


@dataclass(frozen=True)
class Reversal(Task):
    """The digits of a number, backwards."""

    digits: int = 2
    split: str = "train"
    seed: int = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        number = str(index % 90 + 10)[-self.digits :]
        return Example(f"{self.split}-{index}", number, number[::-1])

    def grade(self, example, text):
        return Grade(text, text == example.answer, "exact match")

    def write_answer(self, example, rng, right):
        return example.answer if right else "9" * self.digits


def half(dialogues, task):
    return [[0.5 for u in d.utterances] for d in dialogues]


NUMBER = 3
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test imports is gone after it."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_FOLDERS", set())
    yield
    for name in set(sys.modules) - set(before):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-of" in file or "pytest-of" in str(getattr(sys.modules[name], "__path__", "")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def one(name, text=TASK):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return one


def use(name, *folders):
    return import_modules({"task.name": name}, [str(folder) for folder in folders], "mine.yaml")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a:B", True), ("a.b:C", True), ("a:B.C", True), ("_a1:_b", True), ("é:b", True),
     ("a", False), ("a.b", False), (":b", False), ("a:", False), ("a:b:c", False), ("a/b:c", False), ("a b:c", False),
     ("1a:b", False), ("a:{b}", False), ("a..b:c", False), ("a:b\n", False), (None, False), (3, False), (["a:b"], False)],
)  # fmt: skip
def test_what_names_an_object_of_a_module(text, wanted):
    assert is_import(text) is wanted


def test_an_object_is_found_in_the_folders_and_its_name_leads_back(write, tmp_path):
    write("reversal_a.py")
    write("pack_a/inner/tasks.py")  # without __init__.py
    assert use("reversal_a:Reversal", tmp_path) == [str(tmp_path)]
    assert use("pack_a.inner.tasks:Reversal", tmp_path) == [str(tmp_path)]
    for name in ("reversal_a:Reversal", "pack_a.inner.tasks:Reversal", "reversal_a:half"):
        found = look_up(name, {}, "task.name")
        assert import_name(found) == name and import_folder(name) == str(tmp_path)
    assert look_up("reversal_a:half", {}, "x")([], None) == []
    assert str(tmp_path) in sys.path[-1:], "it stays on the path, behind what is installed"


def test_a_known_part_comes_before_any_import():
    assert look_up("a:b", {"a:b": 3}, "x") == 3


def test_what_another_process_cannot_import_has_no_name(write, tmp_path):
    class Local:
        pass

    script = types.ModuleType("script_a")
    exec("class Task:\n    pass", script.__dict__)
    script.Task.__module__ = "__main__"
    odd = types.ModuleType("odd_a")
    exec("class Task:\n    pass\n", vars(odd))
    odd.Task.__module__ = "odd_a"
    sys.modules["odd_a"] = odd
    write("twice_a.py", "def one():\n    pass\nkept = one\ndef one():\n    pass\n")
    use("twice_a:kept", tmp_path)
    shadowed = look_up("twice_a:kept", {}, "x")
    try:
        for part in (
            Local,
            lambda: 0,
            script.Task,
            odd.Task,
            functools.partial(print),
            3,
            "a",
            None,
            len,
            [].append,
            shadowed,
        ):
            assert import_name(part) is None, part
    finally:
        del sys.modules["odd_a"]
    assert import_name(subprocess.Popen) == "subprocess:Popen" and import_folder("subprocess:Popen") is None
    assert import_name(imports.look_up) == "maporl.config.imports:look_up"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reversl_b:Reversal", ["no module 'reversl_b' in {folder}, or among the installed", "did you mean 'reversal_b'?"]),
        ("nowhere_b:Task", ["no module 'nowhere_b' in {folder}, or", "pythonpath=FOLDER"]),
        ("reversal_b.inner:Task", ["no module 'reversal_b.inner'"]),
        ("raises_b:Task", ["the module raises_b cannot be imported: {folder}/raises_b.py, line 3: ZeroDivisionError: division"]),
        ("calls_b:Task", ["{folder}/calls_b.py, line 2: ValueError: oh no"]),
        ("syntax_b:Task", ["{folder}/syntax_b.py, line 1: SyntaxError: "]),
        ("lacks_b:Task", ["{folder}/lacks_b.py, line 1: ModuleNotFoundError: No module named 'not_there_b'"]),
        ("exits_b:Task", ["{folder}/exits_b.py, line 1: SystemExit: 3"]),
        ("__main__:Task", ["__main__ is another program in each process"]),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_named_in_one_line(write, tmp_path, name, words):
    write("reversal_b.py")
    write("raises_b.py", "def f():\n    return 1\nx = f() / 0\n")
    write(
        "calls_b.py", "import json\njson.loads('1', parse_int=lambda x: (_ for _ in ()).throw(ValueError('oh\\nno')))\n"
    )
    write("syntax_b.py", "def f(:\n")
    write("lacks_b.py", "import not_there_b\n")
    write("exits_b.py", "raise SystemExit(3)\n")
    with pytest.raises(ConfigError) as caught:
        use(name, tmp_path)
    told = str(caught.value)
    assert told.startswith("mine.yaml: task.name: ") and "\n" not in told
    for part in words:
        assert part.format(folder=tmp_path) in told, told


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reversal_c:Reversl", "unknown 'Reversl'; did you mean 'Reversal'?"),
        ("reversal_c:half", "expected a class that derives from collections.abc.Sized, got the function half"),
        ("reversal_c:NUMBER", "got a value of type int"),
        ("reversal_c:random", "got the module random"),
        ("reversal_c:Reversal.nothing", "unknown 'nothing'"),
        ("reversal_c.Reversal", "here perhaps reversal_c:Reversal"),
        ("reversal_c.py:Reversal", "here perhaps reversal_c:Reversal"),
        ("./tasks/reversal_c.py:Reversal", "here perhaps tasks.reversal_c:Reversal"),
        ("reversal_c", "unknown 'reversal_c'; known: toy; your own is named MODULE:OBJECT"),
        (None, "unknown None"),
        (["a"], "unknown ['a']"),
    ],
)
def test_an_object_that_does_not_serve_is_named_in_one_line(write, tmp_path, name, words):
    from collections.abc import Sized

    write("reversal_c.py")
    use("reversal_c:Reversal", tmp_path)
    with pytest.raises(ConfigError, match=r"^task\.name: ") as caught:
        look_up(name, {"toy": 1}, "task.name", Sized)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_modules_of_one_name_are_not_mixed_up(write, tmp_path):
    """Python has one module of each name in a process, so the second configuration is refused and never gets the first's."""
    write("a/same_d.py", "import helper_d\nWHO = 'a'\n")
    write("a/helper_d.py", "")
    write("b/same_d.py", "WHO = 'b'\n")
    write("c/helper_d.py", "")
    write("c/other_d.py", "import helper_d\n")
    write("d/json.py", "Task = 3\n")
    use("same_d:WHO", tmp_path / "a")
    for name, folder, other in (
        ("same_d:WHO", "b", "same_d"),
        ("other_d:x", "c", "helper_d"),
        ("json:Task", "d", "json"),
    ):
        with pytest.raises(ConfigError, match="rename one of them") as caught:
            use(name, tmp_path / folder)
        assert f"{tmp_path}/{folder}/{other}.py is not the module {other} that this process has imported" in str(
            caught.value
        )
    assert look_up("same_d:WHO", {}, "x") == "a"
    with pytest.raises(ConfigError, match="no module 'same_d'"):  # of a folder that is not its own
        use("same_d:WHO", tmp_path / "empty")
    use("same_d:WHO", tmp_path / "a" / ".." / "a")  # the same folder by another path


def test_the_users_folder_comes_first_while_its_module_is_imported_and_last_afterwards(write, tmp_path):
    """A file of the user's named like an installed package must not be what the libraries get later."""
    write("outer_e.py", "import sibling_e\nfrom sibling_e import WHO\n")
    write("sibling_e.py", "WHO = 'own'\n")
    write("installed/sibling_e.py", "WHO = 'installed'\n")
    write("installed/later_e.py", "WHO = 'installed'\n")
    write("later_e.py", "WHO = 'own'\n")
    sys.path.insert(0, str(tmp_path / "installed"))
    use("outer_e:WHO", tmp_path)
    assert look_up("outer_e:WHO", {}, "x") == "own"
    assert __import__("later_e").WHO == "installed"
