"""Families of escapes from the sandbox's language, and what the kernel refuses to code that has escaped.

The first part is made of whole families: each way to read an attribute, for each attribute that leads out. A snippet that
gets the attribute returns "escaped".
"""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from maporl.sandbox import sandbox as module
from maporl.sandbox.bubblewrap import find_bubblewrap
from maporl.sandbox.sandbox import VARIABLE, Limits, Outcome, Sandbox, SandboxError
from maporl.sandbox.sandboxed import kernel
from maporl.sandbox.sandboxed.language import MODULES, SELF_MATCHING, safe_modules

BUBBLEWRAP, WHY_NOT = find_bubblewrap()
KINDS = ["restricted", pytest.param("bubblewrap", marks=pytest.mark.skipif(BUBBLEWRAP is None, reason=WHY_NOT))]
needs_filter = pytest.mark.skipif(kernel.filter_missing() is not None, reason=str(kernel.filter_missing()))


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
        "import typing\nfrom collections import namedtuple\nclass G(namedtuple('N', ['{name}']), typing.Iterable): pass\n"
        "G.register(type(x))\ndef f():\n    match x:\n        case G(z): return 'escaped'"
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


def test_the_families_hold_more_than_six_hundred_snippets():
    assert len({code for way in WAYS for code in family(way).values()}) == 25 * 27 == 675


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_an_attribute_that_leads_out(sandbox, way):
    # a way that Python itself does not know for a value, such as a field named __class__, ends in Python's error
    outcomes = {which: sandbox.run(code, "f") for which, code in family(way).items()}
    got_out = {which: outcome for which, outcome in outcomes.items() if outcome.value is not None}
    assert not got_out
    reasons = {outcome.reason for outcome in outcomes.values()}
    assert "forbidden" in reasons and reasons <= {
        "forbidden",
        "error:ImportError",
        "error:ValueError",
        "error:TypeError",
    }
    assert sandbox.run("def f(): return 42", "f") == Outcome(42, "ok")


def test_the_families_get_out_where_nothing_holds_them():
    """The families are real: without the language's rules, ordinary Python lets most of them through."""
    ways = (
        "attribute",
        "keyword pattern",
        "data class",
        "named tuple",
        "str.format",
        "format_map",
        "getattr",
        "written text",
    )
    escaped = dict.fromkeys(ways, 0)
    for way in ways:
        for code in family(way).values():
            namespace = {}
            try:
                exec(code, namespace)
                escaped[way] += namespace["f"]() == "escaped"
            except (AttributeError, TypeError, ValueError):  # this value has no such attribute here
                pass
    assert all(count >= 5 for count in escaped.values()), escaped


