"""Tests of a program, in another process than the program: calls go in, values come out.

A test that ran beside a program would hand it what it expects: an object of the program may look at whatever it is
compared with, say that it is equal, and return what it saw at the next call. Here the tests are Python of their own
fork. A name that they do not know is the program's: it is asked for there, and so is everything that is done with what
has no plain value, such as an instance of a class of the program. The program sees what is asked for, with the
arguments of its calls, and nothing else of a test. What a test goes through is fetched whole before the test sees any
of it, so that how far the test would go tells nothing. A test sees values that were plain data on their way, and
:class:`Remote` things, which are equal to themselves only.
"""

import builtins
import json
import operator
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

from .snippet import (
    Unusable,
    builtin_name,
    compiled,
    last_line,
    module_of_snippet,
    read_json,
    tell,
    write_frame,
)  # fmt: skip
from .values import decode, encode

CALLS, REPLIES = 4, 5
"""The descriptors of the pipes between the two forks: the first to the program, the second to its tests."""
LOADED = 0
"""The frame with which the program says that it is there, in the place of a value."""

LONGEST = 16
"""An answer may be so many times as long as what a program may print, because a value may be a long list of numbers."""
MOST_VALUES = 100_000
"""What a test goes through may have so many values. An endless generator has more."""

ENDINGS = ("syntax", "memory", "output")
"""Why a program can do nothing more for its tests, as it says itself."""


def _all(thing: Any) -> list[Any]:
    values = list(islice(thing, MOST_VALUES + 1))
    if len(values) > MOST_VALUES:
        raise RuntimeError(f"it has more than {MOST_VALUES} values, or does not end; take single ones with next()")
    return values


ACTS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *values, **named: function(*values, **named),
    "getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "setitem": operator.setitem,
    "delitem": operator.delitem, "len": len, "bool": bool, "str": str, "repr": repr,
    "all": _all, "next": next,
}  # fmt: skip
"""What tests can do with things of the program."""


# -- the program's side ------------------------------------------------------------------------------------------------


def serve_program(asked: dict[str, Any], limits: dict[str, Any]) -> NoReturn:
    """Import ``code`` as a module named ``program``, say how that went, and do what the tests ask until they end."""
    namespace = module_of_snippet("program")
    things: list[Any] = []
    numbers: dict[int, int] = {}

    def keep(value: Any) -> dict[str, int]:
        """Write a thing by its number, which is the same each time; what is kept stays, so that no other gets its
        address."""
        if id(value) not in numbers:
            numbers[id(value)] = len(things)
            things.append(value)
        return {"thing": numbers[id(value)]}

    def answer(act: str, values: list[Any], named: dict[str, Any]) -> dict[str, Any]:
        try:
            if act == "load":
                try:
                    exec(compiled(values[0]), namespace)
                except SystemExit as error:  # a script that ends in good order has defined what it defines
                    if error.code not in (None, 0):
                        raise
                return {"value": LOADED}
            if act == "name":
                if values[0] not in namespace:
                    raise NameError(f"name {values[0]!r} is not defined")
                return {"value": encode(namespace[values[0]], keep)}
            positional = [decode(value, lambda record: things[record["thing"]]) for value in values]
            others = {name: decode(value, lambda record: things[record["thing"]]) for name, value in named.items()}
            return {"value": encode(ACTS[act](*positional, **others), keep)}
        except Unusable as error:
            return {"ended": "syntax", "message": str(error)}
        except MemoryError:
            return {"ended": "memory", "message": ""}
        except BaseException as error:
            arguments = [encode(argument, lambda value: "?") for argument in error.args]
            return {"error": builtin_name(type(error)), "arguments": arguments, "message": last_line(error)}

    act: str = "load"
    values: list[Any] = [asked["code"]]
    named: dict[str, Any] = {}
    while True:
        try:
            payload = json.dumps(answer(act, values, named)).encode()
        except MemoryError:
            payload = b'{"ended": "memory", "message": ""}'
        except RecursionError:
            payload = b'{"error": "RecursionError", "arguments": [], "message": "RecursionError"}'
        if len(payload) > LONGEST * limits["output_bytes"] + 100:
            payload = b'{"ended": "output", "message": ""}'
        write_frame(REPLIES, payload)
        act, values, named = read_json(CALLS)


# -- the tests' side ---------------------------------------------------------------------------------------------------


