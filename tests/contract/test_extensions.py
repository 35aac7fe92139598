"""What stands above the core can be taken away: the core imports none of it, and says in one sentence what is missing."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import yaml
from folders import ROOT
from test_architecture import FILES, imports_inside, make_architecture, weigh


class Extension(NamedTuple):
    """Modules and packages that nobody needs who does not use them.

    ``asked`` is what asks for them: words of the command, or sections of a configuration. ``told`` is what needs them
    then, as the error names it.
    """

    modules: tuple[str, ...]
    asked: tuple[str, ...] | dict[str, Any]
    told: str


BOB = {"bob": {"tiny": {}}}
GAMES = tuple(f"maporl.integrations.{name}" for name in ("text_arena", "petting_zoo", "gymnasium", "spaces"))
EXTENSIONS = {
    "methods": Extension(("maporl.methods",), {"reward": {"rules": ["tier"]}}, "reward.rules: tier"),
    "protocols of methods": Extension(("maporl.methods",), {"protocol": {"name": "route"}}, "protocol.name: route"),
    "datasets": Extension(("maporl.datasets",), {"task": {"name": "gsm8k"}}, "task.name: gsm8k"),
    "suites": Extension(("maporl.datasets",), ("eval", "configs/ppo/quickstart.yaml", "--suite", "math"), "maporl eval --suite"),
    "search": Extension(("maporl.datasets",), {"tools": {"search": {"use": "bm25", "options": {"corpus": "x"}}}}, "tools.search.use: bm25"),
    "games": Extension(("maporl.methods",), {"protocol": {"name": "game", "game": "tictactoe"}}, "game: tictactoe"),
    "tiny versions": Extension(("maporl.methods",), ("recipes", "try", "cory"), "maporl recipes try"),
    "loops": Extension(("maporl.loops",), {"loop": {"stages": [{"train": "sft", "build": "threshold"}]}}, "loop:"),
    "sft": Extension(("maporl.loops",), ("sft", "configs/ppo/quickstart.yaml", "--output", "x"), "maporl sft"),
    "crossplay": Extension(("maporl.studies.crossplay",), ("crossplay", "a", "b"), "maporl crossplay"),
    "compare": Extension(("maporl.studies.comparing",), ("compare", "a", "b", "-o", "x"), "maporl compare"),
    "sharing": Extension(("maporl.studies.sharing",), ("sharing", "-o", "x"), "maporl sharing"),
    "planning": Extension(("maporl.studies.planning",), ("plan", "--cluster", "1x1xH100"), "maporl plan"),
    "verifier": Extension(("maporl.verifier",), ("verifier", "train", "x"), "maporl verifier"),
    "reward server": Extension(("reward_server",), ("serve", "--task", "gsm8k", "--labels"), "maporl serve"),
    "programs": Extension(("maporl.serving",), {"protocol": {"name": "program", "command": ["true"]}}, "protocol.name: program"),
    "ray": Extension(("maporl.integrations.ray",), {"cluster": {"backend": "ray"}}, "cluster:"),
    "tinker": Extension(("maporl.integrations.tinker",), {"agents": BOB | {"ann": {"tiny": {}, "tinker": {}}}}, "agents.ann.tinker:"),
    "jobs": Extension(("maporl.integrations.jobs",), ("jobs", "train", "x"), "maporl jobs"),
    "vllm": Extension(("maporl.integrations.vllm",),
     {"agents": BOB | {"ann": {"model": "x", "engine": "vllm", "vllm": {"urls": ["http://127.0.0.1:9"]}}}}, "agents.ann.vllm:"),
    "hub": Extension(("maporl.integrations.hub",), ("push", "x", "org/team"), "maporl push"),
    "exporting": Extension(("maporl.integrations.exporting",), ("export", "x", "y"), "maporl export"),
    "mcp": Extension(("maporl.integrations.mcp", "maporl.integrations.mcp_server"),
     {"tools": {"files": {"use": "mcp", "options": {"command": ["true"]}}}}, "tools.files.use: mcp"),
    "openenv": Extension(("maporl.integrations.open_env",),
     {"environments": {"room": {"use": "openenv", "options": {"base_url": "http://127.0.0.1:9"}}}}, "environments.room.use: openenv"),
    "environments of TRL": Extension(("maporl.integrations.trl",),
     {"environments": {"room": {"use": "codecs:IncrementalDecoder"}}}, "environments.room.use"),  # it has reset
    "games of others": Extension(GAMES, {"protocol": {"name": "game", "game": "textarena"}}, "game: textarena"),
    "verifiers": Extension(("maporl.integrations.verifiers", "maporl.integrations.verifiers_rewards"), {"task": {"name": "verifiers"}},
     "task.name: verifiers"),
}  # fmt: skip

SMALL = {"updates": 2, "warm_start": {"steps": 0}, "evaluation": {"questions": 4}}
SCRIPT = """
import json, sys
gone, calls = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(gone)  # an installation may have them besides
from typer.testing import CliRunner
import maporl
from maporl.cli.main import app
said = []
for words in calls:
    done = CliRunner().invoke(app, words)
    said.append([done.exit_code, done.output, repr(done.exception)])
