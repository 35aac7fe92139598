"""Threads that parse Python at a time."""

import ast
import gc
import sys
import threading
import time

import pytest
from folders import ROOT

from trl_ext.process.parsing import literal_of, parsed

DEEP = "x = " + "[" * 15 + "1, {'a': (2, 3)}" + "]" * 15


class Finalized:
    """Lets other threads run while it is freed, as weak references of a library may."""

    def __del__(self):
        time.sleep(1e-4)


@pytest.fixture
def switching():
    """Threads take turns often, and garbage is looked for often: four threads of ast.parse then fail within a second."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_threads_parse_at_a_time(switching):
    failed, end = [], time.monotonic() + 1

    def parse():
        while time.monotonic() < end and not failed:
            held = Finalized()
            held.itself = held
            del held
            try:
                parsed(DEEP)
                assert literal_of(" [1, {2: (3,)}]") == [1, {2: (3,)}]
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_what_another_library_parses_meanwhile_is_no_failure(monkeypatch):
    outcomes = [SystemError("AST constructor recursion depth mismatch (before=30, after=29)"), ast.parse("1")]
    monkeypatch.setattr(ast, "parse", lambda *arguments, **options: raised(outcomes.pop(0)))
    assert parsed("1").body[0].value.value == 1 and not outcomes


def raised(outcome):
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_all_of_the_package_parses_there():
    files = [file for part in ("maporl", "trl_ext", "reward_server") for file in (ROOT / part).rglob("*.py")]
    named = {file.name for file in files if any(w in file.read_text() for w in ("ast.parse(", "ast.literal_eval("))}
    assert named == {"parsing.py"}
