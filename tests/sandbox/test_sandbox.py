"""The sandbox against hostile snippets, with and without bubblewrap, and its cache."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from maporl.sandbox import sandbox as module
from maporl.sandbox.outcomes import decode
from maporl.sandbox.sandbox import Limits, Outcome, Sandbox, SandboxError, bubblewrap_prefix, find_bubblewrap
from maporl.storage.disk_cache import DiskCache

LIMITS = Limits(cpu_seconds=1, wall_seconds=20.0, memory_mb=160, output_bytes=4096)
BUBBLEWRAP, WHY_NOT = find_bubblewrap()
needs_bubblewrap = pytest.mark.skipif(BUBBLEWRAP is None, reason=WHY_NOT)
KINDS = ["restricted", pytest.param("bubblewrap", marks=needs_bubblewrap)]


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    with Sandbox(LIMITS, kind=request.param, cache=False) as made:
        assert made.run("def f(): return 41", "f") == Outcome(41, "ok")
        yield made


def returns(expression, before=""):
    """A snippet whose ``f`` returns ``expression``; ``before`` stands above it."""
    return f"{before}\ndef f():\n    return {expression}\n"


def state():
    """What a snippet must not change about this process."""
    return os.getcwd(), dict(os.environ), sorted(os.listdir("/proc/self/fd")), threading.active_count()


HOSTILE = {
    # network
    "connect": ("import socket\nsocket.create_connection(('1.1.1.1', 53))", "error:PermissionError"),
    "listen": ("import socket\nsocket.socket(socket.AF_UNIX)", "error:PermissionError"),
    "urllib": ("from urllib.request import urlopen\nurlopen('http://1.1.1.1')", "error:OSError"),
    # files
    "read passwd": (returns("open('/etc/passwd').read()"), "error:PermissionError"),
    "read a process": (returns("open('/proc/self/environ').read()"), "error:PermissionError"),
    "read the worker": (returns("open(f'/proc/1/mem', 'rb').read(1)"), "error:PermissionError"),
    "list folders": ("import pathlib\nlist(pathlib.Path('/').iterdir())", "error:PermissionError"),
    "write a file": ("open('/tmp/escaped', 'w').write('x')", "error:PermissionError"),
    "remove a file": ("import os\nos.remove('/tmp/escaped')", "error:PermissionError"),
    "temporary file": ("import tempfile\ntempfile.TemporaryFile()", "error:FileNotFoundError"),
    "shared memory": ("import os\nos.memfd_create('x')", "error:PermissionError"),
    "map a file": ("import mmap\nmmap.mmap(1, 4096)", "error:PermissionError"),
    "close descriptors": ("import os\nos.close(3)", "error:PermissionError"),
    "copy a descriptor": ("import os\nos.dup2(3, 9)", "error:PermissionError"),
    # processes
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "error:PermissionError"),
    "subprocess": ("import subprocess\nsubprocess.run(['id'])", "error:PermissionError"),
    "exec": ("import os\nos.execv('/bin/sh', ['sh'])", "error:PermissionError"),
    "threads": ("import threading\nthreading.Thread(target=print).start()", "error:RuntimeError"),
    "raw threads": ("import _thread\n_thread.start_new_thread(print, ())", "error:RuntimeError"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "error:PermissionError"),
    "kill everything": ("import os\nos.kill(-1, 9)", "error:PermissionError"),
    "kill the group": ("import os\nos.killpg(0, 9)", "error:PermissionError"),
    "ignore a signal": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)", "error:PermissionError"),
    "raise a limit": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "error:ValueError"),
    "become root": ("import os\nos.setuid(0)", "error:PermissionError"),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "error:PermissionError"),
    "asyncio": ("import asyncio\nasyncio.run(asyncio.sleep(0))", "error:PermissionError"),
    "environment": (returns("os.environ['HOME']", "import os"), "error:KeyError"),
    # machine code and broken memory
    "null pointer": ("import ctypes\nctypes.string_at(0)", "killed"),
    "any pointer": ("import ctypes\nctypes.memset(id(print), 65, 4096)\nprint()", "killed"),
    "machine code": (
        "import ctypes, mmap\nmmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)", "error:PermissionError",
    ),
    "abort": ("import os\nos.abort()", "killed"),
    "leave": ("import os\nos._exit(0)", "killed"),
    "input": (returns("input()"), "error:EOFError"),
    # forged verdicts
    "no verdict": ("import os\nos.write(3, b'forged')\nos._exit(0)", "killed"),
    "two verdicts": (
        "import os\nos.write(3, b'{\"reason\": \"ok\", \"value\": 1, \"message\": \"\"}\\n' * 2)\nos._exit(0)", "killed",
    ),
    "a verdict before its own": ("import os\nos.write(3, b'{\"reason\": \"ok\", \"value\": 1, \"message\": \"\"}\\n')\nf = int", "killed"),
    "endless verdicts": ("import os\nwhile True:\n    os.write(3, b'x' * 4096)", "output"),
    "other descriptors": ("import os\nfor fd in range(4, 64):\n    try: os.write(fd, b'forged')\n    except OSError: pass\nraise KeyError", "error:KeyError"),
    # strings as code, and a changed Python
    "no builtins": ("import builtins\nvars(builtins).clear()\nf = 1", "killed"),
    "patched json": ("import json\njson.dumps = None\n1 / 0", "killed"),
    "exit": ("exit()", "error:SystemExit"),
    "sys.exit": ("import sys\nsys.exit('bad')", "error:SystemExit"),
    "SystemExit": ("raise SystemExit(0)", "error:SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "error:KeyboardInterrupt"),
    "own BaseException": ("class Own(BaseException): pass\nraise Own", "error:BaseException"),
    "error with a borrowed name": ("class ValueError(KeyError): pass\nraise ValueError", "error:KeyError"),
    "error with a hostile text": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\n    __repr__ = __str__\nraise E", "error:Exception",
    ),
    "division by zero": (returns("1 / 0"), "error:ZeroDivisionError"),
    "no such module": ("import numpy", "error:ModuleNotFoundError"),
    # time, memory, output
    "endless loop": ("while True: pass", "cpu"),
    "endless loop that catches": ("while True:\n    try:\n        x = 1\n    except BaseException:\n        pass", "cpu"),
    "huge power": (returns("10 ** 10 ** 8"), "cpu"),
    "backtracking": (returns("re.match('(a+)+$', 'a' * 40 + 'b')", "import re"), "cpu"),
    "endless generator": (returns("sum(1 for _ in itertools.count())", "import itertools"), "cpu"),
    "memory": (returns("len('x' * 10 ** 9)"), "memory"),
    "memory by pieces": ("x = []\nwhile True: x.append('y' * 100_000 + str(len(x)))", "memory"),
    "endless output": ("while True: print('x' * 100)", "output"),
    "output that is caught": ("while True:\n    try:\n        print('x' * 100)\n    except BaseException:\n        pass", "output"),
    "huge list": (returns("list(range(10_000))"), "output"),
    "huge text": (returns("'x' * 100_000"), "output"),
    "huge integer as text": (returns("str(10 ** 5000)"), "error:ValueError"),
    "deep recursion": ("def f(): return f() + 1", "error:RecursionError"),
    "deep recursion through C": ("x = []\nfor _ in range(100_000): x = [x]\nrepr(x)", "error:RecursionError"),
    "nested parentheses": ("(" * 10_000 + "1" + ")" * 10_000, "syntax"),
    "nested signs": ("x = " + "-" * 50_000 + "1", "syntax"),
    # results that are not values
    "no function": ("x = 1", "no_value"),
    "None": (returns("None"), "no_value"),
    "NaN": (returns("float('nan')"), "no_value"),
    "infinity": (returns("float('inf')"), "no_value"),
    "NaN of Decimal": (returns("Decimal('sNaN')", "from decimal import Decimal"), "no_value"),
    "huge integer": (returns("10 ** 5000"), "no_value"),
    "complex": (returns("1j"), "no_value"),
    "generator": ("def f():\n    while True: yield 1", "no_value"),
    "coroutine": ("async def f(): return 1", "no_value"),
    "nested too deeply": ("x = []\nfor _ in range(100_000): x = [x]\ndef f(): return x", "error:RecursionError"),
    "contains itself": ("x = []\nx.append(x)\ndef f(): return x", "error:RecursionError"),
    "hostile object": (
        "class X:\n    def __repr__(self): raise SystemExit\n    __eq__ = __hash__ = __float__ = __repr__\nf = X", "no_value",
    ),
    "false class": ("class X:\n    @property\n    def __class__(self): return int\nf = X", "no_value"),
    "an integer's subclass": ("class X(int):\n    def __repr__(self): return '0]'\ndef f(): return X(3)", "no_value"),
    "keys that are not text": (returns("{1: 2}"), "no_value"),
    "not callable": ("f = 3", "error:TypeError"),
    "needs arguments": ("def f(x): return x", "error:TypeError"),
    # no program
    "null byte": ("x = 1\0", "syntax"),
    "lone surrogate": ("x = '\ud800'", "syntax"),
    "prose": ("The answer is 5.", "syntax"),
    "blank": ("  \n", "source"),
    "too long": ("x = 1\n" * 20_000, "source"),
    "a number": (5, "source"),
    "None for source": (None, "source"),
    "bytes": (b"x = 1", "source"),
}  # fmt: skip


MORE_ENDLESS = {"backtracking", "endless generator", "huge power"}
"""They end at the limit of processor time, a second, as the endless loop does, and are left to ``make test-slow``."""


@pytest.mark.parametrize(
    ("code", "reason"),
    [pytest.param(*case, id=n, marks=pytest.mark.slow if n in MORE_ENDLESS else ()) for n, case in HOSTILE.items()],
)
def test_hostile_snippets_get_their_reason_and_nothing_else(sandbox, code, reason):
    worker, before = sandbox.worker.pid, state()
    assert sandbox.run(code, "f") == Outcome(None, reason)
    assert state() == before and not os.path.exists("/tmp/escaped")
    assert sandbox.run("def f(): return 42", "f") == Outcome(42, "ok")
    assert sandbox.worker.pid == worker, "no snippet ends the worker"


ORDINARY = {
    "integer": (returns("3"), 3),
    "float": (returns("2.5"), 2.5),
    "large integer": (returns("10 ** 100"), 10**100),
    "bool": (returns("1 < 2"), True),
    "text": (returns("'ü\\n'"), "ü\n"),
    "list": (returns("[1, (2.5, None)]"), [1, [2.5, None]]),
    "dict": (returns("{'a': {'b': 1}}"), {"a": {"b": 1}}),
    "whole fraction": (returns("Fraction(6, 3)", "from fractions import Fraction"), 2),
    "fraction": (returns("Fraction(1, 4)", "from fractions import Fraction"), 0.25),
    "whole decimal": (returns("Decimal('3.00')", "from decimal import Decimal"), 3),
    "decimal": (returns("Decimal('0.1') + Decimal('0.2')", "import decimal\nDecimal = decimal.Decimal"), 0.3),
    "printing": ("print('hello', 3, sep='-')\ndef f() -> float:\n    '''Doc.'''\n    print('{:.2f} of {x}'.format(1.5, x=2))\n    return 7", 7),
    "modules": (returns("[math.ceil(2.1), comb(4, 2), sum(accumulate([1, 2, 3])), bisect.bisect([1, 2], 1)]",
                "import math, bisect\nfrom math import *\nfrom itertools import accumulate"), [3, 6, 10, 1]),
    "dates": (returns("(datetime.strptime('2024-03-01', '%Y-%m-%d') - timedelta(days=1)).strftime('%A')",
              "from datetime import datetime, timedelta"), "Thursday"),
    "dataclass": (returns("P(2, 3) == P(2, 3) and asdict(P(2))['y']",
                  "from __future__ import annotations\nfrom dataclasses import dataclass, asdict\nfrom typing import "
                  "List\n"
                  "@dataclass\nclass P:\n    x: int\n    y: int = 5\n    z: List[int] = ()"), 5),
    "memo": (returns("g(50)", "import functools\n@functools.lru_cache(None)\ndef g(n): return n if n < 2 else g(n - 1) + g(n - 2)"), 12586269025),
    "main guard": ("def f(): return 1\nif __name__ == '__main__':\n    def f(): return 2", 2),
    "harmless modules": (returns("[copy.deepcopy([1]), operator.add(1, 2), cmath.sqrt(-1).imag, issubclass(list, Sequence), Color(1).name, len(Deque.__name__)]",
                         "import copy, operator, cmath, enum\nfrom collections.abc import Sequence\nfrom typing import Deque\nColor = enum.Enum('Color', 'RED')"),
                         [[1], 3, 1.0, True, "RED", 5]),
    "introspection": (returns("[f.__name__, getattr((), '__class__').__name__, eval('1 + 1'), type('X', (), {})().__class__.__name__]"), ["f", "tuple", 2, "X"]),
    "metaclass": (returns("X.y", "class M(type):\n    def __new__(c, n, b, d): return super().__new__(c, n, b, {**d, 'y': 3})\nclass X(metaclass=M): pass"), 3),
    "class pattern": (returns("g(P(1, 2))", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int\ndef g(p):\n    match p:\n        case P(a, b): return a + b"), 3),
    "a computed format": (returns("t.format(3, x=4)", "t = '{0}' + '{x}'"), "34"),
    "secrets": (returns("len(secrets.token_bytes(8)) + len(str(uuid.uuid4()))", "import secrets, uuid"), 44),
    "seeded": (returns("random.randint(0, 10 ** 9)", "import random"), 906691059),
}  # fmt: skip


@pytest.mark.parametrize(("code", "value"), ORDINARY.values(), ids=ORDINARY.keys())
def test_ordinary_snippets_return_their_value(sandbox, code, value):
    outcome = sandbox.run(code, "f")
    assert outcome == Outcome(value, "ok") and outcome.ok
    assert type(outcome.value) is type(value)


def test_nothing_a_snippet_changes_is_there_for_the_next(sandbox):
    spoil = (
        "import math, random, re, collections\nfrom fractions import Fraction\nmath.floor = random.random = lambda "
        "*a: 13\nFraction.limit_denominator = None\nrandom.seed(5)\nf = lambda: math.floor(1)"
    )
    probe = returns(
        "[math.floor(2.5), random.randint(0, 10 ** 9), str(Fraction(0.5).limit_denominator(10))]",
        "import math, random\nfrom fractions import Fraction",
    )
    first, spoilt, last = sandbox.run_many([probe, spoil, probe + "\n"], "f")
    assert (first, spoilt.value) == (Outcome([2, 906691059, "1/2"], "ok"), 13)
    assert last == first


def test_the_function_to_call_is_a_name(sandbox):
    with pytest.raises(ValueError, match=r"expected the name of a function that the snippet defines, got 'f\(\)'"):
        sandbox.run("x = 1", "f()")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(1e6)"])
def test_waiting_is_limited_too_and_nothing_stays_behind(kind, code):
    with Sandbox(Limits(cpu_seconds=3600, wall_seconds=0.3), kind=kind, cache=False) as box:
        assert box.run(returns("0"), "f").reason == "ok"
        worker = box.worker
        before = {process.pid for process in psutil.Process(worker.pid).children(recursive=True)}
        assert box.run(code, "f").reason == "timeout"
        assert box.run_tests("def f():\n    " + code.replace("\n", "\n    "), ["f()"])[0].reason == "timeout"
        assert {process.pid for process in psutil.Process(worker.pid).children(recursive=True)} == before
        assert box.run(returns("1"), "f").value == 1
        assert box.worker is worker


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_outlives_the_thread_that_started_it_and_not_its_owner(kind, tmp_path):
    with Sandbox(LIMITS, kind=kind, cache=False) as box:
        thread = threading.Thread(target=box.run, args=(returns("1"), "f"))
        thread.start()
        thread.join()
        worker = box.worker
        assert box.run(returns("2"), "f").value == 2 and box.worker is worker
    assert worker.poll() is not None
    body = (
        "import os, signal, sys, threading\nfrom maporl.sandbox.sandbox import Limits, Sandbox\nbox = "
        f"Sandbox(Limits(wall_seconds=600.0), kind={kind!r}, cache=False)\nbox.walls()\nprint(box.worker.pid, "
        "flush=True)\nthreading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\nbox.run('import time; "
        "time.sleep(600)', 'f')"
    )
    owner = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    number = int(owner.stdout.readline())
    processes = [psutil.Process(number), *psutil.Process(number).children(recursive=True)]
    owner.wait(60)
    _, alive = psutil.wait_procs(processes, timeout=20)
    owner.stdout.close()
    assert not alive


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_died_is_replaced_and_no_snippet_blamed(kind):
    with Sandbox(LIMITS, kind=kind, cache=False) as box:
        assert box.run(returns("1"), "f").value == 1
        box.worker.kill()
        box.worker.wait()
        assert box.run(returns("2"), "f").value == 2


@pytest.mark.slow
def test_a_fork_made_while_another_thread_runs_a_snippet_has_a_sandbox_of_its_own():
    with Sandbox(Limits(cpu_seconds=5, wall_seconds=2), kind="restricted", cache=False) as box:
        box.walls()
        thread = threading.Thread(target=box.run, args=("while True: pass", "f"))
        thread.start()
        while not box._worker.lock.locked():
            pass
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            with contextlib.suppress(BaseException):
                os.write(writing, str(box.run(returns("2"), "f").value).encode())
            os._exit(0)
        os.close(writing)
        assert os.read(reading, 9) == b"2"
        os.close(reading)
        os.waitpid(child, 0)
        thread.join()
        assert box.run(returns("3"), "f").value == 3


def test_signals_that_the_owner_holds_back_still_end_a_snippet():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU])
    try:
        with Sandbox(Limits(cpu_seconds=1, wall_seconds=60), kind="restricted", cache=False) as box:
            assert box.run("while True: pass", "f").reason == "cpu"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGXCPU])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_whose_json_needs_more_memory_than_there_is_kills_no_worker(kind):
    with Sandbox(Limits(cpu_seconds=60, wall_seconds=60, memory_mb=160), kind=kind, cache=False) as box:
        assert box.run(returns("['\u00e9' * 500] * 30_000"), "f").reason == "memory"


def test_an_interrupted_exchange_leaves_no_answer_to_the_next(monkeypatch):
    with Sandbox(LIMITS, kind="restricted", cache=False) as box:
        assert box.run(returns("1"), "f").value == 1

        def interrupt(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, "exchange", interrupt)
            with pytest.raises(KeyboardInterrupt):
                box.run(returns("2"), "f")
        assert box.run(returns("3"), "f").value == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"forged", b"[" * 100_000, b'{"reason": "splendid", "value": 1}', b'{"reason": ["ok"], "value": 1}', b"[1]", b"3",
        b'{"reason": "ok", "value": NaN}', b'{"reason": "ok", "value": [-Infinity]}', b'{"reason": "ok", "value": 1e999}',
        b'{"reason": "ok", "value": "\\ud800"}', b'{"reason": "ok", "value": {"\\udfff": 1}}', b'{"reason": "ok"}',
        b'{"reason": "ok", "value": 1' + b"0" * 4000 + b"}", b'{"reason": "ok", "value": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"reason": "ok", "value": 1, "more": 1}', b'{"reason": "error:Splendid", "value": 1}', b'{"reason": "error:print", "value": 1}',
    ],
    ids=range(18),
)  # fmt: skip
def test_a_verdict_that_no_process_of_ours_writes_is_no_verdict(payload):
    whole = payload.removesuffix(b"}") + b', "message": ""}' if payload.endswith(b"}") else payload
    assert decode(b'{"reason": "ok", "value": 1, "message": ""}') == Outcome(1, "ok")
    assert decode(whole) == decode(payload) == Outcome(None, "killed")


# -- the kernel's part, each wall by itself ----------------------------------------------------------------------------

KERNEL = {
    "read": "os.open('/etc/passwd', 0)",
    "list": "os.listdir('/')",
    "socket": "socket.socket()",
    "pipe": "os.pipe()",
    "raise": "resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    "fork": "os.fork() or os._exit(0)",
}


def in_the_worker(body):
    """Run ``body`` with the worker's own functions, as nobody where this is root."""
    head = (
        f"import resource, sys; sys.path.insert(0, {str(Path(module.__file__).parent)!r}); from sandboxed.worker "
        "import *; import socket"
    )
    return subprocess.run(
        [sys.executable, "-S", "-c", f"{head}\n{body}"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("code", KERNEL.values(), ids=KERNEL.keys())
def test_the_limits_of_resources_refuse_what_they_are_for(code):
    # descriptor 3 stands for the pipe of the verdict
    body = (
        f"os.dup2(1, 3); drop_privileges(); confine(2, 256)\n"
        f"try:\n    {code}\nexcept (OSError, ValueError) as error:\n    os.write(3, type(error).__name__.encode())"
    )
    assert in_the_worker(body).stdout in ("OSError", "ValueError", "BlockingIOError", "PermissionError")


@needs_bubblewrap
def test_inside_bubblewrap_there_is_no_network_no_home_and_nothing_to_write():
    code = """
import os, socket
def refused(action):
    try:
        action()
    except OSError:
        return True
print([
    refused(lambda: socket.create_connection(("1.1.1.1", 53), timeout=2)),
    refused(lambda: open("/etc/passwd")), refused(lambda: open("/proc/1/environ")), refused(lambda: os.listdir("/home")),
    refused(lambda: open("/empty/x", "w")), refused(lambda: open("/x", "w")), refused(lambda: os.setuid(0)),
    os.getcwd(), os.listdir("."), os.getuid(), [k for k in os.environ if k not in ("PWD", "LC_CTYPE")],
])
"""
    command = [*bubblewrap_prefix(BUBBLEWRAP), os.path.realpath(sys.executable), "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={}, check=True)
    assert done.stdout.strip() == str([True] * 7 + ["/empty", [], 65534, []])


def test_a_platform_or_kind_that_cannot_serve_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "find_bubblewrap", lambda: (None, "namespaces are off"))
    with pytest.raises(SandboxError, match="kind='bubblewrap' was asked for, but namespaces are off; use kind='auto'"):
        Sandbox(kind="bubblewrap", cache=False)
    assert Sandbox(kind="auto", cache=False).kind == "restricted"
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(
        SandboxError,
        match=r"no program of others runs on this machine, .* linux has no seccomp\. Expected Linux on x86_64",
    ):
        Sandbox(cache=False)
    with pytest.raises(ValueError, match=r"Limits\.memory_mb: expected at least 64, got 1"):
        Limits(memory_mb=1)


def test_a_worker_that_does_not_start_is_an_error(monkeypatch):
    box = Sandbox(kind="restricted", cache=False)
    box.command[:] = [sys.executable, "-c", "raise SystemExit(3)", "code", "folder"]
    with pytest.raises(SandboxError, match="the worker of the restricted sandbox did not start"):
        box.run("x = 1", "f")


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_verdicts_are_kept_by_content_and_timeouts_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    codes = [returns("-1"), returns("None"), "while True: pass", None, returns("-1"), "open('x')"]
    limits = Limits(cpu_seconds=5, wall_seconds=0.3)
    expected = [Outcome(-1, "ok"), Outcome(None, "no_value"), Outcome(None, "timeout"), Outcome(None, "source")]
    expected += [expected[0], Outcome(None, "error:PermissionError")]
    asked = []
    run = Sandbox.execute
    monkeypatch.setattr(Sandbox, "execute", lambda self, code, call: asked.append(code) or run(self, code, call))
    with Sandbox(limits, kind="restricted") as box:
        assert box.run_many(codes, "f") == expected
    assert asked == [codes[0], codes[1], codes[2], codes[5]]
    assert (tmp_path / "cache" / "sandbox.sqlite").is_file()
    asked.clear()
    with Sandbox(limits, kind="restricted") as box:
        assert box.run_many(codes, "f") == expected
        assert asked == [codes[2]]
        assert box.run(codes[0], "g") == Outcome(
            None, "no_value"
        )  # another call is another key, and so are other limits
    with Sandbox(Limits(cpu_seconds=4, wall_seconds=0.3), kind="restricted") as box:
        assert box.run(codes[0], "f").value == -1
    assert asked == [codes[2], codes[0], codes[0]]


def _write(folder, writer):
    cache = DiskCache(folder)
    for start in range(0, 200, 10):
        cache.put((f"{n}", {"value": writer, "reason": "ok"}) for n in range(start, start + 10))


def test_several_processes_may_write_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [w.exitcode for w in writers] == [0] * 4
    found = DiskCache(tmp_path).get([str(n) for n in range(1000)])
    assert len(found) == 200 and {r["value"] for r in found.values()} <= set(range(4))


def test_an_outcome_of_the_clock_or_of_chance_is_not_kept(tmp_path):
    codes = [returns("time.time()", "import time"), returns("random.random()", "import random")]
    with Sandbox(LIMITS, kind="restricted", cache=tmp_path) as box:
        first, second = box.run_many(codes, "f"), box.run_many(codes, "f")
    assert first[0].value < second[0].value and first[1] == second[1] == Outcome(0.8444218515250481, "ok")
    assert len(DiskCache(tmp_path).get([box._key(code, "f") for code in codes])) == 1


def test_what_was_done_before_an_interruption_is_kept(tmp_path, monkeypatch):
    run = Sandbox.execute

    def interrupted(self, code, call):
        if code == "stop":
            raise KeyboardInterrupt
        return run(self, code, call)

    monkeypatch.setattr(Sandbox, "execute", interrupted)
    with Sandbox(LIMITS, kind="restricted", cache=tmp_path) as box:
        with pytest.raises(KeyboardInterrupt):
            box.run_many([returns("1"), "stop"], "f")
        monkeypatch.setattr(Sandbox, "execute", None)  # what is kept is not run again
        assert box.run(returns("1"), "f").value == 1


def test_a_cache_that_cannot_be_used_says_so_and_a_damaged_one_is_set_aside(tmp_path):
    damaged = "this is not a database, and it is long enough to be recognised " * 40
    (tmp_path / "sandbox.sqlite").write_text(damaged)
    Sandbox(cache=tmp_path, kind="restricted")
    [aside] = tmp_path.glob("sandbox.sqlite.damaged-*")
    assert aside.read_text() == damaged
    with pytest.raises(OSError, match=r"the cache cannot be used .* switch the cache off"):
        Sandbox(cache=aside / "below", kind="restricted")
