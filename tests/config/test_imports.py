"""The user's own Python in a configuration: ``MODULE:OBJECT``."""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import types
import urllib.request

import processes
import pytest
import yaml
from typer.testing import CliRunner

from maporl.cli.common import load_config
from maporl.cli.main import app
from maporl.config import imports
from maporl.config.imports import import_folder, import_modules, import_name, is_import, look_up
from maporl.config.parse import to_yaml
from maporl.errors import ConfigError, UserError
from maporl.integrations.hub.pack import pack
from maporl.report import metric_panels
from maporl.report.live import LivePage
from maporl.report.read import read_run
from maporl.runs.train import train
from maporl.storage.run_folder import RunFolder
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

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


pytestmark = pytest.mark.usefixtures("forgotten")


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


def test_what_another_process_cannot_import_has_no_name(write, tmp_path, monkeypatch):
    class Local:
        pass

    script = types.ModuleType("script_a")
    exec("class Task:\n    pass", script.__dict__)
    script.Task.__module__ = "__main__"
    odd = types.ModuleType("odd_a")
    exec("class Task:\n    pass\n", vars(odd))
    odd.Task.__module__ = "odd_a"
    monkeypatch.setitem(sys.modules, "odd_a", odd)
    write("twice_a.py", "def one():\n    pass\nkept = one\ndef one():\n    pass\n")
    use("twice_a:kept", tmp_path)
    shadowed = look_up("twice_a:kept", {}, "x")
    for part in (Local, lambda: 0, script.Task, odd.Task, functools.partial(print), 3, None, len, [].append, shadowed):
        assert import_name(part) is None, part
    assert import_name(subprocess.Popen) == "subprocess:Popen" and import_folder("subprocess:Popen") is None
    assert import_name(imports.look_up) == "maporl.config.imports:look_up"


@pytest.mark.parametrize(("name", "words"), [
    ("reversl_b:Reversal", ["no module 'reversl_b' in {folder}, or among the installed", "did you mean 'reversal_b'?"]),
    ("nowhere_b:Task", ["no module 'nowhere_b' in {folder}, or", "pythonpath=FOLDER"]),
    ("raises_b:Task", ["the module raises_b cannot be imported: {folder}/raises_b.py, line 3: ZeroDivisionError: division"]),
    ("calls_b:Task", ["{folder}/calls_b.py, line 2: ValueError: oh no"]),
    ("syntax_b:Task", ["{folder}/syntax_b.py, line 1: SyntaxError: "]),
    ("lacks_b:Task", ["{folder}/lacks_b.py, line 1: ModuleNotFoundError: No module named 'not_there_b'"]),
    ("exits_b:Task", ["{folder}/exits_b.py, line 1: SystemExit: 3"]),
    ("__main__:Task", ["__main__ is another program in each process"]),
])  # fmt: skip
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


@pytest.mark.parametrize(("name", "words"), [
    ("reversal_c:Reversl", "unknown 'Reversl'; did you mean 'Reversal'?"),
    ("reversal_c:half", "expected a class derived from collections.abc.Sized, got the function half"),
    ("reversal_c.Reversal", "here perhaps reversal_c:Reversal"),
    ("reversal_c.py:Reversal", "here perhaps reversal_c:Reversal"),
    ("./tasks/reversal_c.py:Reversal", "here perhaps tasks.reversal_c:Reversal"),
    ("reversal_c", "unknown 'reversal_c'; known: toy; your own is named MODULE:OBJECT"),
    (None, "unknown None"),
])  # fmt: skip
def test_an_object_that_does_not_serve_is_named_in_one_line(write, tmp_path, name, words):
    from collections.abc import Sized

    write("reversal_c.py")
    use("reversal_c:Reversal", tmp_path)
    with pytest.raises(ConfigError, match=r"^task\.name: ") as caught:
        look_up(name, {"toy": 1}, "task.name", Sized)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_modules_of_one_name_are_not_mixed_up(write, tmp_path):
    """Python has one module of each name in a process, so the second configuration is refused and never gets the
    first's."""
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


# -- configurations ------------------------------------------------------------------------------------------------

