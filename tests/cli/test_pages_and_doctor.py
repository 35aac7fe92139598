"""The command line as a page, doctor, the schema of configurations."""

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import processes
from typer.testing import CliRunner

from maporl import __version__
from maporl.cli.main import app
from maporl.runs.doctor import FEATURES, examine
from maporl.validation.editor_schema import editor_schema


def test_the_version_is_that_of_the_package():
    assert CliRunner().invoke(app, ["--version"]).output == f"{__version__}\n"


HEAVY = {"accelerate", "datasets", "fastapi", "matplotlib", "pandas", "peft", "sympy", "torch", "transformers", "trl"}


def loaded_by(code):
    """The modules that ``code`` loads in a new interpreter, besides those that Python itself starts with."""
    code = f"import sys; before = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")[
        -2
    ]


def test_help_and_import_load_no_heavy_library_and_few_modules():
    """What keeps both under a second."""
    imported = set(loaded_by("import maporl").split())
    outside = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert outside == {"maporl", "maporl.moved", "trl_ext"} and len(imported) < 60, imported
    helped = set(loaded_by("from maporl.cli.main import app; app(['--help'], standalone_mode=False)").split())
    assert "maporl.cli.main" in helped and not HEAVY & helped and len(helped) < 700, len(helped)


def on_a_terminal(*words, **variables):
    """What the command prints on a terminal of 100 columns."""
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm", **variables}
    process = processes.start(["-m", "maporl", *words], variables, terminal=os.ttyname(theirs))
    shown = b""
    while process.poll() is None or select.select([own], [], [], 0)[0]:
        if select.select([own], [], [], 0.05)[0]:
            shown += os.read(own, 65536)
    os.close(theirs)
    os.close(own)
    assert process.returncode == 0, shown
    return shown.decode()


def test_colour_on_a_terminal_and_none_where_it_is_unwanted():
    assert "\x1b[32mfine" in on_a_terminal("doctor")
    assert "\x1b[32m" not in on_a_terminal("doctor", NO_COLOR="1")
    done = processes.maporl("doctor")
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr, done.stderr


def test_doctors_commands_are_printed_as_they_are_typed(tmp_path, monkeypatch):
    lock = tmp_path / "a folder" / ("with a long name" * 4) / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    printed = CliRunner().invoke(app, ["doctor"]).output
    missing = [finding.detail for finding in examine() if finding.state == "missing"]
    assert f"rm '{lock}'" in printed and all(detail in printed for detail in missing), printed


def test_doctor_lives_where_there_is_no_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "none/such"))
    assert next(f for f in examine() if f.what == "disk").detail.endswith(f"GB free in {tmp_path}")


def test_doctor_names_what_is_missing_and_the_command(monkeypatch):
    import importlib.util

    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in {p for _, p, _ in FEATURES} else known(name, *rest),
    )
    found = {finding.what: finding for finding in examine()}
    for what, _, extra in FEATURES:
        assert found[what].state == "missing" and f"[{extra}]'" in found[what].detail
    assert found["torch"].state == found["python"].state == "fine" and "cores" in found["processor"].detail


def test_doctor_names_the_lock_that_a_killed_compilation_has_left(monkeypatch, tmp_path):
    """DeepSpeed waits for it for ever, without a word and without CPU time."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    left, new = (tmp_path / f"py311_cpu/{name}/lock" for name in ("deepspeed_shm_comm", "cpu_adam"))
    for lock in (left, new):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(left, (time.time() - 3600,) * 2)
    found = [finding for finding in examine() if finding.what == "compiled extensions"]
    assert [finding.state for finding in found] == ["missing"]
    assert found[0].detail.endswith(f"rm {left}")


def test_doctor_ends_with_1_where_a_package_is_broken(monkeypatch):
    from maporl.runs import doctor

    known = doctor.importlib.import_module

    def broken(name, *rest):
        if name == "peft":
            raise ImportError("libfoo.so: cannot open shared object file")
        return known(name, *rest)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "libfoo.so" in result.output


def test_doctor_says_whether_shared_memory_is_enough_for_groups(monkeypatch, tmp_path):
    from maporl.integrations.ray.ray_cluster import OBJECT_STORE
    from maporl.runs import doctor, doctor_groups

    free = [2.5 * 2**30]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    found = doctor_groups._shared_memory(OBJECT_STORE, tmp_path)
    assert [(own.state, own.detail) for own in found] == [("fine", f"2.5 GiB free in {tmp_path}; groups take up to 2")]
    free[0] = 64 * 2**20  # what a container has by default
    found = doctor_groups._shared_memory(OBJECT_STORE, tmp_path)
    assert found[0].state == "missing" and "docker run --shm-size=4g" in found[0].detail
    assert doctor_groups._shared_memory(OBJECT_STORE, tmp_path / "none") == []


def test_the_schema_is_printed():
    printed = CliRunner().invoke(app, ["schema"])
    assert json.loads(printed.output) == editor_schema()
