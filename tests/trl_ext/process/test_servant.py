"""A child process that answers: what it is asked, how it ends, and what a fork of its owner does."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from folders import ROOT

from trl_ext.process.interruptions import Interruptions
from trl_ext.process.servant import Lost, Servant, framed, receive, requests, send
from trl_ext.process.waits import Discarded

PROGRAM = textwrap.dedent(
    """
    import json, os, subprocess, sys, time
    sys.path.insert(0, sys.argv[1])
    from trl_ext.process.servant import owner, requests, send
    end = owner()
    assert sys.stdin.read() == ""  # it is not the socket
    send(end, b'"ready"')
    for asked in requests(end):
        if asked == "child":
            asked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        elif asked == "end":
            break
        elif asked == "hang":
            time.sleep(600)
        elif asked == "number":
            asked = os.getpid()
        elif asked == "folder":
            asked = [os.getcwd(), sorted(os.environ)]
        print("printed")
        send(end, json.dumps(asked).encode())
    """
)


class Echo(Servant):
    """Answers what it is asked."""

    begun = 0

    def __init__(self, variables=None, **options):
        super().__init__(**options)
        self.variables = variables

    def command(self):
        return [sys.executable, "-c", PROGRAM, str(ROOT)]

    def environment(self):
        return self.variables

    def begin(self, end):
        self.begun += json.loads(receive(end, time.monotonic() + 60)) == "ready"


@pytest.fixture
def echo():
    servant = Echo(silent=True)
    yield servant
    servant.close()


def ended(number, seconds=20):
    _, alive = psutil.wait_procs([psutil.Process(number)] if psutil.pid_exists(number) else [], timeout=seconds)
    return not alive


def test_it_answers_threads_in_turn_and_starts_once(echo):
    long = "ä" * 3_000_000  # more than a socket holds
    answers = []
    threads = [threading.Thread(target=lambda n=n: answers.append(echo.ask([n]))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [[n] for n in range(8)] and echo.ask(long, 60) == long and echo.begun == 1


@pytest.mark.slow
def test_one_that_ends_or_hangs_is_replaced_with_all_that_it_started(echo):
    first, child = echo.ask("number"), echo.ask("child")
    with pytest.raises(Lost, match=r"^killed$"):
        echo.ask("end")
    assert ended(first) and ended(child)
    child = echo.ask("child")
    with pytest.raises(Lost, match=r"^timeout$"):
        echo.ask("hang", 0.2)
    assert echo.process is None and ended(child)
    second = echo.ask("number")
    os.kill(second, signal.SIGKILL)
    echo.process.wait()
    assert echo.ask("number") not in (first, second) and echo.begun == 4


def test_what_cannot_be_said_in_json_is_refused_and_the_next_answer_is_right(echo):
    with pytest.raises(TypeError, match="not JSON serializable"):
        echo.ask({1, 2})
    assert echo.ask(3) == 3


def test_it_has_the_folder_and_the_variables_that_it_is_given(tmp_path):
    servant = Echo({"ONE": "1"}, folder=str(tmp_path), silent=True)
    folder, names = servant.ask("folder")
    assert folder == str(tmp_path) and {*names} - {"LC_CTYPE"} == {"ONE"}
    servant.close()


def test_what_it_prints_goes_where_errors_go(capfd):
    servant = Echo()
    assert servant.ask(1) == 1
    servant.patience = 20  # until it has printed all
    servant.close()
    assert capfd.readouterr() == ("", "printed\n")


def test_it_ends_with_its_object():
    servant = Echo(silent=True)
    number = servant.ask("number")
    del servant
    gc.collect()
    assert ended(number)


@pytest.mark.parametrize("end", ["", "raise SystemExit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_it_ends_with_its_owner_however_that_ends(end):
    program = (
        f"import os, signal, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom trl_ext.process.servant import Servant\n"
        f"class Own(Servant):\n  def command(self): return [sys.executable, '-c', {PROGRAM!r}, {str(ROOT)!r}]\n"
        "servant = Own(silent=True)\nassert servant.ask('number') == 'ready'\nprint(servant.process.pid, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program + end], stdout=subprocess.PIPE, text=True, timeout=120)
    assert ended(int(done.stdout))


def test_a_fork_has_its_own_and_leaves_that_of_its_parent_alone(echo):
    number = echo.ask("number")
    reading, writing = os.pipe()
    with echo.lock:  # as if another thread were asking
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                os.write(writing, json.dumps([echo.process is None, echo.ask("number")]).encode())
                echo.close()
            finally:
                os._exit(0)
    os.close(writing)
    alone, others = json.loads(os.read(reading, 99))
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0 and alone and others != number and ended(others)
    assert echo.ask("number") == number


def test_a_signal_ends_the_wait_for_an_answer_and_the_process(echo):
    number = echo.ask("number")
    with Interruptions() as interruptions:
        sender = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        sender.start()
        with pytest.raises(Discarded), interruptions.droppable():
            echo.ask("hang")
    sender.join()
    assert ended(number)


def test_frames():
    ours, theirs = socket.socketpair()
    assert framed(b"ab") == b"\0\0\0\2ab"
    send(ours, b"[1]")
    send(ours, b"")
    ours.sendall(framed(b"2")[:4])
    assert receive(theirs) == b"[1]" and receive(theirs) == b""
    with pytest.raises(Lost, match=r"^timeout$"):
        receive(theirs, time.monotonic() + 0.01)
    with pytest.raises(Lost, match=r"^timeout$"):
        send(ours, bytes(10_000_000), time.monotonic() + 0.01)
    ours.close()
    with pytest.raises(Lost, match=r"^killed$"):
        receive(ours)
    with pytest.raises(Lost, match=r"^killed$"):
        send(theirs, b"1")
    ours, theirs = socket.socketpair()
    ours.sendall(framed(b"1") + framed(b"[2, 3]") + b"\0\0")
    ours.close()
    assert list(requests(theirs)) == [1, [2, 3]]