PARTS = '''
from dataclasses import dataclass

import torch

from maporl import Ask, Protocol, RewardSource
from maporl.advantages import Baseline, Transform
from maporl.environments.games import TicTacToe
from maporl.rewards.rules import Rule
from trl_ext.ppo.losses import ppo


@dataclass(frozen=True)
class Relay(Protocol):
    """The agents answer one after the other."""

    turns: int = 1

    def play(self, example, agents):
        for agent in agents:
            (said,) = yield [Ask(agent, [{"role": "user", "content": example.question}])]


@dataclass(frozen=True)
class Best(Rule):
    """Every utterance gets the best score of its dialogue."""

    def __call__(self, dialogues, credits):
        return [dict.fromkeys(own, max(own.values(), default=0.0)) for own in credits]


class Counting(RewardSource):
    """1, 2, 3 and so on."""

    def __init__(self):
        self.seen = 0

    def __call__(self, dialogues, task):
        return [[1.0 for u in d.utterances] for d in dialogues]

    def after_update(self, update, dialogues, task):
        self.seen += len(dialogues)
        return {"seen": float(self.seen)}


class Sized(Counting):
    """A source with options, which a configuration cannot set."""

    def __init__(self, size):
        super().__init__()


def whole(batch, config):
    return batch.tensor(batch.reward)


def first(returns, groups, weights, batch, config, state):
    return torch.zeros_like(returns)


within = Baseline(first, over="group")


def two(advantages, returns, groups, weights, batch, config):
    return torch.full_like(advantages, 2.0)


@dataclass(frozen=True)
class Times(Transform):
    """Advantages times a factor."""

    by: float = 2.0

    def apply(self, advantages, batch, config):
        return advantages * self.by


def clipped(new, old, advantages, mask, options):
    return ppo(new, old, advantages, mask, options)


@dataclass
class Quick(TicTacToe):
    """Tic-tac-toe under another name."""
'''
TINY = {"tiny": {"alphabet": "0123456789", "hidden_size": 16, "layers": 1, "heads": 2}}


def values_of(folder, module, **changes):
    """A configuration in which everything that can be the user's own is of ``module``."""
    return {
        "output_dir": str(folder / "run"),
        "task": {"name": f"{module}_task:Reversal", "digits": 2},
        "protocol": {"name": f"{module}:Relay"},
        "agents": {"ann": TINY, "bob": TINY},
        "reward": {
            "sources": {"label": 1.0, f"{module}_task:half": 0.1, f"{module}:Counting": 0.0},
            "rules": [f"{module}:Best"],
        },
        "advantage": {
            "returns": f"{module}:whole", "baseline": f"{module}:within", "scale": f"{module}:two", "key": ["agent"],
            "post": [{f"{module}:Times": {"by": 3.0}}],
        },
        "schedule": {"curriculum": [{"update": 2, "task": {"name": f"{module}_task:Reversal", "digits": 1}}]},
        "updates": 1,
        "ppo": {"response_length": 3, "objective": f"{module}:clipped"},
        "training": {"gradient_accumulation_steps": 1, "use_cpu": True, "save_steps": 1},
        "evaluation": {"questions": 4},
    } | changes  # fmt: skip


@pytest.fixture
def project(write, tmp_path):
    """``project(module, **changes)`` writes a module with every kind of part, one with a task, and their
    configuration."""

    def one(module, folder="project", **changes):
        write(f"{folder}/{module}.py", PARTS)
        write(f"{folder}/{module}_task.py")
        values = values_of(tmp_path, module, **changes)
        return write(f"{folder}/mine.yaml", yaml.safe_dump(values, sort_keys=False))

    return one


def test_every_part_of_a_configuration_may_be_the_users_own(project, tmp_path):
    file = project("all_f")
    config = load(file)
    assert config.pythonpath == [str(tmp_path / "project")] and len(imports.named_imports(config)) == 11
    assert check_run(config)[0] == "task all_f_task:Reversal: 40 questions, 40 held out"
    again = from_dict(yaml.safe_load(to_yaml(config)))
    assert again == config, "what a run keeps names the folder too"
    train(config, resume=False, quiet=True)
    [record] = RunFolder(config.output_dir).read_metrics()
    assert record["reward/all_f_task:half"] == 0.5 and record["reward/all_f:Counting"] == 1.0
    for name in ("reward/all_f_task:half", "reward/all_f:Counting"):
        assert any(metric.pattern.fullmatch(name) for metric in metric_panels.METRICS)
    kept = json.loads((tmp_path / "run" / imports.FINGERPRINTS).read_text())
    assert kept.keys() == {"all_f", "all_f_task"}


