"""Take secrets and paths of this machine out of what becomes public. Imports no torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from maporl.config import parse

PATHS = (*parse.PATHS, "base_model_name_or_path", "_name_or_path", "name_or_path")
"""The keys of a configuration, and of a model's, whose values may be folders or files. Their last part stays."""
ADDRESSES = ("base_url", "urls")
"""The keys of a configuration whose values may be addresses in the machine's network."""

TAKEN_OUT = "(taken out)"
_SECRETS = (
    r"\bhf_[A-Za-z0-9]{16,}", r"\bsk-[A-Za-z0-9_-]{16,}", r"\bgh[opsur]_[A-Za-z0-9]{20,}", r"\bgithub_pat_\w{20,}",
    r"\bglpat-[\w-]{16,}", r"\bxox[abprs]-[\w-]{10,}", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", r"\bAIza[\w-]{30,}",
    r"\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]{6,}", r"(?<=Bearer )[\w.~+/=-]{12,}", r"(?<=://)[^\s/:@'\"<>]{0,256}:[^\s/@'\"<>]{1,256}(?=@)",
    r"(?i:(?<=[?&])(?:api[_-]?key|key|token|access[_-]?token|auth|secret|password|signature|sig)=)[^\s&#'\"<>]+",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\]{0,9000}-----END [A-Z ]*PRIVATE KEY-----)?",
)  # fmt: skip
_SECRET = re.compile("|".join(_SECRETS), re.DOTALL)
_SECRET_KEY = re.compile(
    r"(?i)(^|_)(api_?key|hf_token|auth_token|access_token|secret(_key)?|password|passwd|credentials?)$"
)
_VARIABLE = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)")
_PATH = re.compile(r"(file:/*)?(/|~/|\.{1,2}/|[A-Za-z]:[\\/]).*")
_LONG_PATH = re.compile(r"(file:/*|/|~/)[^\s{}<>|,;:'\"]*[^\s{}<>|,;:'\"/]/[^\s{}<>|,;:'\"]+")


@dataclass
class Scrubber:
    """Takes secrets and paths of this machine out of texts and values, and remembers what it took out.

    Besides what looks like a key, it knows the values of this process's environment variables with a name like
    ``OPENAI_API_KEY``.

    Args:
        folder: the run's folder.
        places: each replaced value of a configuration, with its replacement.
        notes: what was taken out, for people. No secret stands in them.
    """

    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        values = {value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= 8}
        self._known = sorted((v for v in values if not v.startswith("/") and not v.isdigit()), key=len, reverse=True)
        homes = {str(self.folder.resolve()), str(self.folder.absolute()), os.getcwd(), str(Path.home())}
        self._homes = sorted((home for home in homes if len(home) > 1), key=len, reverse=True)

    def config(self, value: Any, key: str = "", at: str = "config.yaml") -> Any:
        """Return a configuration's values without secrets and without paths of this machine."""
        if _SECRET_KEY.search(key) and value and not isinstance(value, bool):
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

    def text(self, text: str, where: str) -> str:
        """Return ``text`` without secrets, without the replaced :attr:`places`, and without this machine's folders.

        ``where`` names the text in the notes.
        """
        for place in sorted(self.places, key=len, reverse=True):
            text = text.replace(place, self.places[place])
        for home in self._homes:
            text = re.sub(rf"(?<![\w/]){re.escape(home)}(?=/|\b)", "~", text)
        for secret in self._known:
            if secret in text:
                text = text.replace(secret, TAKEN_OUT)
                self._note(f"taken out: the value of an environment variable, in {where}")

        def take_out(match: re.Match[str]) -> str:
            self._note(f"taken out: what looks like a secret, {match[0][:4]!r}..., in {where}")
            return TAKEN_OUT

        return _SECRET.sub(take_out, text)

    def values(self, value: Any, where: str) -> Any:
        """Return JSON values, every text of which has gone through :meth:`text`."""
        if isinstance(value, Mapping):
            return {self.text(str(key), where): self.values(entry, where) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(entry, where) for entry in value]
        return self.text(value, where) if isinstance(value, str) else value

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


def _shown(value: str) -> str:
    """Return a replaced value for a note, which may be shown to others, without its secrets."""
    return _SECRET.sub(TAKEN_OUT, value)
