"""The code of the documentation runs, its commands exist, and every metric of a run is defined."""

import ast
import contextlib
import importlib
import json
import re
import runpy
import shlex
import string
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import ray_groups
import typer
import yaml
from folders import ROOT, blocks
from packaging.requirements import Requirement
from tiny_runs import config_of

import maporl
import trl_ext
from maporl.cli.main import app
from maporl.report import metric_panels
from maporl.runs.train import train
from maporl.validation.load import load
from maporl.validation.preflight import check_run

sys.path.insert(0, str(ROOT / "docs"))
import make_api  # what writes the reference

PAGES = sorted(ROOT.glob("docs/**/*.md"))
DECISIONS = set(ROOT.glob("docs/decisions/[0-9]*.md"))
"""Pages to which their index leads, whose table has them all (test_architecture.py)."""
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    registries = [getattr(maporl, name) for name in maporl.__all__ if isinstance(getattr(maporl, name), Mapping)]
    known = [(registry, dict(registry)) for registry in [*registries, trl_ext.OBJECTIVES]]
    assert len(known) > 10
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    file = tmp_path / f"{page.stem}_page.py"
    file.write_text(code)
    names = {"__name__": "__page__", "__file__": str(file)}
    if page.stem == "cluster":  # tests/system/test_ray.py runs it on Ray
        ray_groups.use(monkeypatch)
    try:
        exec(compile(code, str(file), "exec"), names)
    finally:
        for registry, before in known:  # what a page adds is gone after it
            registry.clear()
            registry.update(before)


def titled(page):
    """The blocks of a page that are files, by name."""
    return dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE))


WITH_FILES = [page for page in PAGES if titled(page)]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("page", WITH_FILES, ids=lambda p: p.stem)
def test_the_files_of_a_page_make_a_run(page, tmp_path, monkeypatch):
    """A module and a configuration that names it, as a reader would write them beside each other."""
    files = titled(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    # a command of the page writes the dialogues that a loop learns from, and tests/system/test_program_story.py runs it
    configurations = [name for name, text in files.items() if name.endswith(".yaml") and "dialogues:" not in text]
    assert "mine.yaml" in configurations and len(files) > len(configurations)
    for name in configurations:
        warm = ["warm_start.steps=2"] if "warm_start:" in files[name] else []
        config = load(name, ["training.per_device_train_batch_size=8", *warm], trains=False)
        assert config.pythonpath == [str(tmp_path)]
        if any(agent.weights for agent in config.agents.values()):  # models behind an API do not learn
            _, after = train(config, resume=False, quiet=True)
            assert after.questions == 8
    tests = [one for name in files if name.startswith("test_") for one in runpy.run_path(name).items()]
    for name, function in tests:
        if name.startswith("test_"):
            function()


def test_the_readmes_screen_of_python_trains(tiny, tmp_path, monkeypatch):
    """As it stands there, with tiny models in place of those of the hub, and a single small update."""
    import transformers

    monkeypatch.chdir(tmp_path)
    size = {"alphabet": "".join(sorted(set(string.printable))), "context": 2048}
    for part, kind in enumerate((transformers.AutoModelForCausalLM, transformers.AutoTokenizer)):
        monkeypatch.setattr(kind, "from_pretrained", lambda name, part=part: tiny(**size)[part])
    [code] = blocks(ROOT / "README.md", "python")
    own = "total_episodes=80, response_length=64"
    assert own in code
    small = (
        "total_episodes=4, response_length=4, per_device_train_batch_size=4, gradient_accumulation_steps=1, "
        "use_cpu=True, report_to=[]"
    )
    exec(compile(code.replace(own, small), "README.md", "exec"), {})
    assert len((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()) == 1


def test_the_first_team_is_checked_and_trains_with_a_tiny_model_in_place_of_the_hubs(tmp_path, monkeypatch):
    page = ROOT / "docs/first_team.md"
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(page, "python")[0], "questions.py", "exec"), {})
    (tmp_path / "team.yaml").write_text(blocks(page, "yaml")[0])
    alphabet = string.ascii_letters + string.digits + "*?., :\n"
    tiny = json.dumps({"tiny": {"alphabet": alphabet, "context": 512}})
    small = [f"agent_defaults={tiny}", "updates=1", "training.per_device_train_batch_size=4", "evaluation.questions=4"]
    config = load("team.yaml", small)
    lines = check_run(config)
    assert "task gsm8k: 61 questions, 20 held out" in lines and "score: label" in lines
    _, after = train(config, resume=False, quiet=True)
    assert after.questions == 4


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.stem)
def test_the_commands_of_a_page_exist_with_their_options(page):
    command = typer.main.get_command(app)
    for block in blocks(page, "bash"):
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words[:1] == ["maporl"] and "..." not in words:
                with contextlib.suppress(click.exceptions.Exit):  # of --help and the like
                    _parse(command, words[1:])


