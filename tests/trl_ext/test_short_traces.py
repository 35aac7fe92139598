"""A user's error has the lines of the user's code in its trace, and causes there; others and developers lose nothing."""

import linecache
import traceback

import pytest

from trl_ext.errors import WHOLE, UserError, short_trace

HERE = "maporl/inside.py"


def run(code, file, **names):
    """Run ``code`` as if it stood in ``file``."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    return names


@pytest.fixture
def inside(monkeypatch):
    """``inside(what)``: the decorated entry of this library, which calls ``what`` from a file of its own."""
    import trl_ext

    monkeypatch.delenv(WHOLE, raising=False)
    file = trl_ext.__file__.replace("__init__", "inside")
    code = "def call(what):\n    return what()\ndef fail(kind):\n    raise kind('the message')\n"
    names = run(code, file)
    return short_trace(names["call"]), names["fail"]


def lines_of(error):
    return [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]


def raised(code, **names):
    try:
        run(code, "/home/me/mine.py", **names)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_the_users_lines_are_left(inside):
    call, fail = inside
    error = raised("\ncall(lambda: fail(kind))\n", call=call, fail=fail, kind=UserError)
    assert [line for line in lines_of(error) if "inside.py" in line] == []
    assert lines_of(error)[-2:] == ["/home/me/mine.py:2", "/home/me/mine.py:2"], "the call, and the lambda"


def test_a_fault_of_the_library_keeps_its_trace(inside):
    call, fail = inside
    error = raised("call(lambda: fail(kind))\n", call=call, fail=fail, kind=KeyError)
    assert lines_of(error)[-1].endswith("trl_ext/inside.py:4")


def test_developers_see_everything(inside, monkeypatch):
    call, fail = inside
    monkeypatch.setenv(WHOLE, "1")
    error = raised("call(lambda: fail(kind))\n", call=call, fail=fail, kind=UserError)
    assert lines_of(error)[-1].endswith("trl_ext/inside.py:4")
    assert any("inside.py" in line for line in error._render_traceback_())


def test_a_cause_in_the_users_code_stays_and_others_go(inside):
    call, fail = inside
    code = """
def reward():
    {}["x"]
def through_the_library():
    try:
        reward()
    except KeyError as error:
        try:
            fail(ValueError)
        except ValueError as other:
            other.__traceback__ = other.__traceback__.tb_next
            other.__cause__ = error
            raise kind("reward failed") from other
call(through_the_library)
"""
    error = raised(code, call=call, fail=fail, kind=UserError)
    assert isinstance(error.__cause__, KeyError) and lines_of(error.__cause__)[-1] == "/home/me/mine.py:3"
    assert error.__cause__.__cause__ is None


def test_a_notebook_shows_the_cell_and_the_message(inside):
    call, fail = inside
    try:
        run("x = 1\ncall(lambda: fail(kind))\n", "/tmp/ipykernel_1/2.py", call=call, fail=fail, kind=UserError)
    except UserError as error:
        error.add_note("error: a second one")
        shown = error._render_traceback_()
    assert shown[-2:] == ["trl_ext.errors.UserError: the message", "error: a second one"]
    assert any('"/tmp/ipykernel_1/2.py", line 2' in line for line in shown)
    assert not any("inside.py" in line for line in shown)
