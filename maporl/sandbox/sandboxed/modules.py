"""The modules of a snippet: Python's standard library, which its process can import although it can open no file.

What programs use most is loaded before the first fork, and so is every part that is compiled for this machine, because
such a part needs executable memory. The rest lies as byte code in memory that costs a fork nothing until it is
imported: a page of it is shared until a process writes to it, and what is written is seen by that process only. (A fork
costs time for each module that is loaded before it.)
"""

import importlib.util
import marshal
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

LOADED = (
    "__future__", "_strptime", "bisect", "cmath", "collections.abc", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re",  # noqa: E501
    "statistics", "string", "time", "typing", "unicodedata",
)  # fmt: skip
COMPILED = (
    "_bisect", "_blake2", "_contextvars", "_csv", "_ctypes", "_datetime", "_decimal", "_heapq", "_json", "_md5",
    "_posixsubprocess", "_queue", "_random", "_sha1", "_sha2", "_sha256", "_sha3", "_sha512", "_statistics", "_struct", "_typing",  # noqa: E501
    "array", "binascii", "cmath", "math", "mmap", "pyexpat", "resource", "select", "unicodedata", "zlib",
)  # fmt: skip
"""A fork copies five mappings for each.

Left out are those for which Python has a stand-in, and those for files and processes.
"""
LEFT_OUT = {
    "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
"""Folders of the standard library that are tools and tests, or need a screen."""


class Archive:
    """An importer of the standard library's pure modules, which reads no file once it is made.

    ``root`` is the folder of the library.
    """

    def __init__(self, root: Path):
        self._places: dict[str, tuple[int, int, bool]] = {}
        descriptor = os.memfd_create("modules")
        length = 0
        for name, path in _modules(root, ""):
            if (code := _byte_code(name, path)) is not None:
                self._places[name] = (length, len(code), path.name == "__init__.py")
                length += os.write(descriptor, code)
        # private: a snippet can make it writable (mprotect), and must not write what the worker and other forks import
        self._memory = mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ)
        os.close(descriptor)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module lies, or None if the archive has none of this name."""
        if name not in self._places:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=self._places[name][2])  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code in it."""
        exec(self.get_code(module.__name__), vars(module))

    def get_code(self, name: str) -> CodeType:
        """Return the code of a module."""
        start, length, _ = self._places[name]
        return marshal.loads(self._memory[start : start + length])


def load() -> None:
    """Load what snippets use most, and let everything else of the standard library be imported from memory."""
    for name in COMPILED:
        with suppress(ImportError):  # versions and builds of Python differ in these
            import_module(name)
    for name in LOADED:
        import_module(name)
    archive = Archive(Path(os.__file__).parent)
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, archive]  # type: ignore[list-item]  # what an importer needs
    sys.path.clear()
    sys.path_importer_cache.clear()


def _modules(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    """The name and the path of each pure module below a folder of the library."""
    for path in sorted(folder.iterdir()):
        name = f"{package}{path.stem}"
        if path.suffix == ".py" and path.stem != "__init__":
            yield name, path
        elif (path / "__init__.py").is_file() and path.name not in LEFT_OUT:
            yield name, path / "__init__.py"
            yield from _modules(path, f"{name}.")


def _byte_code(name: str, path: Path) -> bytes | None:
    """The byte code of a module: the stored one if it is up to date, else compiled now; None if it has none."""
    stored, source = Path(importlib.util.cache_from_source(str(path))), path.stat()
    with suppress(OSError, struct.error):
        data = stored.read_bytes()
        kind, seconds, size = struct.unpack("<III", data[4:16])
        same = (kind, seconds, size) == (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
        if same and data[:4] == importlib.util.MAGIC_NUMBER:
            return data[16:]
    try:
        return marshal.dumps(compile(path.read_bytes(), f"<{name}>", "exec", dont_inherit=True))
    except (SyntaxError, ValueError, OSError):  # a template, or a file of another version
        return None
