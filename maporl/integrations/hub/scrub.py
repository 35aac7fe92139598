"""Take secrets and paths of this machine out of what becomes public. Imports no torch."""

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from maporl.config import parse
from maporl.credentials import TAKEN_OUT, is_secret, secrets_by_rules, secrets_in
from trl_ext.process.inherited import SECRET

PATHS = (*parse.PATHS, "base_model_name_or_path", "_name_or_path", "name_or_path")
"""The keys of a configuration, and of a model's, whose values may be folders or files. Their last part stays."""
ADDRESSES = ("base_url", "urls")
"""The keys of a configuration whose values may be addresses in the machine's network."""

_PATH = re.compile(r"(file:/*)?(/|~/|\.{1,2}/|[A-Za-z]:[\\/]).*")
_LONG_PATH = re.compile(r"(file:/*|/|~/)[^\s{}<>|,;:'\"]*[^\s{}<>|,;:'\"/]/[^\s{}<>|,;:'\"]+")


@dataclass
class Scrubber:
    """Takes secrets and paths of this machine out of texts and values, and remembers what it took out.

    Options with the name of a secret are certain, and so are the values of this process's environment variables with a
    name like ``OPENAI_API_KEY``. All else that looks like a secret (:mod:`maporl.credentials`) is :attr:`suspected`,
    unless it is allowed.

    Args:
        folder: the run's folder.
        allow: the marks (:func:`mark`) of what is not a secret.
        suspected: what looks like a secret, with its kind and the places where it stands.
        places: each replaced value of a configuration, with its replacement.
        notes: what was taken out or allowed, for people. No secret stands in them.
    """

    folder: Path
    allow: Collection[str] = ()
    suspected: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        values = {value for name, value in os.environ.items() if SECRET.search(name.upper()) and len(value) >= 8}
        self._known = sorted((v for v in values if not v.startswith("/") and not v.isdigit()), key=len, reverse=True)
        homes = {str(self.folder.resolve()), str(self.folder.absolute()), os.getcwd(), str(Path.home())}
        self._homes = sorted((home for home in homes if len(home) > 1), key=len, reverse=True)

    def config(self, value: Any, key: str = "", at: str = "config.yaml") -> Any:
        """Return a configuration's values without secrets and without paths of this machine."""
        if is_secret(key, value):
            self._note(f"taken out: the value of {at}")
            return TAKEN_OUT
        if isinstance(value, Mapping):
            return {
                name: self.config(entry, str(name), f"{at}: {name}" if ": " not in at else f"{at}.{name}")
                for name, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.config(entry, key, at) for entry in value]
        if not isinstance(value, str):
            return value
        public = value
        if key in ADDRESSES:
            public = _plain_address(value)
        elif (key in PATHS and _is_local(value)) or _LONG_PATH.fullmatch(value):
            public = re.split(r"[\\/]", value.rstrip("\\/"))[-1]
        if public != value:
            self.places[value] = public
            self._note(f"taken out: {_shown(value)}")
        return self.text(public, at)

    def text(self, text: str, where: str, name: str = "") -> str:
        """Return ``text`` without secrets, without the replaced :attr:`places`, and without this machine's folders.

        ``where`` names the text in the notes, and ``name`` is the name of the value that it is.
        """
        for place in sorted(self.places, key=len, reverse=True):
            text = text.replace(place, self.places[place])
        for home in self._homes:
            text = re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|\b)", "~", text)
        for secret in self._known:
            if secret in text:
                text = text.replace(secret, TAKEN_OUT)
                self._note(f"taken out: the value of an environment variable, in {where}")

        return self._without_suspects(text, secrets_in(text, name), where)

    def vocabulary(self, content: bytes, where: str) -> None:
        """Look for secrets in a file that is uploaded as it is.

        Only the rules of Kingfisher apply: vocabularies hold many texts that look drawn at random.
        """
        self._without_suspects("", secrets_by_rules(content), where)

    def _without_suspects(self, text: str, found: Mapping[str, str], where: str) -> str:
        for secret in sorted(found, key=len, reverse=True):
            if mark(secret) in self.allow:
                self._note(f"allowed: {found[secret]} ({mark(secret)}), in {where}")
                continue
            self.suspected.setdefault(secret, (found[secret], set()))[1].add(where)
            text = text.replace(secret, TAKEN_OUT)
        return text

    def values(self, value: Any, where: str, name: str = "") -> Any:
        """Return JSON values, every text of which has gone through :meth:`text`."""
        if isinstance(value, Mapping):
            return {self.text(str(key), where): self.values(entry, where, str(key)) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(entry, where, name) for entry in value]
        return self.text(value, where, name) if isinstance(value, str) else value

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _is_local(value: str) -> bool:
    """Whether the value of a key of :data:`PATHS` is a path of this machine, rather than a hub name or a template."""
    if "{" in value or "\n" in value:
        return False
    return _PATH.fullmatch(value) is not None or value.count("/") > 1 or "\\" in value or Path(value).exists()


def _plain_address(url: str) -> str:
    """Return an address without a user, a password, a query and a fragment. Of a file's address the name stays."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(parts.path).name
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def mark(secret: str) -> str:
    """Return a name for a secret, which tells nothing of it: the first eight digits of its SHA-256."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()[:8]


def _shown(value: str) -> str:
    """Return a replaced value for a note, which may be shown to others, without its secrets."""
    for secret in secrets_in(value):
        value = value.replace(secret, TAKEN_OUT)
    return value
