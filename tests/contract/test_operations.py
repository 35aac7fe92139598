"""The files of ``examples/operations`` and the page about them: what they say exists, and what they do was tried with
commands that are made up."""

import configparser
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib

import click
import pytest
import typer
import yaml
from folders import ROOT
from packaging.requirements import Requirement

from maporl.cli.main import COMMANDS, app
from maporl.integrations.exporting.serving import PORT

sys.path.insert(0, str(ROOT / "docs"))
import make_licences

FOLDER, PAGE = ROOT / "examples/operations", ROOT / "docs/howto/operations.md"
RAY = yaml.safe_load((ROOT / "examples/ray/rayjob.yaml").read_text())["spec"]


def unit():
    read = configparser.ConfigParser(interpolation=None, strict=False, delimiters="=")
    read.optionxform = str
    read.read(FOLDER / "maporl-api.service")
    return read


def commands():
    """The words after ``maporl`` in each file, with a folder in place of what Docker and systemd set."""
    text = re.sub(r"\\\n#?\s*", "", (FOLDER / "Dockerfile").read_text())
    for line in re.findall(r"^#   docker run .* maporl (.*)$", text, re.M):
        yield "Dockerfile", shlex.split(line.removeprefix("maporl "))
    yield "unit", shlex.split(unit()["Service"]["ExecStart"])[1:]
    yield "rayjob", shlex.split(RAY["entrypoint"].split("#")[0])[3:]
    yield "slurm", ["train", "--config", "configs/ppo/quickstart.yaml", "--set", "updates=2", "--resume"]


@pytest.mark.parametrize("file, words", commands(), ids=str)
def test_the_commands_of_the_files_exist_with_their_options(file, words):
    if words[0] not in {name for panel in COMMANDS.values() for name in panel}:
        pytest.skip(f"maporl {words[0]} is not here")
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(click.Context(group), words)
    with contextlib.suppress(click.exceptions.Exit):
        command.parse_args(click.Context(command, info_name=name), list(rest))


def test_nothing_is_installed_from_an_index_by_the_name_of_maporl():
    [place] = [
        one["value"] for one in RAY["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["initContainers"][0]["env"]
    ]
    assert Requirement(place).url.startswith("git+https://") and Requirement(place).extras >= {"ray"}
    for group in (RAY["rayClusterSpec"]["headGroupSpec"], *RAY["rayClusterSpec"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [container], [install] = pod["containers"], pod["initContainers"]
        assert container["image"] == install["image"] and "--target /packages" in install["command"][-1]
        assert {"name": "PYTHONPATH", "value": "/packages"} in container["env"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    installs = re.findall(r"pip install (.*?)(?:&&|\n(?!\s))", (FOLDER / "Dockerfile").read_text(), re.S)
    assert len(installs) == 2 and '"/src[$EXTRAS]"' in installs[1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search("ARG EXTRAS=(.*)", (FOLDER / "Dockerfile").read_text())[1].split(",")) <= extras.keys()


MADE_UP = """#!/bin/bash
told() { echo "$(basename "$0") $*" >> "$LOG"; }
"""
BIN = {
    "scontrol": '[[ $1 == show ]] && printf "m1\\nm2\\n" || told "$@"',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec env SLURM_NODEID=1 "$@"',
    "hostname": "echo 10.0.0.7 fe80::1",
    "accelerate": 'told "$@"; [[ -z $TERMED ]] || { kill -TERM $PPID; sleep 0.2; }; exit "$STATUS"',
}


@pytest.mark.parametrize("restarts, status, termed, ended, last", [
    ("0", "0", "", 0, ""), ("1", "3", "", 3, " --resume"), ("0", "1", "yes", 143, ""),
])  # fmt: skip
def test_slurm_starts_a_launcher_on_each_machine_and_queues_what_sigterm_has_ended(
    tmp_path, restarts, status, termed, ended, last
):
    (tmp_path / "bin").mkdir()
    for name, text in BIN.items():
        (tmp_path / "bin" / name).write_text(MADE_UP + text + "\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG": f"{tmp_path}/log", "SLURM_JOB_ID": "41234", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "m[1-2]", "SLURM_RESTART_COUNT": restarts, "STATUS": status, "TERMED": termed,
    }  # fmt: skip
    script = ["bash", str(FOLDER / "slurm.sh"), "x.yaml", "--set", "updates=9"]
    done = subprocess.run(script, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == ended, done.stderr
    told = (tmp_path / "log").read_text().splitlines()
    launched = "accelerate launch --config_file configs/accelerate/multi_gpu.yaml --num_machines 2 --num_processes 16 --machine_rank 1"
    assert (
        told[0]
        == f"{launched} --main_process_ip 10.0.0.7 --main_process_port 21234 train_multi_agent.py --config x.yaml --set updates=9{last}"
    )
    assert told[1:] == (["scontrol requeue 41234"] if termed else [])
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", (FOLDER / "slurm.sh").read_text(), re.M))
    assert options["signal"] == "TERM@300" and options["ntasks-per-node"] == "1" and "requeue" in options
    assert (ROOT / "configs/accelerate/multi_gpu.yaml").is_file()


def test_the_page_names_every_dependency_variable_and_port():
    page = PAGE.read_text(encoding="utf-8")
    assert page == make_licences.text(page), "python docs/make_licences.py"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "dev"}
    names = {Requirement(one).name.lower() for wanted in (project["dependencies"], *extras.values()) for one in wanted}
    assert len(names) > 40 and {name for name in names if f"| `{name}` |" not in page} == set()
    assert [extra for extra, wanted in extras.items() if any("textarena" in one for one in wanted)] == ["textarena"]
    sources = [
        path.read_text(encoding="utf-8")
        for part in ("maporl", "trl_ext", "reward_server")
        for path in (ROOT / part).rglob("*.py")
    ]
    variables = {name for text in sources for name in re.findall(r"\bMAPORL_[A-Z_]+[A-Z]\b", text)}
    assert len(variables) >= 4 and {name for name in variables if f"`{name}`" not in page} == set()
    assert f"ports from {PORT}" in page
    for module, port in (("reward_server/options.py", 8501), ("maporl/cli/look.py", 8600)):
        assert f"= {port}" in (ROOT / module).read_text() and f"127.0.0.1:{port}" in page
    files = [path.relative_to(ROOT).as_posix() for path in FOLDER.iterdir() if path.suffix != ".dockerignore"]
    assert len(files) == 3 and all(f"`{file}`" in page for file in files)