def test_a_configuration_without_modules_of_its_own_keeps_no_folder(project):
    config = load("quickstart")
    assert config.pythonpath == [] and "pythonpath: []" in to_yaml(config)


def test_an_override_is_looked_for_as_the_file_is_and_in_the_present_folder_for_a_recipe(
    project, tmp_path, monkeypatch
):
    project("over_g")
    monkeypatch.chdir(tmp_path / "project")
    assert load("quickstart", ["protocol={name: over_g:Relay}"]).pythonpath == [str(tmp_path / "project")]
    monkeypatch.chdir(tmp_path)
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(values_of(tmp_path, "over_g")))
    with pytest.raises(ConfigError, match=r"plain\.yaml: task\.name: .*: no module 'over_g_task' in .*pythonpath="):
        load(plain)
    for folder in ("project", str(tmp_path / "project"), "[project]", "[nowhere, project]"):
        wanted = str(tmp_path / "project")
        assert wanted in load(plain, [f"pythonpath={folder}"]).pythonpath
    with pytest.raises(ConfigError, match=r"in .*/nowhere \(no such folder\)"):
        load(plain, ["pythonpath=nowhere"])
    with pytest.raises(ConfigError, match="pythonpath: expected a list"):
        load(plain, ["pythonpath=3"])
    over = tmp_path / "deep/over.yaml"
    over.parent.mkdir()
    over.write_text("extends: ../project/mine.yaml\nseed: 3\n")
    assert load(over).pythonpath == [str(tmp_path / "deep"), str(tmp_path / "project")], "of all files"
    plain.write_text(yaml.safe_dump(values_of(tmp_path, "over_g")) + "pythonpath: deep/../project\n")
    assert load(plain).seed == 0


def test_in_python_the_modules_folder_is_remembered(project, tmp_path, monkeypatch):
    """A script finds its modules beside itself. The command line must find them there too."""
    project("py_h")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    assert from_dict(values_of(tmp_path, "py_h")).pythonpath == [str(tmp_path / "project")]


