"""The user's own Python in a configuration: ``MODULE:OBJECT``, such as ``reversal:Reversal``. Imports no torch.

Every part that a configuration names is looked up by :func:`look_up`: in the table of the parts that come with maporl
(:class:`Parts`), or by such a name. The modules of a configuration are imported once, by :func:`import_modules`, when
the configuration is read. Reading values (:mod:`maporl.config.parse`) imports nothing, so that an untrusted
configuration can be refused before any of it runs.
"""

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections import UserDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

from maporl.config.algorithm import AdvantageConfig
from maporl.config.schema import Config
from maporl.errors import ConfigError, lacking
from trl_ext.errors import is_users, retold
from trl_ext.process.parsing import parsed

_WORD = r"[^\W\d]\w*"
_IMPORT = re.compile(rf"(?!.*\.py:){_WORD}(\.{_WORD})*:{_WORD}(\.{_WORD})*")
_NEARLY = re.compile(rf"(?:\./)?((?:{_WORD}/)*{_WORD}(?:\.{_WORD})*?)(?:\.py)?[.:]({_WORD})")
FINGERPRINTS = "module_fingerprints.json"
"""The file of a run's folder with the hashes of the user's own modules."""
_FOLDERS: set[Path] = set()
"""The folders of all configurations that this process has imported modules for."""
_INSTALLED = {Path(path).resolve() for path in sysconfig.get_paths().values()}

Part = TypeVar("Part")


class Parts(UserDict[str, Any]):
    """Parts by the names that a configuration may give them. One that is written ``MODULE:OBJECT`` is imported when it
    is read.

    So a table names what an extension has (:func:`extension`), such as what one method alone uses
    (:mod:`maporl.methods`), without importing it: its module stands above the table.

    Raises:
        ConfigError: the part is read, and its package is missing.

    >>> table = Parts({"root": "math:sqrt"})
    >>> table["root"](9.0), list(table), "square" in table
    (3.0, ['root'], False)
    """

    def __getitem__(self, name: str) -> Any:
        part = self.data[name]
        if isinstance(part, str):
            part = self.data[name] = extension(part, name)
        return part

    def installed(self) -> dict[str, Any]:
        """Return all parts but those whose packages are missing."""
        found = {}
        for name in self.data:
            with suppress(ConfigError):
                found[name] = self[name]
        return found

    def name_of(self, part: Any) -> str | None:
        """Return the name of a class or a function, or None if it has none here. Nothing is imported."""
        text = f"{part.__module__}:{part.__qualname__}"
        return next((name for name, entry in self.data.items() if entry is part or entry == text), None)


def member(table: Parts, name: str, package: str) -> Any:
    """Return the class or function ``name`` of ``table``, as the ``__getattr__`` of its ``package`` does.

    So the parts of a table are imported from their package too, and none is before it is asked for.

    Raises:
        AttributeError: the table has no such part.
    """
    for key, part in table.data.items():
        if name == (part.partition(":")[2] if isinstance(part, str) else part.__name__):
            return table[key]
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def extension(name: str, what: str) -> Any:
    """Return the object ``MODULE:OBJECT`` of an extension: a package that maporl can do without.

    The core names its extensions by such texts and never imports one, so that whoever does not use an extension need
    neither have it nor know it. ``what`` is what needs it, with which the error begins.

    Raises:
        ConfigError: the extension, or a package that it imports, is not installed. The message says what to install.

    >>> extension("math:sqrt", "tools.root")(9.0)
    3.0
    >>> extension("maporl.nothing:Nothing", "tools.nothing")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    maporl.errors.ConfigError: tools.nothing needs maporl.nothing, which this copy of maporl lacks; install all of it...
    """
    with retold(ModuleNotFoundError, lambda error: ConfigError(f"{what} needs {lacking(error)}")):
        return pkgutil.resolve_name(name)


