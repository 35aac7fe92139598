"""What any Python can do behind the kernel's walls: nothing to the machine, and nothing to another snippet.

The first part is made of whole families: each way to read an attribute, for each attribute that leads from a value to
the interpreter. A restricted Python was a wall against these once, and was left again and again. Now snippets may do
all of it.
"""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fast_cases import some

from maporl.datasets.tiny_programs import TinyPrograms
from maporl.environments.python import Python
from maporl.sandbox import sandbox as module
from maporl.sandbox.sandbox import Limits, Outcome, Sandbox, SandboxError, find_bubblewrap
from maporl.sandbox.sandboxed import kernel

BUBBLEWRAP, WHY_NOT = find_bubblewrap()
KINDS = ["restricted", pytest.param("bubblewrap", marks=pytest.mark.skipif(BUBBLEWRAP is None, reason=WHY_NOT))]
needs_filter = pytest.mark.skipif(kernel.filter_missing() is not None, reason=str(kernel.filter_missing()))
PROBE = (
    "import builtins, json, math, os, random, re, sys\ndef f():\n    return [math.floor(2.5), random.randint(0, "
    "9**9), json.dumps([1]), len(vars(builtins)), len(sys.modules), re.sub('a', 'b', 'aa'), str(print), "
    "sorted(os.environ), os.sep]"
)


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    with Sandbox(Limits(cpu_seconds=1, wall_seconds=20.0, memory_mb=160), kind=request.param, cache=False) as made:
        yield made


# values that lead out, each with the attributes that do so; two of each kind, because some ways compare them
VALUES = {
    "generator": ("def make():\n    yield 1\nx, y = make(), make()", ["gi_frame", "gi_code", "gi_yieldfrom"]),
    "coroutine": ("async def make(): pass\nx, y = make(), make()", ["cr_frame", "cr_code", "cr_await", "cr_origin"]),
    "async generator": ("async def make():\n    yield 1\nx, y = make(), make()", ["ag_frame", "ag_code", "ag_await"]),
    "traceback": (
        "class Keep:\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace):\n"
        "        self.trace = trace\n        return True\n"
        "with Keep() as one:\n    1 / 0\nwith Keep() as two:\n    1 / 0\nx, y = one.trace, two.trace",
        ["tb_frame", "tb_next", "tb_lasti"],
    ),
    "function": ("def x(): pass\ndef y(): pass", ["__globals__", "__code__", "__closure__", "__builtins__", "__class__"]),
    "error": ("x, y = AttributeError(obj=[]), AttributeError(obj=[])", ["obj", "__traceback__", "__context__"]),
    "class": ("class x: pass\nclass y: pass", ["mro", "__base__", "__subclasses__", "__dict__"]),
    "method": ("x, y = [].append, [].append", ["__self__", "__func__"]),
}  # fmt: skip
TEXT_FIELD = "(typing.NamedTuple('N', [({name!r}, object)]))"
WAYS = {
    "attribute": "def f(): return x.{name} and 'escaped'",
    "attribute of a call": "g = lambda: x\ndef f(): return g().{name} and 'escaped'",
    "keyword pattern": "def f():\n    match x:\n        case object({name}=z): return 'escaped'",
    "data class": (
        "import typing\nfrom dataclasses import dataclass\n@dataclass\nclass G(typing.Generator):\n    {name}: int\n"
        "    def send(self): pass\n    def throw(self): pass\nG.register(type(x))\n"
        "def f():\n    match x:\n        case G(z): return 'escaped'"
    ),
    "named tuple": (
        "import typing\nfrom collections import namedtuple\nclass G(namedtuple('N', ['{name}']), typing.Iterable): "
        "pass\nG.register(type(x))\ndef f():\n    match x:\n        case G(z): return 'escaped'"
    ),
    "typed named tuple": (
        "import typing\nclass G" + TEXT_FIELD + ": pass\ndef f():\n    match x:\n        case G(z): return 'escaped'"
    ),
    "field of a class": "class G:\n    __match_args__ = ('{name}',)\ndef f():\n    match x:\n        case G(z): return 'escaped'",
    "positional pattern": "def f():\n    match x:\n        case object('{name}'): return 'escaped'",
    "written comparison": (
        "import typing\nfrom dataclasses import dataclass\nG = dataclass" + TEXT_FIELD + "\n"
        "def f(): return G.__eq__(x, y) is not NotImplemented and 'escaped'"
    ),
    "written text": (
        "import typing\nfrom dataclasses import dataclass\nG = dataclass" + TEXT_FIELD + "\ndef f(): return G.__repr__(x) and 'escaped'"
    ),
    "written constructor": (
        "import typing\nfrom dataclasses import dataclass\nG = dataclass(frozen=False)" + TEXT_FIELD + "\n"
        "def f(): G.__init__(x, y); return 'escaped'"
    ),
    "str.format": "def f(): return '{{0.{name}}}'.format(x) and 'escaped'",
    "nested format": "def f(): return '{{0:{{1.{name}}}}}'.format(1, x) and 'escaped'",
    "computed format": "t = '{{0.{name}' + '}}'\ndef f(): return t.format(x) and 'escaped'",
    "format_map": "def f(): return '{{x.{name}}}'.format_map({{'x': x}}) and 'escaped'",
    "UserString": "from collections import UserString\ndef f(): return UserString('{{0.{name}}}').format(x) and 'escaped'",
    "f-string": "def f(): return f'{{x.{name}}}' and 'escaped'",
    "getattr": "def f(): return getattr(x, '{name}') and 'escaped'",
    "vars": "def f(): return vars(x)['{name}'] and 'escaped'",
    "attrgetter": "import operator\ndef f(): return operator.attrgetter('{name}')(x) and 'escaped'",
    "reduce": "import functools\ndef f(): return functools.reduce(getattr, ['{name}'], x) and 'escaped'",
    "assignment": "def f(): x.{name} = None; return 'escaped'",
    "deletion": "def f():\n    del x.{name}\n    return 'escaped'",
    "loop variable": "def f():\n    for x.{name} in [1]: return 'escaped'",
    "import from": "from functools import {name}\ndef f(): return 'escaped'",
}  # fmt: skip


