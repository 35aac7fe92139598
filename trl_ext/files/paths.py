"""Paths that are made of a name from outside: of a policy, an adapter, a reward source. Imports no torch.

Weights are read from, written to, and removed at such paths, and the name may be a stranger's, who wrote a team's
configuration. ``Path("run") / "/home/me"`` is ``/home/me``. So the name is checked here, where it becomes a part of a
path, and not only where a configuration is read.
"""

from pathlib import Path, PurePosixPath

from trl_ext.errors import UserError

LONGEST = 200
"""How many bytes a name may have: file systems take 255, and endings are added."""


class UnsafeName(UserError, ValueError):
    """A name would lead out of the folder that it belongs in, or cannot be a file's or a folder's name."""


def fault_of_name(name: str) -> str:
    """Return why ``name`` cannot be the name of one file or folder, or ""."""
    if not name or name.startswith("."):
        return "is empty" if not name else "begins with a dot"
    if any(character in "/\\" or not character.isprintable() for character in name):
        return "holds a slash, a backslash or a character that cannot be seen"
    return f"has more than {LONGEST} bytes" if len(name.encode(errors="replace")) > LONGEST else ""


def below(folder: str | Path, name: str) -> Path:
    """Return the path of ``name`` directly in ``folder``.

    Raises:
        UnsafeName: ``name`` is not the plain name of one file or folder, so that the path could lie anywhere.
    """
    if fault := fault_of_name(name):
        raise UnsafeName(f"{name!r:.80} {fault}, so it cannot name a part of {folder}; use letters, digits, '-', '_'")
    return Path(folder) / name


def within(folder: str | Path, path: str) -> Path:
    """Return the path ``path`` in ``folder``, at any depth.

    Raises:
        UnsafeName: a part of ``path`` is not a plain name, for example because ``path`` begins with a slash or has
            ``..``.
    """
    place = Path(folder)
    for part in PurePosixPath(path).parts:
        place = below(place, part)
    return place