def is_import(name: Any) -> bool:
    """Return whether ``name`` is of the form ``MODULE:OBJECT``.

    >>> is_import("reversal:Reversal"), is_import("my.tasks:Sums"), is_import("debate"), is_import("org/name:main")
    (True, True, False, False)
    """
    return isinstance(name, str) and _IMPORT.fullmatch(name) is not None


def import_name(part: Any) -> str | None:
    """Return the name ``MODULE:OBJECT`` of a class or a function; the inverse of :func:`look_up`.

    It is None for what another process cannot import: what a notebook or a function defines, a lambda, a module that is
    not in a file, and what a script defines that would run again (:func:`program_name`).
    """
    module, path = str(getattr(part, "__module__", None)), str(getattr(part, "__qualname__", ""))
    known_as = program_name() if module == "__main__" else module
    name = f"{known_as}:{path}"
    if known_as in (None, "__mp_main__") or not is_import(name) or _file(sys.modules.get(module)) is None:
        return None
    try:
        return name if attrgetter(path)(sys.modules[module]) is part else None
    except AttributeError:
        return None


def program_name() -> str | None:
    """Return the module's name of the program that runs as ``__main__``, if another process can import it.

    To import a file means to run it. So it must have ``if __name__ == "__main__":``, with what only the program does
    below it. It is None for a notebook, for a file whose name cannot be a module's, and
    where another module has the name already.
    """
    main = sys.modules.get("__main__")
    file = _file(main)
    if file is None or not _is_guarded(file):
        return None
    spec = getattr(main, "__spec__", None)
    name = file.stem if spec is None else spec.name  # python -m gives it a spec
    other = _file(sys.modules.get(name))
    return name if is_import(f"{name}:_") and other in (None, file) and name not in sys.builtin_module_names else None