class Remote:
    """A thing of the program that is not a plain value.

    What is done with it is done there. It is equal to itself only.
    """

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Callable[..., Any], number: int):
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *values: Any, **named: Any) -> Any:
        return self._ask("call", self, *values, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delitem", self, key)

    def __len__(self) -> int:
        return self._ask("len", self)

    def __bool__(self) -> bool:
        return self._ask("bool", self)

    def __str__(self) -> str:
        return self._ask("str", self)

    def __repr__(self) -> str:
        return self._ask("repr", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __iter__(self) -> Iterator[Any]:
        values = self._ask("all", self)
        if type(values) is not list:  # the program may have written any answer, such as an endless range
            raise TypeError("the program gave no list of the values that a test goes through")
        return iter(values)


class Program:
    """The program as its tests see it. ``most``: the longest answer that is read, in bytes."""

    def __init__(self, most: int):
        self._most = most
        self._things: dict[int, Remote] = {}

    def loaded(self) -> None:
        """Wait until the program is there. If it fails, tell its verdict and end."""
        answer = self._read()
        if "error" in answer:
            self._end(f"error:{answer['error']}", answer.get("message", ""))

    def ask(self, act: str, /, *values: Any, **named: Any) -> Any:
        """Have the program do something, and return the value.

        Raises:
            TypeError: a value cannot go into the program.
            BaseException: what the program raised, as an exception of Python's own.
        """
        request = [
            act,
            [encode(v, self._number) for v in values],
            {k: encode(v, self._number) for k, v in named.items()},
        ]
        try:
            write_frame(CALLS, json.dumps(request).encode())
        except OSError:
            self._end("lost", "")
        answer = self._read()
        if "error" in answer:
            raise self._raised(answer, act)
        return decode(answer["value"], self._thing)

    def _read(self) -> dict[str, Any]:
        try:
            answer = read_json(REPLIES, self._most)
        except EOFError:
            self._end("lost", "")
        except OverflowError:
            self._end("output", "")
        if "ended" in answer:
            reason = answer["ended"]
            self._end(reason if reason in ENDINGS else "killed", answer["message"])
        return answer

    def _end(self, reason: str, message: str) -> NoReturn:
        """Tell the last verdict, where no ``except`` of a test can hide it."""
        tell(reason, None, str(message))
        os._exit(0)

    def _raised(self, answer: dict[str, Any], act: str) -> BaseException:
        kind = getattr(builtins, answer["error"], None)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = Exception
        if issubclass(kind, StopIteration) and act != "next":
            kind = RuntimeError  # it would end a loop of the test, as ``all(map(f, values))``, as if the values had come to an end  # noqa: E501
        try:
            return kind(*[decode(argument, self._thing) for argument in answer["arguments"]])
        except TypeError:  # such as a UnicodeError of one argument
            return Exception(answer["message"])

    def _thing(self, record: dict[str, Any]) -> Remote:
        number = int(record["thing"])
        if number not in self._things:
            self._things[number] = Remote(self.ask, number)
        return self._things[number]

    @staticmethod
    def _number(value: Any) -> dict[str, int]:
        if type(value) is Remote:
            return {"thing": object.__getattribute__(value, "_number")}
        raise TypeError(f"a {type(value).__name__} cannot go into the program, which runs in another process")


class Names(dict):
    """The builtins of the tests. A name that is not among them is the program's, and so is ``name``, whatever it is."""

    def __init__(self, program: Program, name: str):
        super().__init__(vars(builtins))
        self.pop(name, None)
        self._program = program

    def __missing__(self, name: str) -> Any:
        return self._program.ask("name", name)


def run_tests(asked: dict[str, Any], limits: dict[str, Any]) -> NoReturn:
    """Tell how the program and ``setup`` ended, and then how each of ``tests`` did.

    ``name`` is the function that is tested, whose name may be one of Python's own.
    """
    program = Program(LONGEST * limits["output_bytes"] + 200)
    program.loaded()
    namespace = module_of_snippet("tests")
    namespace["__builtins__"] = Names(program, asked["name"])
    random.seed(0)
    for number, text in enumerate([asked["setup"], *asked["tests"]]):
        failed = True
        try:
            exec(compiled(text), namespace)
        except Unusable as error:
            tell("syntax", None, str(error))
        except MemoryError:
            namespace.clear()
            tell("memory")
            os._exit(0)
        except BaseException as error:
            tell(f"error:{builtin_name(type(error))}", None, last_line(error))
        else:
            tell("ok")
            failed = False
        if failed and number == 0:  # without the setup, no test means anything
            break
    os._exit(0)
