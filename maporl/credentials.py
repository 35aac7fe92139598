"""Keys, tokens and passwords in values and texts: found by the names beside them, by their form, and by the rules of
Kingfisher. Imports no torch."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from maporl.errors import RunError, install_command

TAKEN_OUT = "(taken out)"

_UNMISTAKABLE = (
    r"(?:(?:api|app|access|secret|private|auth|account|service|subscription|client|signing|encryption|master|admin)"
    r"[ _-]?key|secret|passw(?:or)?d|passphrase|credential|authorization)s?"
)
_SURE = rf"(?:{_UNMISTAKABLE}|token)"
_NAME = rf"(?:{_SURE}|(?<![a-z])(?<!public[ _-])keys?)"
_CERTAIN = re.compile(rf"(?i)(?:{_UNMISTAKABLE}|(?:hf|hub|auth|access|api|session|refresh|bearer)_token)$")
_JOINT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]")
_BESIDE = re.compile(
    rf"(?i)(?:(?P<name>{_NAME})(?:_?\d{{1,2}})?"
    r"(?:[\"'`)\]*\\]{0,4}\s{0,4}(?:[:=]{1,2}>?|->|>|,)\s{0,4}|[\"'`]?\s{1,4}(?:(?:is|was|to|as)\s{1,4})?)"
    r"[\"'`(\[\\]{0,4}(?:(?:bearer|basic|token)\s+)?|\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{16,})"
)
_FORM = re.compile(r"(?<![\w/+.%-])(?:[A-Za-z][A-Za-z0-9]{0,9}[-_.]){1,3}[\w-]{20,}(?:\.[\w-]{10,})*")
_SHAPES = {
    "key by its beginning": r"\bhf_[A-Za-z0-9]{16,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bAIza[\w-]{30,}"
    r"|\b(?:sk-|glpat-|NRAK-|GOCSPX-|tvly-|csk-|pypi-|ya29\.|ntn_|fw_)(?=[\w-]*\d)[\w-]{16,}|\bxox[abprs]-[\w-]{10,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b\d{8,10}:AA[\w-]{32,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\]{0,9000}-----END [A-Z ]*PRIVATE KEY-----)?",
    "login in an address": r"(?<=://)[^\s/:@'\"<>]{0,256}:[^\s/@'\"<>]{1,256}(?=@)",
    "key in an address": r"(?i:(?<=[?&])(?:api[_-]?key|key|token|access[_-]?token|auth|secret|password|signature|sig)=)"
    r"[^\s&#'\"<>)\]]{6,}",
}
_DIGEST = re.compile(r"(?i)[0-9a-f]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_secret(name: str, value: Any) -> bool:
    """Whether an option's value is a secret by the option's name.

    Some names leave no doubt. Others are also those of words, so that the value must look drawn at random.

    >>> is_secret("api_key", "x"), is_secret("pad_token", "<pad>"), is_secret("token", "8f3kQ0z7Lm" "Xw2b9Tn4Rv")
    (True, False, True)
    """
    name = _JOINT.sub("_", name)
    said = _CERTAIN.search(name) is not None or (isinstance(value, str) and value in _beside(f"{name}={value}"))
    return said and bool(value) and not isinstance(value, bool)


def without_secrets(value: Any, name: str = "", deepest: int = 50) -> Any:
    """Return plain values, in which the values of options with the name of a secret are replaced, and so are lists and
    mappings inside of ``deepest`` others."""
    if is_secret(name, value):
        return TAKEN_OUT
    if deepest == 0 and isinstance(value, Mapping | list | tuple):
        return "..."
    if isinstance(value, Mapping):
        return {key: without_secrets(entry, str(key), deepest - 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets(entry, name, deepest - 1) for entry in value)
    return value


def secrets_in(text: str, name: str = "") -> dict[str, str]:
    """Return what looks like a secret in ``text``, with the kind of each. ``name`` is that of the value that it is.

    Digests, UUIDs and numbers are secrets only beside a name that says so.

    Raises:
        RunError: the package with the rules is not installed.
    """
    if len(text) < 12:
        return {}
    named = f"{_JOINT.sub('_', name)}={text}" if name else text
    found = _beside(named) | secrets_by_rules(text.encode("utf-8", "replace"))
    for kind, shape in _SHAPES.items():
        found = dict.fromkeys(re.findall(shape, text), kind) | found
    for form in _FORM.findall(text):
        if any(_is_random(part, 3.5, 0.52) and not part.islower() for part in re.findall("[A-Za-z0-9]{20,}", form)):
            found.setdefault(form, "key by its form")
    return {one: kind for one, kind in found.items() if not any(one in other and one != other for other in found)}


def secrets_by_rules(content: bytes) -> dict[str, str]:
    """Return what Kingfisher's rules find in the content of a file, with the kind of each. It asks nobody.

    Raises:
        RunError: the package is not installed.
    """
    # they were made for source code, and do not see that a comma or a bracket ends a key
    findings = _scanner().scan(content + b"\n" + re.sub(rb"[,;!?()\[\]{}<>'\"`]|[.:](?=\s|$)", b" ", content))
    return {f.secret: f.rule_id.split(".")[-1] for f in findings if f.visible and not _DIGEST.fullmatch(f.secret)}


@cache
def _scanner() -> Any:
    try:
        from kingfisher_sdk import Rules, Scanner
    except ImportError:
        raise RunError(f"a push needs the package kingfisher-secret-scanner: {install_command('push')}") from None
    return Scanner(Rules(), base64=False)  # pictures on a page are base64


def _beside(text: str) -> dict[str, str]:
    """Return the values in ``text`` that look drawn at random and stand beside the name of a secret."""
    found = {}
    for match in _BESIDE.finditer(text):
        name, value = match["name"] or "authorization", match["value"].rstrip(".")
        sure = re.fullmatch(_SURE, name, re.IGNORECASE) is not None
        # a token or some key may be called as a class is: Conv1dCacheLayer
        least = 0.45 if (not sure or name.lower() == "token") and value not in (value.lower(), value.upper()) else 0.1
        parts = re.findall("[A-Za-z0-9]{12,}", value) if sure or not _DIGEST.fullmatch(value) else []
        if any(_is_random(part, 2.7, least) for part in parts):
            found[value] = f"value of {name.lower()!r}"
    return found


def _is_random(text: str, entropy: float, changes: float) -> bool:
    """Whether letters and digits look drawn at random: they have both, at least ``entropy`` bits per character, and at
    least this share of ``changes`` between small letters, capitals and digits."""
    bits = -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())
    share = (len(re.findall("[a-z]+|[A-Z]+|[0-9]+", text)) - 1) / len(text)
    return not text.isalpha() and not text.isdigit() and bits >= entropy and share >= changes