def family(way):
    return {
        (value, name): f"{made}\n{WAYS[way].format(name=name)}"
        for value, (made, names) in VALUES.items()
        for name in names
    }


@pytest.mark.parametrize("way", some(WAYS, *range(0, len(WAYS), 3)))
def test_a_snippet_that_reaches_the_interpreter_changes_nothing_for_the_next(sandbox, way):
    before = sandbox.run(PROBE, "f")
    worker = sandbox.worker
    got_out = [sandbox.run(code, "f").value == "escaped" for code in family(way).values()]
    assert sandbox.run(PROBE, "f") == before and before.ok
    assert sandbox.worker is worker and len(got_out) == 27


def test_snippets_do_reach_the_interpreter(sandbox):
    """Nothing but the kernel is promised to hold them: the families get out where Python lets them."""
    reached = {
        way: sum(sandbox.run(code, "f").value == "escaped" for code in family(way).values())
        for way in ("attribute", "getattr")
    }
    assert reached == {"attribute": 16, "getattr": 16}


SPOIL = {
    "builtins": "import builtins\nfor name in list(vars(builtins)):\n    if name[0] != '_': setattr(builtins, name, None)",
    "modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None",
    "functions": "import math, random, json, re\nmath.floor = random.randint = json.dumps = re.sub = lambda *a: 13",
    "the worker's code": "import sandboxed.worker, sandboxed.snippet, os\nsandboxed.snippet.tell = os._exit = os.fork = None",
    "environment": "import os\nos.environ['A'] = 'b'\nos.putenv('C', 'd')",
    "memory": "import ctypes, math, random\nctypes.memset(id(math.floor), 0, 64)\nctypes.memset(id(random), 0, 64)",
    "garbage": "import gc\nfor thing in gc.get_objects():\n    if isinstance(thing, dict): thing.clear()",
    "every object": "import ctypes, gc\nfor thing in gc.get_objects(): ctypes.memset(id(thing), 255, 16)",
    "frames": "import sys\nframe = sys._getframe()\nwhile frame: frame.f_globals.clear(); frame = frame.f_back",
    "random state": "import random\nrandom.seed(5)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "at the end": "import atexit\natexit.register(lambda: 1 / 0)",
    "in a fork": "import os\nos.register_at_fork(before=lambda: 1 / 0)",
    "hooks": "import sys\nsys.addaudithook(lambda *a: 1 / 0)\nsys.settrace(lambda *a: None)",
}  # fmt: skip