@pytest.mark.parametrize(("changes", "words"), [
    ({"task": {"name": "M_task:Reversal", "digit": 2}}, "task: unknown key 'digit'; did you mean 'digits'?"),
    ({"task": {"name": "M_task:Reversal", "digits": "x"}}, "task: digits: expected a whole number, got 'x'"),
    ({"task": {"name": "M:Relay"}}, "expected a class derived from maporl.Task, got the class Relay"),
    ({"task": {"name": "M_odd:Plain"}}, "the class Plain is not a dataclass; write @dataclass(frozen=True)"),
    ({"task": {"name": "M_odd:Half"}}, "the class Half does not define grade"),
    ({"task": {"name": "M_odd:Unsplit"}}, 'M_odd:Unsplit has no field split; add split: str = "train"'),
    ({"task": {"name": "M_odd:Odd"}}, "the class Odd has a field that no configuration can set"),
    ({"protocol": {"name": "M_task:Reversal"}}, "protocol.name: M_task:Reversal: expected a class derived from maporl.Protocol, got the class Reversal"),
    ({"protocol": {"name": "game", "game": "M:Relay"}}, "game: M:Relay: expected a class derived from maporl.Game, got the class Relay"),
    ({"reward": {"sources": {"M:Best": 1.0}}}, "expected f(dialogues, task) or a RewardSource, got the class Best"),
    ({"reward": {"sources": {"M:Sized": 1.0}}}, "expected a class without arguments, got (size)"),
    ({"reward": {"sources": {"M:two": 1.0}}}, "expected a function of (dialogues, task), got one of (advantages, returns, groups"),
    ({"reward": {"rules": ["M:Times"]}}, "reward.rules: M:Times: expected a class derived from maporl.Rule, got the class Times"),
    ({"advantage": {"returns": "M:first"}}, "advantage.returns: M:first: expected a function of (batch, config), got one of (returns"),
    ({"advantage": {"returns": "utterance", "baseline": "M:whole"}}, "advantage.baseline: M:whole: expected a function of (returns, "),
    ({"advantage": {"returns": "utterance", "baseline": "none", "post": ["M:Best"]}}, "advantage.post: M:Best: expected a class"),
    ({"ppo": {"objective": "M:whole"}}, "ppo.objective: M:whole: expected a function of (new, old, advantages, mask, options)"),
    ({"ppo": {"objective": "M_odd:mean_loss"}}, "objective M_odd:mean_loss: returned losses that are a tensor []; expected"),
    ({"advantage": {"returns": "utterance", "baseline": "M_odd:short"}}, "advantage.baseline: M_odd:short returned a tensor ["),
    ({"schedule": {"curriculum": [{"update": 2, "task": {"name": "M_task:Nobody"}}]}}, "update 2: task.name: M_task:Nobody: unknown"),
    ({"branching": {"how": "M:Relay"}}, "got 'M:Relay'; no part of your own can be named here"),
    ({"agents": {"ann": {**TINY, "engine": "M:Relay"}}}, "agents.ann.engine: unknown 'M:Relay'; known: transformers, "),
    ({"advantage": {"baseline": "M:witin"}}, "unknown 'witin'; did you mean 'within'? known: Best, Counting, Quick, Relay, Sized, Times, "),
    ({"task": {"name": "M_odd:Derived", "more": 3}}, "'more' is not an option of the class Derived, because only a class that it derives"),
])  # fmt: skip
def test_a_part_that_does_not_serve_is_refused_before_a_model_loads(
    project, write, tmp_path, monkeypatch, changes, words
):
    monkeypatch.chdir(tmp_path)
    write("project/odd_task.py", "raise ValueError('not for this test')")
    write(
        "project/M_odd.py",
        "import random\nfrom dataclasses import dataclass\nfrom M_task import Reversal\nfrom maporl import "
        "Task\nclass Plain(Task):\n    def __len__(self): return 1\n    def __getitem__(self, i): pass\n    def "
        "grade(self, e, t): pass\n@dataclass(frozen=True)\nclass Half(Task):\n    split: str\n    def __len__(self): "
        "return 1\n    def __getitem__(self, i): pass\n@dataclass(frozen=True)\nclass Unsplit(Task):\n    def "
        "__len__(self): return 1\n    def __getitem__(self, i): pass\n    def grade(self, e, t): pass\nclass "
        "Derived(Reversal):\n    more: int = 3\n@dataclass(frozen=True)\nclass Odd(Reversal):\n    draw: "
        "random.Random = None\ndef mean_loss(new, old, advantages, mask, options): return (new - old).mean(), {}\n"
        "def short(returns, groups, weights, batch, config, state): return returns[:1]\n",
    )
    file = project("M", **{"schedule": {}, "advantage": {}, "reward": {}, "ppo": {"response_length": 3}, **changes})
    with pytest.raises(ConfigError) as caught:
        check_run(load(file))
    assert words in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_a_name_is_looked_up_anew_in_another_section(project, tmp_path):
    """A section with another name replaces the one beneath it, as with the names that come with maporl."""
    file = project("merge_i")
    config = load(
        file,
        ["task.name=toy_sum", "schedule={}", "protocol={name: debate}", "agents.ann.tiny={}", "agents.bob.tiny={}"],
    )
    assert config.task == {"name": "toy_sum"} and config.protocol == {"name": "debate"}
    for words, expected in (
        (["reward.sources={merge_i_task:half: 2.0}"], {"merge_i_task:half": 2.0}),
        (["reward.sources.merge_i_task:half=2.0"], {"label": 1.0, "merge_i:Counting": 0.0, "merge_i_task:half": 2.0}),
        (["reward.sources={label: 1.0}", "reward.sources.merge_i_task:half=2.0"], {"label": 1.0, "merge_i_task:half": 2.0}),
        (["reward.sources={label: 1.0, merge_i_task:half: 1.0}", "reward.sources.label=0.5"], {"label": 0.5, "merge_i_task:half": 1.0}),
    ):  # fmt: skip
        assert load_config([str(file), *words], None, None).reward.sources == expected
    rules = load(file, ["reward.rules=[own]", "advantage={}"])
    assert rules.reward.rules == ("own",)