LYING = "import typing\nfrom dataclasses import dataclass, replace\n"
TEXT_CLASS = LYING + (
    "class S(str):\n    told = 0\n    def startswith(self, *a): return False\n    def __hash__(self): return 5\n"
    "    def __eq__(self, other): return self is other\n"
    "    def __str__(self):\n        self.told += 1\n        return {says} if self.told == {when} else 'x'\n"
    "escapes = []\nclass T: pass\n"
)
SOURCE = "'x=escapes.append(().__class__.__base__);self.x'"
KEPT = (
    "from functools import cached_property\nfrom dataclasses import dataclass, asdict, replace\nran = []\nclass Y: pass\n"
    "@dataclass\nclass D:\n    v: object\n"
    "def put(name, value):\n    class X:\n        a = cached_property(lambda self: value)\n"
    "    X.a.attrname = name\n    x = X()\n    x.a\n    return x\n"
    "class Written(cached_property):\n    attrname = '__deepcopy__'\n    def __init__(self): self.func = lambda s: ran.append\n"
)
STATE = "asdict(D(put('__reduce_ex__', lambda p: (lambda: Y, (), (None, {{{name!r}: lambda *a: ran.append(a)}})))))"
MADE_SOURCE = {
    **{
        f"name that is source at its text {n}": TEXT_CLASS.format(says=SOURCE, when=n)
        + "def f():\n    G = dataclass(typing.NamedTuple('N', [(S('x'), int)]), repr=False, eq=False)\n"
        "    G.__init__(T(), 1)\n    return escapes and 'escaped'"
        for n in range(2, 12)
    },
    **{
        f"name that is source at its text {n}, as a keyword": TEXT_CLASS.format(says=SOURCE, when=n)
        + "def f():\n    G = dataclass(typing.NamedTuple('N', **{S('x'): int}), repr=False, eq=False)\n"
        "    G.__init__(T(), 1)\n    return escapes and 'escaped'"
        for n in range(2, 12)
    },
    "name that is another when compared": TEXT_CLASS.format(says="'x'", when=0)
    + "def x(): yield 1\nG = dataclass(typing.NamedTuple('N', [(S('gi_frame'), object)]))\ndef f(): return 'escaped'",
    **{
        f"full-width name {name}": LYING
        + f"def x(): yield 1\nG = dataclass(init=False)(typing.NamedTuple('N', [({name!r}, object)]))\n"
        "def f(): return G.__eq__(x(), x()) is not NotImplemented and 'escaped'"
        for name in ("\uff47i_frame", "gi\uff3fcode", "g\uff49_\uff46rame")
    },
    "what only looks like a data class": LYING
    + "class Fake:\n    def __call__(self): pass\ndef f(): return dataclass(Fake()) and 'escaped'",
    "a data class that is a function": LYING + "def f(): return dataclass(f) and 'escaped'",
    **{
        f"state with {name}": KEPT
        + "def f():\n    "
        + STATE.format(name=name)
        + "\n    try:\n        Y().z\n    except AttributeError:\n        pass\n    return ran and 'escaped'"
        for name in ("__del__", "__getattr__", "__getattribute__")
    },
    **{
        f"kept under {name}": KEPT + f"def f():\n    asdict(D(put({name!r}, ran.append)))\n    return ran and 'escaped'"
        for name in ("__deepcopy__", "__reduce_ex__", "__dict__", "__class__")
    },
    "kept by a derived class": KEPT
    + "class X:\n    a = Written()\ndef f():\n    x = X()\n    x.a\n    asdict(D(x))\n    return 'escaped'",
    "what only looks like a field": KEPT + "class F:\n    _field_type = None\n    init = True\n    name = '__class__'\n"
    "@dataclass\nclass E:\n    v: object = 1\n    a = cached_property(lambda self: {'q': F()})\n"
    "E.a.attrname = '__dataclass_fields__'\nclass G(E):\n    def __init__(self, **k): ran.append(k)\n"
    "def f():\n    g = G()\n    g.a\n    replace(g)\n    return len(ran) > 1 and ran[1] and 'escaped'",
    "a docstring that is a signature": "from dataclasses import dataclass\nran = []\nclass P:\n    @property\n"
    "    def q(self): ran.append(1)\np = P()\nclass A:\n    'A(a=p.q)\\n--\\n\\n'\n@dataclass(init=False)\nclass B(A):\n"
    "    x: int\ndef f(): return ran and 'escaped'",
}


def test_no_source_and_no_special_name_is_made_of_a_snippets_texts(sandbox):
    """What Python's own library writes as source, or looks up by a name, is not a snippet's to choose."""
    outcomes = {which: sandbox.run(code, "f") for which, code in MADE_SOURCE.items()}
    assert len(outcomes) == 36
    assert not {which: outcome for which, outcome in outcomes.items() if outcome.value == "escaped"}
    assert {outcome.reason for outcome in outcomes.values()} <= {
        "forbidden", "ok", "error:TypeError", "error:AttributeError", "error:ValueError"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["flags", "traps"])
def test_no_snippet_gets_what_reads_memory_that_is_another_objects(sandbox, name):
    ways = (f"decimal.Context().{name}", f"(lambda c: c.copy().{name})(decimal.getcontext())")
    pattern = f"import decimal\ndef f():\n    match decimal.Context():\n        case object({name}=x): return 1"
    codes = [f"import decimal\nkept = {way}\ndef f(): return 1" for way in ways] + [pattern]
    assert [sandbox.run(code, "f").reason for code in codes] == ["forbidden"] * 3


def test_cached_properties_of_snippets_behave_as_pythons(sandbox):
    code = (
        "from functools import cached_property\nclass X:\n    n = 0\n    @cached_property\n"
        "    def a(self):\n        self.n += 1\n        return self.n\n"
        "def f():\n    x, y = X(), X()\n    seen = [x.a, x.a, y.a]\n    x.a = 7\n    seen.append(x.a)\n    del x.a\n"
        "    seen.append(x.a)\n    del x.a\n    try:\n        del x.a\n    except AttributeError:\n        seen.append('none')\n    return seen"
    )
    assert sandbox.run(code, "f") == Outcome([1, 1, 1, 7, 2, "none"], "ok")


