"""Closed pipes, missing homes, folders that cannot be written, and words that nobody expects on the command line."""

import os
import subprocess
import sys

import processes
import pytest
from folders import ROOT

TINY = """
output_dir: {folder}/run
task: {{name: toy_sum, largest: 9}}
agents: {{ann: {{tiny: {{}}}}}}
protocol: {{name: debate, turns: 1}}
ppo: {{response_length: 3}}
evaluation: {{questions: 0}}
"""


@pytest.fixture
def tiny_file(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.format(folder=tmp_path))
    return file


def shell(command):
    """What bash prints for ``command``, in which ``maporl`` is this checkout's."""
    script = f'maporl() {{ "{sys.executable}" -m maporl "$@"; }}; {command}'
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    settings = {"text": True, "errors": "replace", "env": known, "timeout": 300}
    return subprocess.run(["bash", "-c", script], capture_output=True, **settings)


def check(*words, **environment):
    """``maporl check WORDS``; an environment value of None removes the variable."""
    known = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
    return processes.run(["-m", "maporl", "check", *words], env=known)


def one_line(done, status, told):
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told in line and line.isprintable(), line


@pytest.mark.slow
def test_a_reader_that_goes_away_and_a_full_disk_end_in_no_traceback():
    gone = shell("maporl schema | head -c 1 > /dev/null; echo ${PIPESTATUS[0]}")
    assert gone.stdout.strip() in ("0", "1") and gone.stderr == ""
    one_line(shell("maporl schema > /dev/full"), 1, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "maporl --help | head -c 1", "maporl recipes list | head -c 1", "maporl doctor | head -c 1", "maporl schema >&-", "maporl schema >&- 2>&-",
        "maporl check quickstart | true", "maporl --help < /dev/null", "TERM=nonsense COLUMNS=x maporl --help", "COLUMNS=0 LINES=-5 maporl --help",
        "cd $(mktemp -d) && rmdir $PWD && maporl schema", "LC_ALL=C PYTHONIOENCODING=ascii maporl check quickstart",
    ],
)  # fmt: skip
def test_no_surroundings_end_in_a_traceback(command):
    assert "Traceback" not in shell(command).stderr


@pytest.mark.slow
def test_a_player_without_an_input_leaves(tiny_file):
    done = shell(f"maporl play {tiny_file} <&-")
    assert done.returncode == 0 and "You have left" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_a_home_a_run_is_checked(tiny_file):
    for home in (None, "", "/nonexistent"):
        done = check(tiny_file, "protocol.opening='{question}'", HOME=home)
        assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr


@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/null", "/dev/null/below"])
def test_a_cache_without_a_place_is_said_before_anything_runs(tiny_file, tmp_path, folder):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1?", "code": "def f(): return 1"}\n' * 3)
    task = f"task={{name: tinygsm, source: {rows}, held_out: 1}}"
    one_line(check(tiny_file, task, MAPORL_CACHE=folder), 1, "the cache cannot be used")


@pytest.mark.parametrize(
    "words, told",
    [
        (["./" + "9" * 500 + ".yaml"], "File name too long"),
        ([""], "is a folder"),
        (["\x1b[31m.yaml"], "no such configuration file"),
        (["{file}", "protocol.opening=" + "x" * 5000], "protocol"),
        (["{file}", "a." * 300 + "b=1"], "expected a key of at most 50 parts"),
        (["{file}", "output_dir=/dev/null/x"], "output_dir: '/dev/null' is a file"),
        (["{file}", b"output_dir=\xff"], "not YAML"),
        (["/proc/self/mem"], "not readable as YAML"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_odd_words_end_in_one_line(tiny_file, words, told):
    written = [str(tiny_file) if word == "{file}" else os.fsdecode(word) for word in words]
    done = check(*written)
    one_line(done, done.returncode, told)
    assert done.returncode in (1, 2)