def _parse(command, words):
    context = click.Context(command, info_name="maporl")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        assert command is not None, name
        context = click.Context(command, info_name=name, parent=context)
    command.parse_args(context, list(words))


def test_the_tests_that_the_page_on_security_names_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 15 and [name for name in named if not (ROOT / name).is_file()] == []


def test_the_navigation_and_the_front_page_lead_to_every_page():
    config, front = ((ROOT / name).read_text() for name in ("mkdocs.yml", "docs/index.md"))
    others = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page not in DECISIONS} - {"index.md"}
    assert [page for page in sorted(others) if page not in config] == [] and yaml.safe_load(config)["strict"] is True
    assert others == set(re.findall(r"\]\(([\w/]+\.md)\)", front))
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()


def test_every_link_of_a_page_leads_to_a_file_of_the_checkout():
    broken = []
    for page in [*PAGES, *ROOT.glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
            if not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_every_metric_of_a_run_is_defined(tmp_path):
    more = {"ppo": {"response_length": 4, "target_kl": 1.0}, "evaluation": {"questions": 4}}
    reward = {"penalties": {}, "bonus": {"alpha": [1.0, 1.0, 1.0, 1.0]}}
    run = config_of(tmp_path / "run", 1, more | {"reward": reward}, per_device_train_batch_size=4, eval_steps=1)
    train(run, resume=False, quiet=True)
    names = {k for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines() for k in json.loads(line)}
    undefined = [name for name in names if not any(metric.pattern.fullmatch(name) for metric in metric_panels.METRICS)]
    assert not undefined, f"add a row for each to METRICS in maporl/report/metric_panels.py: {sorted(undefined)}"


def test_the_page_of_metrics_is_up_to_date():
    assert (ROOT / "docs/metrics.md").read_text() == metric_panels.page(), "run make reference"


REFERENCE = (ROOT / "docs/api.md").read_text(encoding="utf-8")


def test_the_reference_is_up_to_date(monkeypatch):
    for name in [name for name in trl_ext.OBJECTIVES if ":" in name]:  # of a file, which another test has loaded
        monkeypatch.delitem(trl_ext.OBJECTIVES, name)
    assert make_api.page() == REFERENCE, "the public names or their docstrings changed: run make reference"


def test_the_reference_has_every_public_name_once():
    shown = re.findall(r"^### (.+)$", REFERENCE, re.MULTILINE)
    wanted = {*maporl.__all__, *(f"trl_ext.{name}" for name in trl_ext.__all__)} - set(make_api.SAME)
    missing = sorted(wanted - set(shown))
    assert not missing, f"add them to GROUPS in docs/make_api.py, and run make reference: {missing}"
    assert len(set(shown)) == len(shown)
    for name, same in make_api.SAME.items():
        assert make_api.find(name) is make_api.find(same)


def test_every_link_within_the_reference_leads_to_a_heading():
    headings = [make_api.anchor(title) for title in re.findall(r"^##+ (.+)$", REFERENCE, re.MULTILINE)]
    wanted = set(re.findall(r"\]\(#(.+?)\)", REFERENCE))
    assert len(wanted) > 100 and wanted <= {heading.replace(",", "").replace(" ", "-") for heading in headings}


def test_what_the_pages_import_is_public_and_in_the_reference():
    known = {id(make_api.find(name)) for _, _, names in make_api.GROUPS for name in names.split()}
    code = [block for page in [*PAGES, ROOT / "README.md"] for block in blocks(page, "python")]
    code += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))]
    cells = [cell for file in NOTEBOOKS for cell in json.loads(file.read_text())["cells"]]
    code += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    missing = set()
    for node in (node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)):
        if node.module.split(".")[0] in ("maporl", "trl_ext"):
            found = {alias.name: getattr(importlib.import_module(node.module), alias.name) for alias in node.names}
            missing |= {f"{node.module}.{name}" for name, value in found.items() if id(value) not in known}
    assert not missing, f"add them to GROUPS in docs/make_api.py: {sorted(missing)}"