@pytest.mark.parametrize("code", SPOIL.values(), ids=SPOIL)
def test_what_a_snippet_breaks_is_whole_for_the_next(sandbox, code):
    before = sandbox.run(PROBE, "f")
    worker = sandbox.worker
    sandbox.run(code, "f")
    sandbox.run_tests(code, ["f()"])
    assert sandbox.run(PROBE, "f") == before and before.ok
    assert sandbox.run_tests("def f(): return 1", ["assert f() == 1", "assert f() == 2"]) == [
        Outcome(None, "ok"), Outcome(None, "error:AssertionError"),
    ]  # fmt: skip
    assert sandbox.worker is worker


# makes the memory of the modules writable, and replaces modules there by the code of PAYLOAD
POISON = """
import ctypes, marshal, sys
archive = sys.meta_path[2]
address = ctypes.c_void_p.from_address(id(archive._memory) + 16).value
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
changed = libc.mprotect(address, len(archive._memory) + 4095 & ~4095, 3)
code = marshal.dumps(compile(PAYLOAD, "x", "exec"))
for name in ("colorsys", "pprint", "encodings.utf_16_be"):
    ctypes.memmove(address + archive._places[name][0], code, len(code))
"""
IMPORTED = "import colorsys, pprint\ndef f(): return [colorsys.rgb_to_hsv(1, 1, 1), pprint.pformat([1])]"
FORGED = 'import os\nos.write(3, b\'{"reason": "ok", "value": null, "message": ""}\\n\' * 3)\nos._exit(0)'


def test_what_a_snippet_writes_into_the_memory_of_modules_stays_there(sandbox):
    before = sandbox.run(IMPORTED, "f")
    assert before.value == [[0.0, 0.0, 1], "[1]"]
    attack = POISON.replace("PAYLOAD", "'forged = 1'")
    assert sandbox.run(attack + "import colorsys\ndef f(): return [changed, colorsys.forged]", "f").value == [0, 1]
    assert sandbox.run(IMPORTED, "f") == before
    # the tests of the same program import too, by a statement or because of an answer in another encoding
    answer = "import os\ndef f():\n    text = b''.join(b'\\0%c' % c for c in b'{\"value\": 7}')\n    os.write(5, len(text).to_bytes(4, 'big') + text)\n"
    for program in ("def f(): return 0", answer):
        tests = ["assert f() == 7", "import pprint\nassert f() == 7"]
        for code in (POISON.replace("PAYLOAD", repr(FORGED)) + program, program):
            assert [outcome.ok for outcome in sandbox.run_tests(code, tests, "import colorsys")] == [False, False]
    assert sandbox.run(IMPORTED, "f") == before


def test_no_memory_that_forks_share_can_be_made_writable():
    body = f"""
        import ctypes, sys
        sys.path.insert(0, {str(Path(module.__file__).parent)!r})
        from sandboxed.modules import load
        maps = open("/proc/self/maps")
        load()
        mprotect = ctypes.CDLL(None).mprotect
        mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        rows = [line.split() for line in maps]
        spans = [[int(end, 16) for end in row[0].split("-")] for row in rows if row[1][3] == "s"]
        modules = [row[1] for row in rows if "memfd:modules" in " ".join(row)]
        print(modules, [mprotect(start, end - start, 3) for start, end in spans if end - start])
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", textwrap.dedent(body)], capture_output=True, text=True)
    modules, _, results = done.stdout.rstrip().partition("] ")
    assert modules == "['r--p'" and set(results) <= set("[-1, ]"), done


# what is searched for never stands in the text of the search
SEARCH = """
import ctypes, os, re
libc = ctypes.CDLL(None)
libc.mremap.restype = ctypes.c_size_t
block = ctypes.create_string_buffer(5000)
def there(page, byte):
    # a byte of each page that is there can be written to the pipe; and a page can be moved to where it is
    if byte:
        return libc.write(2, ctypes.c_void_p(page << 12), ctypes.c_size_t(1)) == 1
    return libc.mremap(ctypes.c_void_p(page << 12), ctypes.c_size_t(4096), ctypes.c_size_t(4096), 0) == page << 12
def around(middle, byte):
    for step in (1, -1):
        page = (middle >> 12) - (step < 0)
        while byte and abs(page - (middle >> 12)) < 2048 or there(page, byte):
            if there(page, byte):
                yield ctypes.string_at(page << 12, 4096)
            page += step
def search(pattern, byte):
    places = (id([]), id(search), ctypes.addressof(block)) if byte else (ctypes.addressof(block),)
    return sorted({text.decode() for place in places for page in around(place, byte) for text in re.findall(pattern, page)})