BINDINGS = {
    "assignment": "{name} = G",
    "unpacking": "{name}, other = G, 1",
    "walrus": "({name} := G)",
    "annotated": "{name}: object = G",
    "function": "def {name}(): pass\n{name} = G",
    "class": "class {name}(G): pass",
    "import": "import math as {name}",
    "import from": "from math import pi as {name}",
    "loop": "for {name} in [G]: pass",
    "comprehension": "[{name} for {name} in [G]]",
    "with": "with G() as {name}: pass",
    "handler": "try:\n    1 / 0\nexcept ArithmeticError as {name}: pass",
    "capture": "match G:\n    case {name}: pass",
    "star": "match [G]:\n    case [*{name}]: pass",
    "rest": "match {{}}:\n    case {{**{name}}}: pass",
    "alternative": "match G:\n    case object() as {name}: pass",
    "global": "def g():\n    global {name}\n    {name} = G\ng()",
    "argument": "def g({name}): pass",
    "lambda": "g = lambda {name}: 1",
    "star argument": "def g(*{name}): pass",
    "deletion": "{name} = G\ndel {name}",
}
CLASS = (
    "class G:\n    x = 5\n    def __enter__(self): return G\n    def __exit__(self, *e): pass\n"
    "def f():\n    match 3:\n        case {name}(z): return 'escaped'\n"
)


@pytest.mark.parametrize("name", sorted(SELF_MATCHING))
def test_a_pattern_with_a_position_takes_a_builtin_class_that_nothing_renames(sandbox, name):
    codes = [CLASS.format(name=name) + binding.format(name=name) for binding in BINDINGS.values()]
    assert [sandbox.run(code, "f").reason for code in codes] == ["forbidden"] * len(BINDINGS)
    plain = f"def f():\n    match {name}():\n        case {name}(x): return x == {name}()"
    assert sandbox.run(plain, "f") == Outcome(True, "ok")


def test_no_module_that_a_snippet_imports_whole_renames_such_a_class():
    offered = safe_modules(print)
    assert offered.keys() == MODULES.keys()
    assert not {name for stand_in in offered.values() for name in vars(stand_in)} & SELF_MATCHING


# -- an outcome is a function of the text ---------------------------------------------------------------------------------

CLOCK = [
    "datetime.datetime.now()", "datetime.datetime.utcnow()", "datetime.datetime.today()", "datetime.date.today()",
    "datetime.datetime.now(datetime.timezone.utc)", "(lambda d: d.now)(datetime.datetime)()", "id([])",
]  # fmt: skip
RANDOM = [
    "random.random()", "random.Random().random()", "(random.seed(), random.random())", "(random.seed(None), random.random())",
    "random.Random(None).getrandbits(64)", "list(random.randbytes(8))", "random.sample(range(10 ** 6), 3)",
    "(lambda r: (r.seed(), r.random()))(random.Random(3))", "(lambda r: (super(random.Random, r).seed(), r.random()))(random.Random(3))",
    "statistics.NormalDist().samples(2)",
    "str(datetime.datetime.fromtimestamp(0))", "hash('text')", "list({'a', 'b', 'c', 'd'})",
]  # fmt: skip
HEAD = "import datetime, random, statistics\ndef f(): return str({})"


def test_a_snippet_has_no_clock(sandbox):
    assert [sandbox.run(HEAD.format(code), "f").reason for code in CLOCK] == ["forbidden"] * len(CLOCK)
    assert sandbox.run("from random import SystemRandom", "f").reason == "error:ImportError"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_random_is_the_same_in_every_worker(sandbox, kind):
    codes = [HEAD.format(code) for code in RANDOM]
    with Sandbox(kind=kind, cache=False) as other:
        outcomes = other.run_many(codes, "f")
    assert outcomes == sandbox.run_many(codes, "f")
    assert [outcome.reason for outcome in outcomes] == ["ok"] * len(codes)
    assert outcomes[0].value == outcomes[1].value == "0.8444218515250481"  # Python's first number of seed 0
    assert outcomes[10].value == "1970-01-01 00:00:00"


# -- code that has escaped the language: what the kernel leaves it ---------------------------------------------------------