print(json.dumps([maporl.__file__, said]))
"""


def is_of(module, names):
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def edges():
    """Every import of an extension in a module of the core. Those inside functions and for types count."""
    modules = [module for extension in EXTENSIONS.values() for module in extension.modules]
    return {
        (found.module, found.imported)
        for found in imports_inside()
        if is_of(found.imported, modules) and not is_of(found.module, modules)
    }


def test_the_core_imports_no_extension():
    for name, extension in EXTENSIONS.items():
        assert all(module in FILES for module in extension.modules), name
    assert edges() == set(), 'name these by a text, "MODULE:OBJECT" (maporl.config.imports)'
    listed = {module for extension in EXTENSIONS.values() for module in extension.modules}
    above = [path for path, (kind, _) in weigh.budgets().items() if kind == "extension"]
    left = [m for m in FILES if is_of(m, [p.replace("/", ".") for p in above]) and not is_of(m, listed)]
    assert [module for module in left if module not in ("maporl.integrations", "maporl.studies")] == []


def copy_without(names, folder):
    modules = [module for name in names for module in EXTENSIONS[name].modules]

    def gone(parent, entries):
        paths = {entry: ROOT / parent / entry for entry in entries}
        inside = {entry: make_architecture.module_name(path) for entry, path in paths.items()}
        return [entry for entry, module in inside.items() if is_of(module, modules)]

    for package in weigh.COUNTED:
        if not is_of(package, modules):
            shutil.copytree(ROOT / package, folder / package, ignore=gone)


def lives_without(names, folder, *others):
    """Check that a team is trained without some extensions, and that what asks for one of them says what is missing.

    ``others`` are further commands that need none.
    """
    copy_without(names, folder)
    quickstart = yaml.safe_load((ROOT / "configs/ppo/quickstart.yaml").read_text()) | SMALL
    quickstart["output_dir"] = str(folder / "run")
    quickstart["training"] |= {"per_device_train_batch_size": 4}

    def file(name, sections):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(quickstart | sections))
        return str(folder / f"{name}.yaml")

    asked = [(EXTENSIONS[name].told, EXTENSIONS[name].asked) for name in names]
    calls = [["check", "configs/ppo/quickstart.yaml"], ["train", file("small", {})], ["--help"], *others]
    begun = len(calls)
    calls += [["check", file(told, words)] if isinstance(words, dict) else words for told, words in asked]
    tops = [module for name in names for module in EXTENSIONS[name].modules if "." not in module]
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, json.dumps([tops, calls])],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported, said = json.loads(done.stdout.splitlines()[-1])
    assert imported == str(folder / "maporl/__init__.py")
    for words, (status, text, error) in zip(calls[:begun], said, strict=False):
        assert status == 0, (words, text, error)
    assert len((folder / "run/metrics.jsonl").read_text().splitlines()) == 2
    for (told, _), (status, text, error) in zip(asked, said[begun:], strict=True):
        line = next((line for line in text.splitlines() if f"{told} needs " in line), "")
        assert status == 2 and line.startswith("error: ") and "which this copy of maporl lacks; " in line, (text, error)


def test_without_any_extension_a_team_is_trained_and_each_is_named_where_it_is_asked_for(tmp_path):
    lives_without(list(EXTENSIONS), tmp_path)


@pytest.mark.slow
def test_without_any_extension_the_machine_is_examined_and_the_schema_printed(tmp_path):
    lives_without(list(EXTENSIONS), tmp_path, ["schema"], ["doctor"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTENSIONS)
def test_each_extension_can_be_taken_away_alone(name, tmp_path):
    lives_without([name], tmp_path)