mine = "-".join(["mark", "of", "mine"]) * 100
"""
MARKS = rb"mark-of-(?:mine|another|test|setup)"


@pytest.mark.parametrize("kind", KINDS)
def test_no_snippet_finds_another_ones_text_or_tests_or_verdict_in_its_memory(kind):
    limits = Limits(cpu_seconds=20, wall_seconds=60.0, output_bytes=1 << 22)
    test, setup = "assert f() == " + repr("mark-of-test" * 500), "x = " + repr("mark-of-setup" * 500)
    with Sandbox(limits, kind=kind, cache=False) as box:
        for number in range(5):
            box.run(f"x = 'mark-of-another' * {number}\ndef f(): return 'mark-of-another' * 500", "f")
            box.run_tests("def f(): return 'mark-of-another' * 500", [test] * 3, setup)
        assert box.run(SEARCH + f"def f(): return search({MARKS!r}, True)", "f").value == ["mark-of-mine"]
        tests = ["assert f() == ['mark-of-mine']", test]
        outcomes = box.run_tests(SEARCH + f"def f(): return search({MARKS!r}, False)", tests, setup)
        assert [outcome.reason for outcome in outcomes] == ["ok", "error:AssertionError"]


# -- what the kernel leaves a snippet's process ------------------------------------------------------------------------


def escaped(body, descriptor=3):
    """What ``body`` prints in a process that is locked in as a snippet's is, with any module loaded."""
    head = f"""
        import ctypes, errno, mmap, os, signal, socket, sys, threading
        from pathlib import Path
        sys.path.insert(0, {str(Path(module.__file__).parent)!r})
        from sandboxed.worker import SystemCallFilter, forbid_paths, lock_in
        os.dup2(1, 20)
        os.dup2(os.open(os.devnull, os.O_RDWR), 15)
        landlock = forbid_paths() if {descriptor == "landlock"} else None
        if landlock is None:
            lock_in({{3: 20}}, dict(cpu_seconds=2, memory_mb=1024), SystemCallFilter())
        def refused(action, *arguments):
            try:
                return False if action(*arguments) != -1 else ctypes.get_errno() or True
            except (OSError, RuntimeError, ValueError):
                return True
        def say(text):
            os.write({1 if descriptor == "landlock" else 3}, str(text).encode())
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    return done.stdout, done.returncode


@needs_filter
def test_escaped_code_reads_deletes_kills_and_starts_nothing(tmp_path):
    (tmp_path / "mine").write_text("mine")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        body = f"""
            mine = {str(tmp_path / "mine")!r}
            say([refused(action, *arguments) for action, *arguments in [
                (open, mine), (open, mine, "w"), (open, {str(tmp_path / "new")!r}, "w"), (os.remove, mine),
                (os.rename, mine, mine + "2"), (os.chmod, mine, 0), (os.truncate, mine, 0), (os.stat, mine),
                (os.listdir, "/"), (os.mkdir, mine + "d"), (os.symlink, "/", mine + "s"), (os.chdir, "/"), (os.readlink, "/proc/self/exe"),
                (os.kill, {bystander.pid}, 9), (os.kill, os.getppid(), 0), (os.killpg, 0, 9), (os.setpgid, 0, 0), (os.nice, 5),
                (os.fork,), (os.execv, sys.executable, [sys.executable]), (os.posix_spawn, "/bin/true", ["x"], {{}}),
                (threading.Thread(target=print).start,), (socket.socket,), (socket.socketpair,), (os.pipe,), (os.dup, 3),
                (os.read, 3, 1), (os.close, 3), (os.memfd_create, "x"), (os.fstat, 3), (os.lseek, 3, 0, 0),
                (signal.signal, signal.SIGXCPU, signal.SIG_IGN), (os.sched_setaffinity, 0, [0]),
                (mmap.mmap, -1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_EXEC),
            ]])
        """
        printed, status = escaped(body)
        assert status == 0 and printed == str([True] * 34)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert os.listdir(tmp_path) == ["mine"] and (tmp_path / "mine").read_text() == "mine"


@needs_filter
def test_every_system_call_but_those_of_computing_is_refused():
    allowed = kernel._CALLS[kernel.platform.machine()]
    probes = (335, 336) if kernel.platform.machine() == "x86_64" else ()  # of a tracer; by hand they end the process
    body = f"""
        libc = ctypes.CDLL(None, use_errno=True)
        outcomes = {{}}
        for number in range(600):
            if number not in {(*allowed.plain, allowed.mmap, allowed.mprotect, *probes)!r}:
                ctypes.set_errno(0)
                result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
                outcomes[number] = (result, ctypes.get_errno())
        say(len(outcomes) == {600 - len(allowed.plain) - 2 - len(probes)} and set(outcomes.values()) == {{(-1, errno.EPERM)}})
        for number in (0x40000000, 0x40000001, 0x40000208):  # x32
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
            say(ctypes.get_errno() == errno.EPERM)
    """
    assert escaped(body) == ("True" * 4, 0)


@needs_filter
def test_no_snippet_waits_for_a_lock_or_advises_the_kernel_about_memory():
    waits = {"x86_64": (202, 28), "aarch64": (98, 233)}[kernel.platform.machine()]
    body = (
        f"say([refused(ctypes.CDLL(None, use_errno=True).syscall, *call) for call in [({waits[0]}, 0, 0, 0), "
        f"({waits[1]}, 0, 0, 4)]])"
    )
    assert escaped(body) == (str([errno.EPERM] * 2), 0)


@pytest.mark.skipif(kernel.platform.machine() != "x86_64", reason="the 32-bit calls of x86")
@needs_filter
def test_the_calls_of_another_architecture_end_the_process():
    # int 0x80 with eax 20 is getpid for a 32-bit program; the page is made executable before the filter is there
    body = """
        say("before ")
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        say("after")
    """
    page = (
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))\n"
    )
    head = "import ctypes, mmap\n" + page
    code = head + "import os, sys\n" + f"sys.path.insert(0, {str(Path(module.__file__).parent)!r})\n"
    code += "from sandboxed.worker import SystemCallFilter, lock_in\nos.dup2(1, 20); os.dup2(0, 15)\n"
    code += "lock_in({3: 20}, dict(cpu_seconds=2, memory_mb=1024), SystemCallFilter())\n"
    code += "def say(text): os.write(3, text.encode())\n" + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert (done.stdout, done.returncode) == ("before ", -31)  # SIGSYS


@needs_filter
def test_landlock_takes_every_path_from_the_worker(tmp_path):
    (tmp_path / "mine").write_text("mine")
    body = f"""
        if not landlock:
            say("no Landlock")
        else:
            mine = {str(tmp_path / "mine")!r}
            say([refused(*action) for action in [
                (open, mine), (open, mine, "w"), (os.remove, mine), (os.listdir, "/"), (os.mkdir, mine + "d"),
                (os.rename, mine, mine + "2"), (os.execv, sys.executable, [sys.executable, "-c", "print('escaped')"]),
            ]])
    """
    printed, status = escaped(body, "landlock")
    if printed == "no Landlock":
        pytest.skip(printed)
    assert (printed, status) == (str([True] * 7), 0)
    assert (tmp_path / "mine").read_text() == "mine"


# -- a machine without these walls -------------------------------------------------------------------------------------


def test_nothing_runs_where_the_kernel_filters_no_system_calls(monkeypatch):
    monkeypatch.setattr(kernel, "filter_missing", lambda: "this kernel has no seccomp")
    monkeypatch.setenv("MAPORL_SANDBOX", "restricted")
    for make in (lambda: Sandbox(cache=False), lambda: Sandbox(cache=False, kind="restricted"), Python, TinyPrograms):
        with pytest.raises(
            SandboxError, match=r"its kernel could not hold one: this kernel has no seccomp\. Expected Linux on"
        ):
            make()


@needs_filter
def test_a_filter_that_the_kernel_refuses_stops_the_worker(monkeypatch):
    monkeypatch.setattr(
        module, "asdict", lambda limits: {"cpu_seconds": 1, "memory_mb": "much", "wall_seconds": 5, "output_bytes": 99}
    )
    box = Sandbox(kind="restricted", cache=False)
    with pytest.raises(SandboxError, match=r"the worker of the restricted sandbox did not start \(killed\)"):
        box.execute("def f(): return 1", "f")


def test_a_worker_that_ends_again_and_again_is_an_error_and_no_verdict(monkeypatch):
    with Sandbox(kind="restricted", cache=False) as box:
        connected = box._worker.connected

        def killed():
            end = connected()
            box.worker.kill()
            box.worker.wait()
            return end

        box.walls()
        with monkeypatch.context() as patch:
            patch.setattr(box._worker, "connected", killed)
            with pytest.raises(SandboxError, match="ended three times while it ran a program"):
                box.execute("def f(): return 1", "f")
        assert box.execute("def f(): return 1", "f") == Outcome(1, "ok")
