"""What sections of a configuration are made with, and what several of them have: numbers, a tiny model. No torch."""

import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from maporl.errors import lacking
from trl_ext.models.attention import ATTENTIONS, check_name
from trl_ext.ppo.options import READ, checked, option
from trl_ext.ppo.options import AboveZero as AboveZero
from trl_ext.ppo.options import Finite as Finite
from trl_ext.ppo.options import Natural as Natural
from trl_ext.ppo.options import NotNegative as NotNegative
from trl_ext.ppo.options import Positive as Positive
from trl_ext.ppo.options import PositiveShare as PositiveShare
from trl_ext.ppo.options import ProperShare as ProperShare
from trl_ext.ppo.options import Share as Share

T = TypeVar("T")

STRICT = ConfigDict(**READ)  # type: ignore[typeddict-item]  # trl_ext does not import pydantic
"""For a pydantic dataclass: an unknown key is an error, and editors are shown the help of each key."""


@dataclass_transform(frozen_default=True)
def section(*, frozen: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a section of a configuration: a dataclass whose values are checked, also if it is
    made in Python, and which has no keys but its own. :func:`trl_ext.ppo.options.option` declares its keys."""
    return lambda kind: dataclass(frozen=frozen, kw_only=kw_only, config=STRICT)(checked(kind))  # type: ignore[return-value]  # the class, as a protocol


@cache
def brought(name: str) -> Any:
    """Return the section ``MODULE:CLASS`` of an extension, or what stands in its place where the extension is missing.

    So a package brings the sections that it alone reads, and the core, which imports no extension, finds them by this
    text. Where a section is missing its key is None, and a configuration that sets it is told what to install.
    """
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        return Annotated[None, BeforeValidator(_missing(f"needs {lacking(error)}"))]


def made(name: str) -> Callable[[], Any]:
    """Return what makes the section :func:`brought` of this name with its defaults, or None where it is missing."""
    kind = brought(name)
    return kind if isinstance(kind, type) else lambda: None


def _missing(told: str) -> Callable[[Any], None]:
    def refuse(value: Any) -> None:
        if value is not None:
            raise ValueError(told)

    return refuse


Attention = Annotated[str, AfterValidator(check_name), Field(json_schema_extra={"enum": list(ATTENTIONS)})]


@section()
class TinySection:
    """A small character-level model that is built without any download, for experiments.

    Raises:
        ValueError: a character stands twice in the alphabet, or the heads do not divide the hidden size.
    """

    architecture: Literal["llama", "gpt_neox", "qwen3"] = option("llama", "Architecture: llama, gpt_neox or qwen3.")
    alphabet: str = option(
        "0123456789+*= :;?ab",
        "The characters that the model can read and write. Their order decides their ids.",
    )
    hidden_size: Positive = option(128, "Width of the model.")
    layers: Positive = option(3, "Number of layers.")
    heads: Positive = option(4, "Number of attention heads.")
    context: Positive = option(128, "Longest text in tokens.")

    def __post_init__(self):
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet: expected every character once, got {self.alphabet!r:.200}")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not divisible by heads={self.heads}; change one")
        if self.architecture != "gpt_neox" and self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} with heads={self.heads}: {self.architecture} needs an even share of "
                "the width for each head; change one of them"
            )
