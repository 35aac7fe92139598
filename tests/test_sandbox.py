"""The sandbox against hostile snippets, with and without bubblewrap, and its cache."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from maporl.sandbox import sandbox as module
from maporl.sandbox.bubblewrap import bubblewrap_prefix, find_bubblewrap
from maporl.sandbox.outcomes import decode
from maporl.sandbox.sandbox import Limits, Outcome, Sandbox, SandboxError
from maporl.sandbox.sandboxed.kernel import filter_missing
from maporl.storage.disk_cache import DiskCache

LIMITS = Limits(cpu_seconds=1, wall_seconds=20.0, memory_mb=160, output_bytes=4096)
BUBBLEWRAP, WHY_NOT = find_bubblewrap()
needs_bubblewrap = pytest.mark.skipif(BUBBLEWRAP is None, reason=WHY_NOT)
KINDS = ["restricted", pytest.param("bubblewrap", marks=needs_bubblewrap)]


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    with Sandbox(LIMITS, kind=request.param, cache=False) as made:
        yield made


def returns(expression, before=""):
    """A snippet whose ``f`` returns ``expression``; ``before`` stands above it."""
    return f"{before}\ndef f():\n    return {expression}\n"


def state():
    """What a snippet must not change about this process."""
    return os.getcwd(), dict(os.environ), sorted(os.listdir("/proc/self/fd")), threading.active_count()


HOSTILE = {
    # network
    "import socket": ("import socket\nsocket.create_connection(('1.1.1.1', 53))", "forbidden"),
    "import urllib": ("from urllib.request import urlopen", "forbidden"),
    # files
    "read passwd": (returns("open('/etc/passwd').read()"), "forbidden"),
    "read the home folder": ("import pathlib\nlist(pathlib.Path.home().iterdir())", "forbidden"),
    "write a file": ("open('/tmp/escaped', 'w').write('x')", "forbidden"),
    "hide a refused call": ("try:\n    open('/etc/passwd')\nexcept BaseException:\n    pass\nf = lambda: 1", "forbidden"),
    "io": ("import io\nio.FileIO('/etc/passwd')", "forbidden"),
    "result pipe": ("import os\nfor fd in range(64):\n    os.write(fd, b'forged')", "forbidden"),
    "close descriptors": ("import os\nos.closerange(0, 256)", "forbidden"),
    # environment and processes
    "environment": (returns("dict(os.environ)", "import os"), "forbidden"),
    "subprocess": ("import subprocess\nsubprocess.run(['id'])", "forbidden"),
    "os.system": ("import os\nos.system('id')", "forbidden"),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "forbidden"),
    "multiprocessing": ("from multiprocessing import Process", "forbidden"),
    "threads": ("import threading\nthreading.Thread(target=print).start()", "forbidden"),
    "raw threads": ("import _thread", "forbidden"),
    "signals": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)", "forbidden"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "forbidden"),
    "os._exit": ("import os\nos._exit(0)", "forbidden"),
    "ctypes": ("import ctypes\nctypes.string_at(0)", "forbidden"),
    "mmap": ("import mmap", "forbidden"),
    "sleep": ("import time\ntime.sleep(1e9)", "forbidden"),
    "input": (returns("input()"), "forbidden"),
    # ways to import
    "__import__": ("__import__('os').system('id')", "forbidden"),
    "importlib": ("import importlib\nimportlib.import_module('os')", "forbidden"),
    "sys.modules": ("import sys\nsys.modules['os'].system('id')", "forbidden"),
    "relative import": ("from . import worker", "forbidden"),
    "dotted import": ("import collections.abc", "forbidden"),
    "import into builtins": ("import math as __builtins__", "forbidden"),
    "modules of modules": (returns("random._os.environ", "import random"), "forbidden"),
    "sys of dataclasses": (returns("dataclasses.sys.path", "import dataclasses"), "error:AttributeError"),
    "reloaded by name": (returns("get_type_hints", "from typing import get_type_hints"), "error:ImportError"),
    "formatter": (returns("Formatter().get_field('0.__class__', [1], {})", "from string import Formatter"), "error:ImportError"),
    "evaluating annotations": (returns("functools.singledispatch(f)", "import functools"), "error:AttributeError"),
    # strings as code
    "eval": (returns("eval('1 + 1')"), "forbidden"),
    "exec": ("exec('import os')", "forbidden"),
    "compile": ("compile('1', '', 'eval')", "forbidden"),
    # objects that lead to the interpreter
    "subclasses": (returns("().__class__.__base__.__subclasses__()"), "forbidden"),
    "full-width letters": (returns("().__ｃｌａｓｓ__"), "forbidden"),
    "globals of a function": (returns("f.__globals__"), "forbidden"),
    "builtins": (returns("__builtins__"), "forbidden"),
    "loader": (returns("__loader__"), "forbidden"),
    "globals()": (returns("globals()"), "forbidden"),
    "getattr": (returns("getattr((), '__cl' + 'ass__')"), "forbidden"),
    "setattr": ("setattr(print, 'x', 1)", "forbidden"),
    "getattr in a fold": ("import functools\nfunctools.reduce(getattr, ['__class__'], ())", "forbidden"),
    "generator frame": (returns("(x for x in ()).gi_frame.f_back.f_globals"), "forbidden"),
    "coroutine frame": ("async def g(): pass\ng().cr_frame", "forbidden"),
    "traceback frame": ("try:\n    1 / 0\nexcept ArithmeticError as e:\n    e.__traceback__.tb_frame", "forbidden"),
    "object of an error": ("try:\n    ().x\nexcept AttributeError as e:\n    e.obj", "forbidden"),
    "str.format": (returns("'{0.__class__}'.format(1)"), "forbidden"),
    "nested str.format": (returns("'{0:{1.__class__}}'.format(1, 2)"), "forbidden"),
    "str.format of a variable": (returns("t.format(1)", "t = '{0.__cla' + 'ss__}'"), "forbidden"),
    "str.format unbound": (returns("str.format('{0.__class__}', 1)"), "forbidden"),
    "format_map": (returns("'{x.__class__}'.format_map({'x': 1})"), "forbidden"),
    "f-string": (returns("f'{().__class__}'"), "forbidden"),
    "class by type()": (returns("type('X', (), {'__del__': print})"), "forbidden"),
    "class of a class": (returns("type(type(1))('X', (), {})"), "forbidden"),
    "metaclass": ("class X(metaclass=print): pass", "forbidden"),
    "mro": (returns("int.mro()"), "forbidden"),
    "decorator": ("@__import__\nclass os: pass", "forbidden"),
    "decorator by lambda": ("@lambda c: c.__subclasses__()\nclass X: pass", "forbidden"),
    "match class pattern": ("match 1:\n    case int(__class__=c):\n        pass", "forbidden"),
    "match pattern names": ("class X:\n    __match_args__ = ('__class__',)", "forbidden"),
    "getattribute": ("class X:\n    def __getattribute__(self, name): return 1", "forbidden"),
    "finaliser": ("class X:\n    def __del__(self): print(1)", "forbidden"),
    "pickle": ("import pickle\npickle.loads(b'cos\\nsystem\\n(S\"id\"\\ntR.')", "forbidden"),
    "patch json": ("import json\njson.dumps = None", "forbidden"),
    # ways to leave
    "sys.exit": ("import sys\nsys.exit(0)", "forbidden"),
    "exit": ("exit()", "error:NameError"),
    "SystemExit": ("raise SystemExit(0)", "error:SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "error:KeyboardInterrupt"),
    "own BaseException": ("class Own(BaseException): pass\nraise Own", "error:BaseException"),
    "error with a borrowed name": ("class ValueError(KeyError): pass\nraise ValueError", "error:KeyError"),
    "error with a hostile text": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\n    __repr__ = __str__\nraise E", "error:Exception",
    ),
    "division by zero": (returns("1 / 0"), "error:ZeroDivisionError"),
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
    "false class": ("class X:\n    @property\n    def __class__(self): return int\nf = X", "forbidden"),
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


@pytest.mark.parametrize(("code", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_snippets_get_their_reason_and_nothing_else(sandbox, code, reason):
    assert sandbox.run("def f(): return 41", "f") == Outcome(41, "ok")
    before = state()
    assert sandbox.run(code, "f") == Outcome(None, reason)
    assert state() == before
    assert sandbox.run("def f(): return 42", "f") == Outcome(42, "ok")


ORDINARY = {
    "integer": (returns("3"), 3),
    "minus one": (returns("-1"), -1),
    "zero": (returns("0"), 0),
    "float": (returns("2.5"), 2.5),
    "whole float": (returns("4.0"), 4.0),
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
                  "from __future__ import annotations\nfrom dataclasses import dataclass, asdict\nfrom typing import List\n"
                  "@dataclass\nclass P:\n    x: int\n    y: int = 5\n    z: List[int] = ()"), 5),
    "named tuple": (returns("P(1, 2)._replace(x=3).x", "from collections import namedtuple\nP = namedtuple('P', 'x y')"), 3),
    "class": (returns("(B(2) + B(3)).v", "class A:\n    def __init__(self, v): self.v = v\n    def __add__(self, o): return B(self.v + o.v)\n"
              "class B(A):\n    def __init__(self, v): super().__init__(v)"), 5),
    "memo": (returns("g(50)", "import functools\n@functools.lru_cache(None)\ndef g(n): return n if n < 2 else g(n - 1) + g(n - 2)"), 12586269025),
    "error caught": ("def f():\n    try:\n        return 1 / 0\n    except ZeroDivisionError as e:\n        return type(e).__name__", "ZeroDivisionError"),
    "main guard": ("def f(): return 1\nif __name__ == '__main__':\n    f = None", 1),
    "match": ("def f():\n    match {'k': [1, 2]}:\n        case {'k': [a, int(b)]}:\n            return a + b", 3),
    "seeded": (returns("random.randint(0, 10 ** 9)", "import random"), 906691059),
}  # fmt: skip


@pytest.mark.parametrize(("code", "value"), ORDINARY.values(), ids=ORDINARY.keys())
def test_ordinary_snippets_return_their_value(sandbox, code, value):
    outcome = sandbox.run(code, "f")
    assert outcome == Outcome(value, "ok") and outcome.ok
    assert type(outcome.value) is type(value)


def test_nothing_a_snippet_changes_is_there_for_the_next(sandbox):
    spoil = (
        "import math, random, re, collections\nfrom fractions import Fraction\n"
        "math.floor = random.random = lambda *a: 13\nFraction.limit_denominator = None\nrandom.seed(5)\nf = lambda: math.floor(1)"
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
def test_waiting_is_limited_too_and_the_whole_group_is_killed(kind):
    with Sandbox(Limits(cpu_seconds=3600, wall_seconds=0.3), kind=kind, cache=False) as box:
        first = box.run(returns("0"), "f")
        worker = box.worker
        assert (first.reason, box.run("while True: pass", "f").reason) == ("ok", "timeout")
        assert worker.poll() is not None
        assert box.run(returns("1"), "f").value == 1
        assert box.worker is not worker


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_died_is_replaced_and_no_snippet_blamed(kind):
    with Sandbox(LIMITS, kind=kind, cache=False) as box:
        assert box.run(returns("1"), "f").value == 1
        box.worker.kill()
        box.worker.wait()
        assert box.run(returns("2"), "f").value == 2


def test_a_fork_made_while_another_thread_runs_a_snippet_has_a_sandbox_of_its_own():
    with Sandbox(Limits(cpu_seconds=5, wall_seconds=2), kind="restricted", cache=False) as box:
        box.walls()
        thread = threading.Thread(target=box.run, args=("while True: pass", "f"))
        thread.start()
        while not box._lock.locked():
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
            patch.setattr(module, "receive", interrupt)
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
def test_a_verdict_that_no_worker_writes_is_no_verdict(payload):
    whole = payload.removesuffix(b"}") + b', "printed": "", "message": ""}' if payload.endswith(b"}") else payload
    assert decode(b'{"reason": "ok", "value": 1, "printed": "", "message": ""}') == Outcome(1, "ok")
    assert decode(whole) == decode(payload) == Outcome(None, "killed")


# -- the walls behind the language: what a snippet could do that had got out of it ---------------------------------------

ESCAPED = {
    "read": "open('/etc/passwd')",
    "list": "import os; os.listdir('/')",
    "socket": "import socket; socket.socket()",
    "process": "import os; os.system('id')",
    "fork": "import os; os.fork()",
    "import": "import http.client",
    "kill": "import os; os.kill(os.getppid(), 9)",
    "ctypes": "import ctypes; ctypes.CDLL(None)",
}
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
    head = f"import resource, sys; sys.path.insert(0, {str(Path(module.__file__).parent)!r}); from sandboxed.worker import *; import socket"
    return subprocess.run(
        [sys.executable, "-S", "-c", f"{head}\n{body}"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("code", ESCAPED.values(), ids=ESCAPED.keys())
def test_the_audit_hook_ends_a_process_that_got_past_the_language(code):
    body = f"try:\n    arm(reporter(1, 999))\n    exec({code!r})\nfinally:\n    os.write(1, b'escaped')"
    said = {"printed": "", "message": ""}
    assert json.loads(in_the_worker(body).stdout) == {"reason": "forbidden", "value": None, **said}


@pytest.mark.parametrize("code", KERNEL.values(), ids=KERNEL.keys())
def test_the_kernel_refuses_a_process_that_got_past_both(code):
    # descriptor 3 stands for the pipe of the verdict, the only one that is left open to write to
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
    with pytest.raises(SandboxError, match=r"needs POSIX resource limits, which .* lacks; use Linux"):
        Sandbox(cache=False)
    with pytest.raises(ValueError, match=r"Limits\.memory_mb: expected at least 64, got 1"):
        Limits(memory_mb=1)


def test_a_worker_that_does_not_start_is_an_error(monkeypatch):
    box = Sandbox(kind="restricted", cache=False)
    box.command = [sys.executable, "-c", "raise SystemExit(3)", "code", "folder"]
    with pytest.raises(SandboxError, match="the worker of the restricted sandbox did not start"):
        box.run("x = 1", "f")


def test_the_kind_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(module, "find_bubblewrap", lambda: (None, "none for this test"))
    with caplog.at_level("INFO"):
        for _ in range(3):
            Sandbox(cache=False)
    said = f"none for this test; {filter_missing() or 'system calls are filtered'}"
    assert [r.getMessage() for r in caplog.records] == [f"sandbox for untrusted code: restricted ({said})"]


# -- the cache ------------------------------------------------------------------------------------------------------------


def test_verdicts_are_kept_by_content_and_timeouts_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    codes = [returns("-1"), returns("None"), "while True: pass", None, returns("-1"), "open('x')"]
    limits = Limits(cpu_seconds=5, wall_seconds=0.3)
    expected = [Outcome(-1, "ok"), Outcome(None, "no_value"), Outcome(None, "timeout"), Outcome(None, "source")]
    expected += [expected[0], Outcome(None, "forbidden")]
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
