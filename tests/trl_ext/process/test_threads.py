"""How many threads a process computes with, and how they wait: of the user's choice, of the machine's, of a
launcher's."""

import json
import os
import subprocess
import sys

import pytest
import torch
from folders import ROOT
from tiny_runs import config_of
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.parse import to_yaml
from maporl.validation.load import load
from maporl.validation.preflight import check_run
from trl_ext.process.threads import WAITING, Threads, choose, usable_cores, use, wait_briefly


@pytest.fixture
def threads():
    """The tests of this file may change torch's number of threads and this process's cores."""
    count, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(count)
    os.sched_setaffinity(0, cores)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The path of a small configuration, and no variable of the user's or of a launcher's."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "team.yaml"
    path.write_text(to_yaml(config_of(tmp_path / "run", 1, {"warm_start": {"steps": 0}})))
    return path


def four_cores(monkeypatch):
    monkeypatch.setattr("trl_ext.process.threads.usable_cores", lambda: 4)


def test_threads_are_one_for_each_core_shared_by_the_processes(monkeypatch):
    four_cores(monkeypatch)
    assert choose(False, {}).count == 4
    assert choose(False, {"LOCAL_WORLD_SIZE": "2"}) == Threads(2, "4 cores for 2 processes")
    assert choose(False, {"LOCAL_WORLD_SIZE": "3"}).count == 1
    assert choose(False, {"LOCAL_WORLD_SIZE": "8"}).count == 1  # never none
    assert choose(True, {}).count == 1


def test_what_the_user_has_set_stays_and_its_consequence_is_told(monkeypatch, threads):
    four_cores(monkeypatch)
    use(Threads(1, "as OpenMP would read it"))
    assert choose(False, {"OMP_NUM_THREADS": "1"}) == Threads(
        1, "OMP_NUM_THREADS=1 is set; this process could use 4 cores"
    )
    assert choose(True, {"OMP_NUM_THREADS": "1"}) == Threads(1, "OMP_NUM_THREADS=1 is set")
    assert "could use 2 of 4 cores" in str(choose(False, {"MKL_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}))
    use(Threads(3, "as OpenMP would read it"))
    both = choose(False, {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"})
    assert both == Threads(3, "OMP_NUM_THREADS=3 is set; there are 4 cores for 6 threads")
    assert choose(False, {"OMP_NUM_THREADS": ""}).count == 4  # an empty variable sets nothing


def test_threads_sleep_while_they_wait_unless_the_user_has_said_how_they_wait():
    environment = {}
    wait_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "10"), ("KMP_BLOCKTIME", "0")):
        environment = {name: value}
        wait_briefly(environment)
        assert environment == {name: value}


def test_the_command_sets_how_threads_wait_before_torch_reads_it():
    program = (
        "import os, sys; from maporl.cli import main\n"
        "def command(): print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "main.app.command('probe')(command)\n"
        "main.app(['probe'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert told.stdout.split() == ["1000", "False"], told.stderr


def test_cores_are_those_of_the_affinity_mask(threads):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert usable_cores() == 1
    assert choose(False, {}).count == 1


def test_a_system_without_affinity_has_all_its_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6


LAUNCHER = """
import os, subprocess, sys
os.environ |= {"OMP_NUM_THREADS": "1", sys.argv[1]: "no"}
print(subprocess.run([sys.executable, "-c", "from trl_ext.process.threads import _set_by_user as s; import os; print(s(os.environ))"],
    check=True, capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize(("launched", "words", "environment", "found"), [
    ("ACCELERATE_MIXED_PRECISION", [], {}, "None"),
    ("TORCHELASTIC_RUN_ID", [], {}, "None"),
    ("NO_LAUNCHER", [], {}, "OMP_NUM_THREADS"),  # a program of the user's has set it
    ("ACCELERATE_MIXED_PRECISION", [], {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS"),
    ("ACCELERATE_MIXED_PRECISION", ["--num_cpu_threads_per_process", "1"], {}, "OMP_NUM_THREADS"),
    ("ACCELERATE_MIXED_PRECISION", ["--num-cpu-threads-per-process=1"], {}, "OMP_NUM_THREADS"),
])  # fmt: skip
def test_a_number_that_only_the_launcher_has_set_is_not_the_users(launched, words, environment, found):
    own = {n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | environment
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, launched, *words], capture_output=True, text=True, cwd=ROOT, env=own
    )
    assert done.stdout.strip() == found, done.stderr


def test_a_check_names_the_threads_and_a_run_uses_and_records_them(config, threads, tmp_path):
    torch.set_num_threads(2)
    [line] = [line for line in check_run(load(config)) if line.startswith("threads: ")]
    assert line == "threads: 1 (tiny models gain nothing from more; OMP_NUM_THREADS sets another number)"
    assert torch.get_num_threads() == 2  # a check changes nothing
    done = CliRunner().invoke(app, ["train", str(config)])
    assert done.exit_code == 0 and done.output.count(line) == 1, done.output
    assert [json.loads(text)["threads"] for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1]