def test_every_row_of_the_metrics_defines_something_of_its_own():
    """An example of each row's names is defined by that row, and not by one that stands before it."""
    places = {"POLICY": "writer", "AGENT": "ann", "NAME": "style", "N": "2", "M": "3"}
    for metric in metric_panels.METRICS:
        example = re.sub("|".join(places), lambda place: places[place[0]], metric.name)
        for name in (example, f"eval_{example}"):
            assert next(row for row in metric_panels.METRICS if row.pattern.fullmatch(name)) is metric, name


LICENCES = re.compile("GPL|MPL|EPL|EUPL|CDDL|Proprietary", re.IGNORECASE)


def needed(requirements, known=()):
    """The names of the installed packages that requirements install, with what these need themselves."""
    found = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        name = one.name.lower().replace("_", "-")
        if name in found or name in known or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        with contextlib.suppress(PackageNotFoundError):  # an extra that is not installed here
            waiting += map(Requirement, distribution(name).requires or [])
            found.add(name)
    return found


def test_the_page_of_extras_names_what_is_not_under_a_permissive_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: requirements for name, requirements in project["optional-dependencies"].items() if name != "dev"}
    core = needed(project["dependencies"])
    rows = {
        extra.strip(" `"): row
        for row in (ROOT / "docs/commands.md").read_text().splitlines()
        if row.startswith("| ") and row.count("|") == 4
        for extra in row.split("|")[1].split(",")
    }
    assert len(core) > 30 and ("chess" in needed(extras["textarena"], core)) == (find_spec("textarena") is not None)
    for extra, names in {"none": core, **{name: needed(r, core) for name, r in extras.items()}}.items():
        for name in names:
            about = distribution(name).metadata
            told = [
                about.get("License-Expression", ""),
                about.get("License", "")[:80],
                *(one for one in about.get_all("Classifier", []) if one.startswith("License")),
            ]
            if LICENCES.search(" ".join(line for line in told if line)):
                assert f"`{name}`" in rows[extra].split("|")[3], f"docs/commands.md: {extra}: {name} {told[:2]}"


@pytest.mark.parametrize("package, file, variables", [
    ("huggingface_hub", "constants.py", ["HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"]),
    ("trl", "trainer/base_trainer.py", ["CI", "send_telemetry"]),
    ("datasets", "config.py", ["HF_UPDATE_DOWNLOAD_COUNTS"]),
    ("ray", "_common/usage/usage_constants.py", ["RAY_USAGE_STATS_ENABLED"]),
    ("vllm", "envs.py", ["VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK"]),
])  # fmt: skip
def test_packages_read_the_variables_that_turn_their_telemetry_off(package, file, variables):
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    source, page = (Path(spec.origin).parent / file).read_text(), (ROOT / "SECURITY.md").read_text()
    for variable in variables:
        assert variable in source and (variable.islower() or f"`{variable}=" in page), variable


def test_teams_are_not_trained_by_a_trainer_that_tells_its_authors():
    trainers = (maporl.MultiAgentPPOTrainer, trl_ext.PPOv2Trainer)
    assert not [base for trainer in trainers for base in trainer.__mro__ if base.__module__.startswith("trl.")]
