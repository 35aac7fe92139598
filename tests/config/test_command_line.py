"""Commands made from functions: options from dataclasses, one line and an exit status for a user's mistake."""

import errno
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from maporl.config.command_line import command
from maporl.errors import ConfigError, RunError
from trl_ext.process.interruptions import Interrupted


@dataclass(frozen=True)
class Size:
    size: int = field(default=3, metadata={"help": "How large."})


@dataclass(frozen=True)
class Shape(Size):
    name: str = field(metadata={"help": "What it is called."}, kw_only=True)
    kind: Literal["round", "square"] = "round"
    colours: tuple[str, ...] = field(default=("red",), metadata={"name": "--colour"})
    double: bool = False
    weight: float | None = field(default=None, metadata={"show_default": "by size"})

    def __post_init__(self):
        if self.size < 1:
            raise ConfigError(f"--size: expected at least 1, got {self.size}")


def half(number: str) -> int:
    return int(number) // 2


@dataclass(frozen=True)
class Halved:
    number: int = field(default=1, metadata={"read": half, "name": "--twice-the-number"})


def run(function, *words):
    one = typer.Typer()
    one.command()(command(function))
    return CliRunner().invoke(one, list(words), env={"COLUMNS": "120", "TERM": "dumb"})


def test_fields_become_options_and_the_command_gets_the_dataclass():
    given = []

    def draw(*, where: str, shape: Shape, copies: int = 1) -> None:
        given.append((where, shape, copies))

    done = run(draw, "here", "--name", "dot")
    assert done.exit_code == 0, done.output
    words = ["--kind", "square", "--colour", "blue", "--colour", "green", "--double", "--weight", "2", "--size", "5"]
    assert run(draw, "there", "--name", "box", *words, "--copies", "2").exit_code == 0
    assert given == [
        ("here", Shape(name="dot"), 1),
        ("there", Shape(5, "square", ("blue", "green"), True, 2.0, name="box"), 2),
    ]


def test_the_help_page_shows_what_the_fields_say():
    def draw(shape: Shape) -> None:
        """Draw a shape."""

    shown = run(draw, "--help").output
    for words in ("How large. [default: 3]", "What it is called. [required]", "[default: red]", "[default: (by size)]"):
        assert words in shown, shown
    own_first = [shown.index(name) for name in ("--name", "--kind", "--colour", "--size")]
    assert own_first == sorted(own_first) and "--no-double" not in shown
    wrong = run(draw, "--name", "x", "--kind", "flat")
    assert wrong.exit_code == 2 and "'round', 'square'" in wrong.output


def test_an_option_may_be_read_by_a_function():
    given = []

    def draw(halved: Halved) -> None:
        given.append(halved)

    assert run(draw, "--twice-the-number", "8").exit_code == 0 and given == [Halved(4)]


def test_a_users_mistake_is_one_line_and_its_exit_status():
    def fail(error: Exception):
        def run() -> None:
            print("on the way")
            raise error

        return run

    def draw(shape: Shape) -> None:
        raise AssertionError("a wrong option is found before the command begins")

    for function, words, status, line in (
        (draw, ["--name", "x", "--size", "0"], 2, "error: --size: expected at least 1, got 0\n"),
        (fail(ConfigError("no agents")), [], 2, "error: no agents\n"),
        (fail(RunError("no run")), [], 1, "error: no run\n"),
        (fail(OSError(errno.ENOSPC, "No space left on device")), [], 1, "error: [Errno 28] No space left on device\n"),
        (fail(Interrupted()), [], 130, ""),
    ):
        done = run(function, *words)
        assert (done.exit_code, done.stderr) == (status, line), done.output
    lacking = run(fail(ModuleNotFoundError("no", name="maporl.integrations.ray.groups")))
    says = "error: this command needs maporl.integrations.ray.groups, which this copy of maporl lacks; install all of it: pip "
    assert lacking.exit_code == 2 and lacking.stderr.startswith(says)
    for error in (
        ValueError("a fault of ours"), OSError(errno.EACCES, "Permission denied"), ModuleNotFoundError("no", name="own")
    ):  # fmt: skip
        done = run(fail(error))
        assert done.exception is error, "other errors keep their trace"


def test_quiet_silences_standard_output_only():
    def talk(quiet: bool = False) -> None:
        typer.echo("words")
        typer.echo("warning", err=True)

    loud, silent = run(talk), run(talk, "--quiet")
    assert (loud.stdout, loud.stderr) == ("words\n", "warning\n")
    assert (silent.stdout, silent.stderr) == ("", "warning\n")


def test_no_help_page_imports_what_is_slow():
    code = """
import sys, typer
from typer.testing import CliRunner
from maporl.cli.main import COMMANDS, app
commands = typer.main.get_command(app).commands
pages = [[]]
for named in COMMANDS.values():
    for name in named:
        pages += [[name], *([name, inner] for inner in getattr(commands[name], "commands", ()))]
for page in pages:
    assert CliRunner().invoke(app, [*page, "--help"]).exit_code == 0, page
assert len(pages) > len(COMMANDS) and ["verifier", "train"] in pages
print(sorted({"torch", "transformers", "numpy", "fastapi", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


PROGRAM = """
import atexit, ctypes, sys, threading, time
import typer
from maporl.config.command_line import run_program
def app(end):
    aborts = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda status, nothing: ctypes.CDLL(None).abort())
    globals()["kept"] = aborts
    ctypes.CDLL(None).on_exit(aborts, None)  # as a library that dies while the process ends
    atexit.register(print, "closed")
    threading.Thread(target=lambda: (time.sleep(0.2), print("written"))).start()
    print("said", end="")
    exec(end)
run_program(app, end=sys.argv[1])
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("sys.exit()", 0), ("sys.exit(2)", 2), ("sys.exit('no')", 1), ("1 / 0", "killed")],
)
def test_a_program_ends_in_good_order_whatever_libraries_do_then(end, status):
    done = subprocess.run([sys.executable, "-c", PROGRAM, end], capture_output=True, text=True)
    assert ("killed" if done.returncode < 0 else done.returncode) == status, done.stderr
    assert done.stdout == "saidwritten\nclosed\n"