@cache
def _is_guarded(file: Path) -> bool:
    """Return whether a program has a part of its own that an import leaves out."""
    try:
        statements = parsed(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return False
    tests = [ast.unparse(statement.test) for statement in statements if isinstance(statement, ast.If)]
    return any(test in ("__name__ == '__main__'", "'__main__' == __name__") for test in tests)


def import_folder(name: str) -> str | None:
    """Return the folder in which the module of ``MODULE:OBJECT`` was found, or None if it is an installed one.

    Another process that imports the name must look in this folder.
    """
    module = name.partition(":")[0]
    if module == program_name():
        file = _file(sys.modules["__main__"])
        root = None if file is None else file.parents[module.count(".")]
    else:
        spec = getattr(sys.modules.get(module.partition(".")[0]), "__spec__", None)
        root = None if spec is None else _root(spec)
    if root is None:
        return None
    return None if root in _INSTALLED or "site-packages" in root.parts else str(root)


def named_imports(config: Config) -> dict[str, str]:
    """Return every ``MODULE:OBJECT`` in a configuration, by the key under which it stands."""
    named: list[tuple[str, Any]] = [("task.name", config.task.get("name"))]
    named.append(("task.use", config.task.get("use")))
    named += [
        (f"schedule.curriculum, update {s.update}: task.name", s.task.get("name")) for s in config.schedule.curriculum
    ]
    named += [(f"protocol.{key}", config.protocol.get(key)) for key in ("name", "game", "run")]
    options = config.protocol.get("options")
    if isinstance(options, Mapping):  # the protocol checks them later
        named += [(f"protocol.options.{key}", options.get(key)) for key in ("show", "parse")]
    named += [("reward.sources", name) for name in config.reward.sources]
    named += [("reward.charges", name) for name in config.reward.charges]
    named += _in_entries("reward.rules", config.reward.rules)
    for number, stage in enumerate(config.stages):
        build = getattr(stage, "build", {})
        named += [(f"loop.stages.{number}.build", name) for name in ([build] if isinstance(build, str) else build)]
    named += _in_algorithm("", config.advantage, config.ppo.objective)
    for agent, section in config.agents.items():
        if section.algorithm.advantage or section.algorithm.ppo:
            own = config.of(agent)
            named += _in_algorithm(f"agents.{agent}.algorithm.", own.advantage, own.ppo.objective)
    named += [(f"tools.{name}.use", tool.use) for name, tool in config.tools.items()]
    named += [(f"environments.{name}.use", section.use) for name, section in config.environments.items()]
    return {f"{key}: {name}": name for key, name in named if is_import(name)}


def _in_entries(key: str, entries: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the names in entries of a list, each of which is a name or ``{name: options}``."""
    return [(key, name) for entry in entries for name in ([entry] if isinstance(entry, str) else entry)]


def _in_algorithm(place: str, advantage: AdvantageConfig, objective: str) -> list[tuple[str, Any]]:
    """Return the names of the slots, the transforms and the objective of an algorithm, whose keys begin with
    ``place``."""
    terms = {"advantage": advantage, **{f"advantage.plus.{n}": term for n, term in enumerate(advantage.plus)}}
    slots = ("returns", "baseline", "scale")
    named = [(f"{place}{at}.{slot}", getattr(term, slot)) for at, term in terms.items() for slot in slots]
    return [*named, *_in_entries(f"{place}advantage.post", advantage.post), (f"{place}ppo.objective", objective)]


def with_imports(config: Config, where: str) -> Config:
    """Import what a configuration names, and return it with the folders in which other processes must look.

    A configuration that names nothing of the user's own needs no folders. Errors begin with ``where``.

    Raises:
        ConfigError: a module cannot be imported.
    """
    names = named_imports(config)
    folders = import_modules(names, config.pythonpath, where) if names else []
    return dataclasses.replace(config, pythonpath=folders)


def import_modules(names: Mapping[str, str], folders: Sequence[str], where: str) -> list[str]:
    """Import the modules of a configuration's ``names``, and return the folders in which another process must look.

    A module is looked for in ``folders``, in their order, and then in the installed environment. The folders stay on
    Python's path, at its end, because a module may import another one later.

    Args:
        names: each ``MODULE:OBJECT`` by the key of the configuration in which it stands.
        folders: the folders of the configuration.
        where: the name of the configuration in errors.

    Raises:
        ConfigError: no such module exists, it raises an error while it is imported, or this process has imported
            another module of the same name.
    """
    paths = list(dict.fromkeys(Path(folder).expanduser().resolve() for folder in folders))
    importlib.invalidate_caches()
    _must_not_mix(paths, where)
    for key, name in names.items():
        _import(name.partition(":")[0], paths, f"{where}: {key}")
    import_folders = (import_folder(name) for name in names.values())
    return list(dict.fromkeys([*map(str, paths), *(folder for folder in import_folders if folder is not None)]))


def module_files(config: Config) -> dict[str, Path]:
    """Return the file of each module that this process has imported from the folders of ``config``, by its name."""
    if not config.pythonpath:
        return {}
    tops = {name for name in sys.modules if "." not in name and import_folder(name) in config.pythonpath}
    files = {name: _file(module) for name, module in sys.modules.items() if name.partition(".")[0] in tops}
    if (program := program_name()) is not None and import_folder(program) in config.pythonpath:
        files[program] = _file(sys.modules["__main__"])
    return {name: file for name, file in files.items() if file is not None}


def look_up(name: Any, known: Mapping[str, Part], where: str, base: type | None = None) -> Part:
    """Return the part that a configuration calls ``name``: one of the ``known`` ones, or the object ``MODULE:OBJECT``.

    Args:
        name: the name.
        known: the parts that come with maporl, and those that a program has added.
        where: the key in the configuration, with which errors begin.
        base: the class from which an imported object must derive. If it is None, the caller checks the object.

    Raises:
        ConfigError: no such part exists, its package is missing, or the imported object is not of the right kind.
    """
    if isinstance(name, str) and name in known:
        # its package is missing
        with retold(ConfigError, lambda error: ConfigError(f"{where}: {error}")):
            return known[name]
    if not is_import(name):
        raise ConfigError(f"{where}: {unknown(name, known)}; {_own(name)}")
    module, _, path = name.partition(":")
    imported = module in sys.modules and module not in ("__main__", program_name())
    part: Any = sys.modules[module] if imported else _import(module, [], where)
    for attribute in path.split("."):
        try:
            part = getattr(part, attribute)
        except AttributeError:
            raise ConfigError(f"{where}: {name}: {unknown(attribute, _public(part, base))}") from None
    if base is not None and not (isinstance(part, type) and issubclass(part, base)):
        raise ConfigError(f"{where}: {name}: expected a class derived from {_public_name(base)}, got {kind_of(part)}")
    return part


def must_take(part: Any, arguments: Sequence[str], where: str) -> None:
    """Check that ``part`` is a function that can be called with these arguments, in this order.

    Raises:
        ConfigError: it is something else, or takes other arguments. The message begins with ``where``.
    """
    if isinstance(part, type) or not callable(part):
        raise ConfigError(f"{where}: expected a function of ({', '.join(arguments)}), got {kind_of(part)}")
    try:
        signature = inspect.signature(part)
    except ValueError:  # some functions that are written in C do not say
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(f"{where}: expected a function of ({', '.join(arguments)}), got one of {signature}") from None


def unknown(name: Any, known: Any) -> str:
    """Return the message ``unknown 'x'; did you mean 'y'? known: ...``."""
    names = sorted(map(str, known))
    if not names:
        return f"unknown {name!r:.80}"
    near = difflib.get_close_matches(f"{name!s:.80}", names, 1)
    return f"unknown {name!r:.80}{f'; did you mean {near[0]!r}?' if near else ';'} known: {', '.join(names)}"


def kind_of(part: Any) -> str:
    """Return what an imported object is, in words for a message.

    >>> kind_of(int), kind_of(len), kind_of(3)
    ('the class int', 'the function len', 'a value of type int')
    """
    if isinstance(part, type):
        return f"the class {part.__qualname__}"
    if isinstance(part, ModuleType):
        return f"the module {part.__name__}"
    return f"the function {part.__name__}" if hasattr(part, "__name__") else f"a value of type {type(part).__name__}"


def words_of(error: BaseException) -> str:
    """Return the message of an error of the user's code, whose own ``__str__`` may fail."""
    try:
        return str(error)
    except Exception as second:
        return f"its message cannot be read ({type(second).__name__})"


def told(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """Return an error of the user's code as one line: the user's file, the line, and what was raised.

    The user's file is one in ``folders``, or else one that belongs neither to maporl nor to what is installed.
    """
    words = f"{type(error).__name__}: {' '.join(words_of(error).split())}".removesuffix(": ")[:300]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {words}"
    frames = traceback.extract_tb(error.__traceback__)
    in_folders = [f for f in frames if any(folder in Path(f.filename).parents for folder in folders)]
    users = [f for f in frames if not f.filename.startswith("<") and is_users(f.filename)]
    for frame in [*reversed(in_folders), *reversed(users), *reversed(frames)]:
        if not frame.filename.startswith("<"):
            return f"{frame.filename}, line {frame.lineno}: {words}"
    return words


def _own(name: Any) -> str:
    """Return how a name of the user's own is written, with a guess of what ``name`` was meant to be."""
    meant = _NEARLY.fullmatch(name) if isinstance(name, str) else None
    if meant is None:
        return "your own is named MODULE:OBJECT, as in reversal:Reversal"
    return f"your own is named MODULE:OBJECT, here perhaps {meant[1].replace('/', '.')}:{meant[2]}"


def _import(module: str, folders: Sequence[Path], where: str) -> ModuleType:
    """Import a module, with ``folders`` at the front of Python's path for as long as this takes."""
    if module == "__main__":
        raise ConfigError(f"{where}: the module __main__ is another program in each process; name the file's own name")
    if module == program_name():
        return sys.modules["__main__"]  # a second import would make a second class of each
    top = module.partition(".")[0]
    spec = _spec(top, folders)
    if spec is None:
        raise ConfigError(f"{where}: {_no_module(module, folders)}")
    if top in sys.modules:
        _must_be(sys.modules[top], spec, where)
    new = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path[:0] = map(str, folders)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: {_no_module(module, folders)}") from None
        raise ConfigError(f"{where}: the module {module} cannot be imported: {told(error, folders)}") from None
    finally:
        for folder in folders:
            sys.path.remove(str(folder))
        # an installed package that is imported later must not be hidden by a file in the user's folder
        sys.path.extend(new)
        _FOLDERS.update(folders)


def _must_not_mix(folders: Sequence[Path], where: str) -> None:
    """Check that no module imported for another configuration stands in the place of one in ``folders``."""
    # Python has one module of each name in a process
    others = _FOLDERS - set(folders)
    for name, module in list(sys.modules.items()) if others else ():
        file = _file(module) if "." not in name else None
        if file is None or not others.intersection(file.parents[:2]):
            continue
        here = PathFinder.find_spec(name, [str(folder) for folder in folders])
        if here is not None:
            _must_be(module, here, where)


def _must_be(module: ModuleType, spec: ModuleSpec, where: str) -> None:
    """Check that the imported ``module`` is the one of ``spec``."""
    file = _file(module)
    if spec.origin is not None and spec.has_location and Path(spec.origin).resolve() != file:
        raise ConfigError(
            f"{where}: {spec.origin} is not the module {module.__name__} that this process has imported already, from "
            f"{file or 'Python itself'}; rename one of them, use them in two processes, or let pythonpath=FOLDER name "
            "one for both"
        )


def _spec(top: str, folders: Sequence[Path]) -> ModuleSpec | None:
    """Return where the module ``top``, without dots, is found for a configuration with these folders."""
    here = PathFinder.find_spec(top, [str(folder) for folder in folders])
    if here is not None:
        return here
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module of a notebook has none
        return None
    root = None if spec is None else _root(spec)
    return None if root in _FOLDERS - set(folders) else spec


def _root(spec: ModuleSpec) -> Path | None:
    """Return the folder that must be on Python's path for the module of ``spec``, or None if it is not in a file."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin).resolve().parent if spec.has_location and spec.origin else None


def _file(module: ModuleType | None) -> Path | None:
    spec = getattr(module, "__spec__", None)
    if spec is None and module is not None and module is sys.modules.get("__main__"):  # a script has a file alone
        name = getattr(module, "__file__", None)
        return None if name is None else Path(name).resolve()
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _no_module(module: str, folders: Sequence[Path]) -> str:
    there = {path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.py")}
    near = difflib.get_close_matches(module, sorted(there), 1)
    places = [f"in {folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in folders]
    hint = f"did you mean {near[0]!r}?" if near else "put its file there, or name its folder: pythonpath=FOLDER"
    return f"no module {module!r} {', '.join([*places, 'or among the installed ones'])}; {hint}"


def _public(part: Any, base: type | None) -> list[str]:
    """Return the names in a module or a class that may be meant: classes that derive from ``base``, or functions."""
    named = {name: value for name, value in inspect.getmembers(part) if not name.startswith("_")}
    fits = [(n, value) for n, value in named.items() if base and isinstance(value, type) and issubclass(value, base)]
    top = getattr(part, "__name__", "").partition(".")[0]
    fit = [n for n, value in fits if not isinstance(part, ModuleType) or value.__module__.partition(".")[0] == top]
    if fit:
        return fit
    imported = (type, FunctionType, ModuleType, BuiltinFunctionType)
    return [n for n, v in named.items() if not isinstance(v, imported) or inspect.getmodule(v) is part]


def _public_name(base: type) -> str:
    """Return the shortest name by which a class of this package can be imported, such as ``maporl.Task``."""
    parts = base.__module__.split(".")
    packages = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    names = (name for name in packages if getattr(sys.modules.get(name), base.__name__, None) is base)
    return f"{next(names, base.__module__)}.{base.__name__}"
