"""The process that compares mathematics: it is killed, stopped, forked, interrupted and left, and grades stay right."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from maporl.tasks.grading import grade_mathematics, same_answer, symbolic
from maporl.tasks.grading.symbolic import Allowance, Comparer, MathematicsError

ENDLESS = "(x+y+z+w+a+b+c+d)^{12}"


@pytest.fixture
def comparer():
    own = Comparer()
    yield own
    own.close()


def right(comparer):
    return comparer.equal("$x+1$", "$1+x$", Allowance())


def servant(comparer):
    """The process that computes, a fork of the one that was started."""
    deadline = time.monotonic() + 60
    while not (found := psutil.Process(comparer.process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_mathematics_without_end_ends_in_every_thread():
    """Signals, which limited the time before, reach the main thread only."""
    found = {}

    def grade(name):
        found[name] = grade_mathematics(rf"\boxed{{{ENDLESS}}}", "5").correct, same_answer("x^2+2x+1", "(x+1)^2")

    thread = threading.Thread(target=grade, args=("other",), daemon=True)
    thread.start()
    grade("main")
    thread.join(300)
    assert found == {"main": (False, True), "other": (False, True)}


def test_an_endless_label_cannot_be_graded_and_an_endless_answer_is_wrong(comparer):
    assert comparer.equal(f"${ENDLESS}$", "$x$", short := Allowance(0.3)) is False  # such a label is read at once
    assert 0 < short.seconds < 0.3
    assert comparer.equal("$5$", f"${ENDLESS}$", spent := Allowance(0.3)) is False
    assert spent.seconds == 0
    assert comparer.equal("$x$", "$x$", spent) is False, "nothing is left for another comparison of this grade"
    assert comparer.equal("$x$", None, Allowance()) is False and comparer.equal("$", "$x$", Allowance()) is None
    nested = "$" + r"\sqrt{" * 3000 + "2" + "}" * 3000 + "$"
    assert comparer.equal(nested, "$x$", Allowance(0.3)) in (None, False)
    assert right(comparer) is True


def test_who_kills_the_process_changes_no_outcome(comparer):
    assert right(comparer) is True
    first = comparer.process.pid
    for kill in (
        lambda: os.kill(comparer.process.pid, signal.SIGKILL),
        lambda: servant(comparer).send_signal(signal.SIGKILL),
        lambda: os.killpg(comparer.process.pid, signal.SIGTERM),
    ):
        kill()
        time.sleep(0.05)
        assert comparer.equal("$5$", f"${ENDLESS}$", Allowance(0.1)) is False
        assert right(comparer) is True
    last = comparer.process.pid
    comparer.close()
    assert not psutil.pid_exists(first) and not psutil.pid_exists(last), "nobody waited for them"


def test_a_process_killed_while_it_computes_is_asked_again(comparer):
    assert right(comparer) is True
    found = []
    thread = threading.Thread(
        target=lambda: found.append(comparer.equal("$5$", f"${ENDLESS}$", Allowance(0.8))), daemon=True
    )
    thread.start()
    wait_until(lambda: comparer._lock.locked())
    servant(comparer).send_signal(signal.SIGKILL)
    thread.join(300)
    assert found == [False] and right(comparer) is True


@pytest.mark.slow
def test_a_stopped_process_is_replaced(comparer, monkeypatch):
    assert right(comparer) is True
    stopped = servant(comparer)
    stopped.suspend()
    monkeypatch.setattr(symbolic, "_ANSWER_SECONDS", 15.0)
    assert right(comparer) is True
    wait_until(lambda: gone(stopped.pid))


def test_a_process_that_cannot_work_is_an_error_and_not_a_grade(comparer, monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such parser')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MathematicsError, match=r"cannot load math-verify: ImportError: no such parser"):
        right(comparer)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MathematicsError, match=r"lost twice at '\$x\+1\$' and .* see whether memory is short"):
        right(comparer)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(MathematicsError, match=r"does not start: .*absent"):
        right(comparer)
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None)
    with pytest.raises(MathematicsError, match=r"which .* lacks; use Linux or macOS, or a task whose"):
        right(comparer)
    monkeypatch.undo()
    assert right(comparer) is True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_and_a_servant_that_has_used_much_is_replaced(comparer):
    assert right(comparer) is True
    limits = Path(f"/proc/{servant(comparer).pid}/limits").read_text()
    (address_space,) = (int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max address space"))
    assert 1 << 29 < address_space < 1 << 30 and "Max core file size        0 " in limits
    code = f"""
import resource, sys
sys.path.insert(0, {str(symbolic._WORKER.parent)!r})
import symbolic_worker
kept = []
def compare(connection, gold, answer):
    kept.append(b"x" * int(gold))
    return str(len(kept))
symbolic_worker.compare = compare
from multiprocessing.connection import Pipe
import json, os
ours, theirs = Pipe()
os.fork() or symbolic_worker.serve(theirs)
theirs.close()
for size in (1, 4 << 30, 320 << 20):
    ours.send_bytes(json.dumps({{"gold": str(size), "answer": None, "seconds": 20}}).encode())
    print(json.loads(ours.recv_bytes())[0])
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1", "ended", "2", "0"], done.stderr


def test_a_fork_starts_its_own_and_leaves_the_parents_alone():
    """Also if another thread compares while the process forks, as the lock is then held for ever in the fork."""
    assert same_answer("x+1", "1+x") is True
    process = symbolic._comparer.process
    thread = threading.Thread(target=same_answer, args=(ENDLESS, "5"), daemon=True)
    thread.start()
    wait_until(lambda: symbolic._comparer._lock.locked())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        mine = same_answer("x+2", "2+x"), symbolic._comparer.process.pid != process.pid
        os.write(writing, json.dumps([*mine, symbolic._comparer.process.pid]).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 100)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    equal, other, pid = json.loads(said)
    assert equal and other
    thread.join(300)
    assert same_answer("x+1", "1+x") is True and symbolic._comparer.process is process
    wait_until(lambda: gone(pid))


def test_an_interrupted_comparison_leaves_no_answer_to_the_next(comparer):
    class Interrupted(BaseException):
        pass

    def interrupt(number, frame):
        raise Interrupted

    assert right(comparer) is True
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            comparer.equal("$5$", f"${ENDLESS}$", Allowance(30.0))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert right(comparer) is True
    assert comparer.equal("$x$", "$y$", Allowance()) is False


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "os.kill(os.getpid(), 9)",
        pytest.param("os._exit(0)", marks=pytest.mark.slow),
        pytest.param("raise SystemExit", marks=pytest.mark.slow),
    ],
)
def test_the_process_ends_with_its_owner(end):
    """Even while it computes, and however the owner ends."""
    code = f"""
import os, threading, time
from maporl.tasks.grading import same_answer, symbolic
same_answer("x", "1+x")
print(symbolic._comparer.process.pid, flush=True)
threading.Thread(target=same_answer, args=({ENDLESS!r}, "5"), daemon=True).start()
time.sleep(0.1)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, -9) and not done.stderr, done.stderr
    wait_until(lambda: gone(int(done.stdout)))