def escaped(body, descriptor=kernel.VERDICT):
    """What ``body`` prints in a process that is locked in as a snippet's is, but runs any Python with any module loaded."""
    head = f"""
        import ctypes, errno, mmap, os, signal, socket, sys, threading
        from pathlib import Path
        sys.path.insert(0, {str(Path(module.__file__).parent)!r})
        from sandboxed.worker import Worker, SystemCallFilter, forbid_paths
        os.dup2(1, 9)
        landlock = forbid_paths() if {descriptor == "landlock"} else None
        if landlock is None:
            limits = dict(cpu_seconds=2, memory_mb=1024, output_bytes=9999)
            Worker(limits, SystemCallFilter(), print, print, {{}})._lock_in(9)
        def refused(action, *arguments):
            try:
                return False if action(*arguments) != -1 else ctypes.get_errno() or True
            except (OSError, RuntimeError, ValueError):
                return True
        def say(text):
            os.write({1 if descriptor == "landlock" else kernel.VERDICT}, str(text).encode())
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
                (os.write, 0, b"x"), (os.write, 1, b"x"), (os.write, 2, b"x"), (os.read, 0, 1), (os.memfd_create, "x"),
                (os.urandom, 8), (os.getrandom, 8), (signal.signal, signal.SIGXCPU, signal.SIG_IGN), (os.sched_setaffinity, 0, [0]),
                (mmap.mmap, -1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_EXEC),
            ]])
        """
        printed, status = escaped(body)
        assert status == 0 and printed == str([True] * 36)
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
def test_escaped_code_does_not_wait_and_says_no_more_than_it_may():
    # it neither sleeps in the kernel nor advises it about memory, and a payload beyond the limit does not count as a verdict
    waits = {"x86_64": (202, 28), "aarch64": (98, 233)}[kernel.platform.machine()]
    body = f"say([refused(ctypes.CDLL(None, use_errno=True).syscall, *call) for call in [({waits[0]}, 0, 0, 0), ({waits[1]}, 0, 0, 4)]])"
    assert escaped(body) == (str([errno.EPERM] * 2), 0)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(module.__file__).parent)!r})\n"
        "from sandboxed import worker\n"
        "class Escaped(worker.Worker):\n    def run_snippet(self, request, descriptor):\n"
        '        worker.os.write(descriptor, b\'{"reason": "ok", "value": "\' + b\'x\' * 9999 + b\'"}\')\n'
        "        worker.os._exit(0)\n"
        "print(Escaped(dict(wall_seconds=60, output_bytes=4096), None, print, print, {}).answer(b''))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == """b'{"reason": "killed", "value": null, "printed": "", "message": ""}'\n"""


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
    code += "from sandboxed.worker import Worker, SystemCallFilter\nos.dup2(1, 9)\n"
    code += "Worker(dict(cpu_seconds=2, memory_mb=1024, output_bytes=9), SystemCallFilter(), print, print, {})._lock_in(9)\n"
    code += f"def say(text): os.write({kernel.VERDICT}, text.encode())\n" + textwrap.dedent(body)
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


# -- a machine without these walls ------------------------------------------------------------------------------------------


def test_no_machine_falls_back_to_the_restricted_python_alone(monkeypatch):
    monkeypatch.setattr(module, "find_bubblewrap", lambda: (None, "bwrap is not in PATH"))
    monkeypatch.setattr(kernel, "filter_missing", lambda: "darwin has no seccomp")
    with pytest.raises(
        SandboxError,
        match=r"bwrap is not in PATH; darwin has no seccomp\. Install bubblewrap, or set MAPORL_SANDBOX=restr",
    ):
        Sandbox(cache=False)
    monkeypatch.setenv(VARIABLE, "restricted")
    with Sandbox(cache=False) as box:
        assert box.run("def f(): return 3", "f") == Outcome(3, "ok")
    monkeypatch.setenv(VARIABLE, "none")
    with pytest.raises(SandboxError, match="MAPORL_SANDBOX: expected auto, bubblewrap or restricted, got 'none'"):
        Sandbox(cache=False)
    monkeypatch.setenv(VARIABLE, "bubblewrap")
    with pytest.raises(SandboxError, match="kind='bubblewrap' was asked for, but bwrap is not in PATH"):
        Sandbox(cache=False)


@needs_filter
def test_a_filter_that_the_kernel_refuses_stops_the_worker(monkeypatch):
    monkeypatch.setattr(
        module, "asdict", lambda limits: {"cpu_seconds": 1, "memory_mb": "much", "wall_seconds": 5, "output_bytes": 99}
    )
    box = Sandbox(kind="restricted", cache=False)
    with pytest.raises(SandboxError, match=r"the worker of the restricted sandbox did not start \(killed\)"):
        box.execute("def f(): return 1", "f")
