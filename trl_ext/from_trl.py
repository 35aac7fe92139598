"""What is taken from TRL: public names only, each of which is looked up when it is used.

TRL moves and removes parts in minor versions. The names that this package needs stand in this module, and nothing else
in it imports TRL. A name that the installed TRL lacks is an error of one sentence where it is needed, and the rest of
the package works without it.
"""

from importlib.metadata import version
from typing import Any

from trl_ext.errors import UserError, retold

OLDEST, NEWEST = "1.14", "1.16"
"""The versions of TRL from which and up to which the tests were run."""


class MissingFromTRL(UserError, ImportError):
    """The installed TRL lacks what is needed of it. The message says what, for what, and which versions have it."""


def lacks(what: str, use: str) -> MissingFromTRL:
    """Return the error for a part ``what`` that the installed TRL lacks. ``use`` says what needs it."""
    major, minor = map(int, NEWEST.split("."))
    return MissingFromTRL(
        f"TRL {version('trl')} has no {what}, which {use} needs; TRL {OLDEST} to {NEWEST} has it: "
        f"pip install 'trl>={OLDEST},<{major}.{minor + 1}'"
    )


def public(name: str, use: str) -> Any:
    """Return ``trl.NAME``. ``use`` says what needs it.

    Raises:
        MissingFromTRL: the installed TRL has no public name of this kind.
    """
    import trl

    with retold(AttributeError, lambda _: lacks(f"public {name}", use)):
        return getattr(trl, name)


def add_response_schema(tokenizer: Any) -> None:
    """Give ``tokenizer`` the response template that TRL has for its chat template, as ``trl.add_response_schema`` does.

    Raises:
        ValueError: TRL has none.
        MissingFromTRL: the installed TRL has no such function.
    """
    public("add_response_schema", "reading the calls of a model by the response template of its family")(tokenizer)