# -- commands --------------------------------------------------------------------------------------------------------


def command(*words, cwd, **environment):
    """``maporl WORDS`` as the console script starts it: the present folder is not on Python's path."""
    script = cwd / "bin" / "maporl"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from maporl.cli.main import main\nmain()\n")
    return processes.run([script, *words], env={**os.environ, **environment}, cwd=cwd)


@pytest.mark.slow
def test_a_run_is_evaluated_and_resumed_from_elsewhere_after_it_was_moved(project, tmp_path):
    """Its ``config.yaml`` remembers the folder of the modules.

    What the page needs is recorded, so it imports nothing.
    """
    file = project("moved_k", schedule={}, output_dir="runs/mine", updates=2)
    ended = command("train", "project/mine.yaml", "updates=1", "-q", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert yaml.safe_load((tmp_path / "runs/mine/config.yaml").read_text())["pythonpath"] == [str(tmp_path / "project")]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs/mine").rename(tmp_path / "elsewhere/moved")
    ended = command("eval", "moved", "--json", cwd=tmp_path / "elsewhere")
    assert ended.returncode == 0 and json.loads(ended.stdout)["questions"] == 4, ended.stderr

    run = tmp_path / "elsewhere/moved"
    shutil.rmtree(run / "final")  # as if it had been stopped
    config = load(file, ["updates=1", f"output_dir={run}"])
    train(config, resume=True, quiet=True)
    assert (run / "final").is_dir()

    shutil.rmtree(run / "final")
    own = tmp_path / "project/moved_k.py"
    own.write_text(own.read_text() + "# changed\n")
    with pytest.raises(UserError, match="the module 'moved_k' has changed since the run began") as caught:
        train(config, resume=True, quiet=True)
    assert imports.FINGERPRINTS in str(caught.value)


SPY = "from pathlib import Path\nPath(__file__).with_suffix('.ran').write_text('')\n"


def test_looking_at_a_run_imports_nothing(tmp_path, write, monkeypatch):
    """A page and a view of a run only read records. The run may be a stranger's."""
    values = values_of(tmp_path, "spy_l") | {"pythonpath": [str(tmp_path)]}
    for name in ("spy_l.py", "spy_l_task.py", "run/spy_l.py", "run/spy_l_task.py"):
        write(name, SPY)
    write("run/config.yaml", yaml.safe_dump(values))
    write("run/metrics.jsonl", '{"step": 1, "reward": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    for words in (["report", "run"], ["watch", "run", "--tui"], ["report", "run", "run"]):
        told = CliRunner().invoke(app, words)
        assert told.exit_code == 0, told.output
    page = LivePage(tmp_path / "run", 0)
    threading.Thread(target=page.serve_forever, args=(0.02,), daemon=True).start()
    try:
        assert b"maporl" in urllib.request.urlopen(page.url).read()
    finally:
        page.shutdown()
        page.server_close()
    assert list(tmp_path.rglob("*.ran")) == []
    assert CliRunner().invoke(app, ["eval", "run"]).exit_code == 2 and list(tmp_path.glob("run/*.ran")), (
        "eval does import them"
    )


def test_a_pushed_team_names_no_folder_of_this_machine_and_says_what_it_lacks(project, tmp_path):
    file = project("push_o", schedule={})
    train(load(file), resume=False, quiet=True)
    contents, notes = pack(read_run(tmp_path / "run"), "org/team")
    assert str(tmp_path).encode() not in contents["config.yaml"] and b"pythonpath" not in contents["config.yaml"]
    assert not any(path.endswith(".py") for path in contents)
    assert (
        "left out: the module of task.name=push_o_task:Reversal; who loads the team must have it, and name it again "
        "(KEY=VALUE)" in notes
    )
