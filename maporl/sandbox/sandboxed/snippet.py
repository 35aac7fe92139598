"""What a fork does with a snippet: it runs any Python, and writes its verdict.

A snippet may do with its process what it likes, and write any verdict. So a verdict says no more than which value a
snippet gave, and nothing is decided by it but that.
"""

import builtins
import json
import os
import random
import struct
import sys
import types
from typing import Any, NoReturn

from .values import NotPlain, cut, plain_value

VERDICT = 3
"""The descriptor of the pipe that takes a verdict."""


def read_frame(descriptor: int, most: int | None = None) -> bytes:
    """The next frame from a pipe: four bytes of length (big-endian), then so many bytes.

    Raises:
        EOFError: the pipe is closed.
        OverflowError: the frame is longer than ``most`` bytes.
    """
    (length,) = struct.unpack(">I", _read(descriptor, 4))
    if most is not None and length > most:
        raise OverflowError(f"a frame of {length} bytes")
    return _read(descriptor, length)


def read_json(descriptor: int, most: int | None = None) -> Any:
    """The value in the next frame, as :func:`read_frame` reads it: JSON in UTF-8, whatever encoding its bytes look
    like.

    Raises:
        ValueError: it is something else.
    """
    return json.loads(read_frame(descriptor, most).decode())  # from bytes, json would guess the encoding and import it


def _read(descriptor: int, count: int) -> bytes:
    pieces = []
    while count:
        piece = os.read(descriptor, min(count, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def write_frame(descriptor: int, payload: bytes) -> None:
    """Write one frame to a pipe."""
    write_all(descriptor, struct.pack(">I", len(payload)) + payload)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` to a pipe."""
    while data:
        data = data[os.write(descriptor, data) :]


def tell(reason: str, value: Any = None, message: str = "") -> None:
    """Write a verdict, as a line of JSON."""
    record = {"reason": reason, "value": value, "message": cut(message)}
    write_all(VERDICT, json.dumps(record).encode() + b"\n")


def module_of_snippet(name: str) -> dict[str, Any]:
    """The namespace of a new module, which is known by its name, because data classes and pickle look it up."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    random.seed(0)  # Python gives each fork a new seed
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as in every Python that has read its site
    return vars(module)


def compiled(code: str) -> Any:
    """Compile a program.

    Raises:
        Unusable: Python cannot compile it.
    """
    try:
        return compile(code, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise Unusable(last_line(error)) from None


class Unusable(Exception):
    """A text that Python cannot compile; the message is the last line of Python's error."""


def run_snippet(asked: dict[str, Any], limits: dict[str, Any]) -> NoReturn:
    """Run ``code`` as a script, and then its function ``call`` if this is not empty. Tell the value that it returns."""
    reason, value, message = _outcome(asked["code"], asked["call"], module_of_snippet("__main__"))
    try:
        if value is not None and len(json.dumps(value)) > limits["output_bytes"]:
            reason, value = "output", None
    except MemoryError:
        reason, value = "memory", None
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except BaseException:  # a snippet may have closed or changed it
            continue
    tell(reason, value, message)
    os._exit(0)


def _outcome(code: str, call: str, namespace: dict[str, Any]) -> tuple[str, Any, str]:
    """The reason, the value and the message of a snippet."""
    try:
        exec(compiled(code), namespace)
        if not call:
            return "ok", None, ""
        function = namespace.get(call)
        plain = None if function is None else plain_value(function())
        return "no_value" if plain is None else "ok", plain, ""
    except Unusable as error:
        return "syntax", None, str(error)
    except MemoryError:
        namespace.clear()  # makes room for the verdict
        return "memory", None, ""
    except NotPlain:
        return "no_value", None, ""
    except BaseException as error:
        if isinstance(error, SystemExit) and not call and error.code in (None, 0):
            return "ok", None, ""
        return f"error:{builtin_name(type(error))}", None, last_line(error)


def last_line(error: BaseException) -> str:
    """The last line of an error as Python prints it. Its text may be the snippet's own code, and fail."""
    try:
        text = "".join(("", str(error)))
    except BaseException:
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def builtin_name(kind: type) -> str:
    """The nearest built-in exception, so that no name of the snippet's own gets into a reason."""
    return next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)
