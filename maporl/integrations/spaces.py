"""Observations and actions of PettingZoo and Gymnasium as words. Imports neither of them, and no torch."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maporl.config.imports import look_up, must_take, told
from maporl.environments.games.base import MARKS, IllegalMove
from maporl.errors import ConfigError

_COLOURED = re.compile(r"(?:\x1b\[[0-9;]*[1-9][0-9;]*m)+(.*?)\x1b\[0?m", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_names(names: Sequence[str]) -> None:
    """Check that each name of an action can be read from the end of an answer, where case and punctuation do not count.

    Raises:
        ValueError: a name has several words or punctuation, or two names differ in case only.
    """
    for name in names:
        if name.translate(MARKS).split() != [name]:
            raise ValueError(
                f"actions: {name!r:.40} cannot be read: a move is the last word of an answer, without punctuation; "
                "give one word, such as go_left"
            )
    twice = sorted(name for name, count in Counter(name.lower() for name in names).items() if count > 1)
    if twice:
        raise ValueError(
            f"actions: {', '.join(twice)!s:.80} stands there twice, as case does not count; give each action its own "
            "name"
        )


def legal_moves(space: Any, mask: Any, names: Sequence[str], where: str, instead: str) -> dict[str, Any] | None:
    """Return the legal actions of a ``Discrete`` space by their words, or None for a ``Text`` space.

    Args:
        space: the space of actions.
        mask: which actions are legal, or None: all are.
        names: the words of the actions, in order. Empty: their numbers.
        where: the game, for errors.
        instead: what to do where actions have no words, for the error.

    Raises:
        ConfigError: the actions are neither numbers nor texts, or ``names`` has another number of them.
    """
    kind = type(space).__name__
    if kind == "Text":
        return None
    if kind != "Discrete":
        raise ConfigError(f"{where}: its actions are {space}, and only Discrete and Text spaces have words; {instead}")
    count, start = int(space.n), int(space.start)
    if names and len(names) != count:
        raise ConfigError(f"{where}: actions: expected {count} names, got {len(names)}: {list(names)!r:.80}")
    words = list(names) or [str(start + number) for number in range(count)]
    allowed = range(count) if mask is None else [number for number in range(count) if mask[number]]
    return {words[number]: start + number for number in allowed}


def spoken(space: Any, text: str) -> str:
    """Return ``text`` as an action of a ``Text`` space.

    Raises:
        IllegalMove: it is too short, too long, or has characters that the space lacks.
    """
    if not space.contains(text):
        raise IllegalMove(
            f"{text!r:.40} is not allowed: expected {space.min_length} to {space.max_length} characters of "
            f"{''.join(sorted(space.character_set))!r:.80}"
        )
    return text


def mask_of(observation: Any, info: Any) -> Any:
    """Return the ``action_mask`` of an observation or of its information, or None."""
    for values in (observation, info):
        if isinstance(values, Mapping) and "action_mask" in values:
            return values["action_mask"]
    return None


def in_words(observation: Any) -> str:
    """Return an observation as text: arrays by rows, mappings by lines, without the mask of legal actions.

    What a drawing colours is put into brackets, such as the place of the player in FrozenLake.
    """
    if isinstance(observation, Mapping):
        parts = {name: value for name, value in observation.items() if name != "action_mask"}
        if len(parts) == 1:
            return in_words(next(iter(parts.values())))
        return "\n".join(f"{name}: {in_words(value)}" for name, value in parts.items())
    if isinstance(observation, tuple):
        return ", ".join(in_words(value) for value in observation)
    if hasattr(observation, "tolist"):
        return _rows(observation.tolist())
    return _COLOURS.sub("", _COLOURED.sub(r"[\1]", str(observation))).strip()


def board(observation: Any, player: str) -> str:
    """Return a board with two planes, the player's own pieces and the other's, as in PettingZoo's classic games.

    Rows are joined by ``/``: ``X`` is the player's own piece, ``O`` another's, ``_`` a free cell.
    """
    cells = observation["observation"].tolist()
    return "/".join("".join("X" if mine else "O" if other else "_" for mine, other in row) for row in cells)


def _rows(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if any(isinstance(part, list) for part in value):
        return "\n".join(_rows(part) for part in value)
    return " ".join(map(str, value))


SHOWN: dict[str, Any] = {"board": board}
"""Functions for the option ``show`` that come with maporl."""


def shower(name: str | None) -> Callable[[Any, str], str] | None:
    """Return the function that the option ``show`` names, or None. What it raises and returns is checked.

    Raises:
        ConfigError: no such function exists, or it takes other arguments.
    """
    if name is None:
        return None
    function = look_up(name, SHOWN, "show")
    must_take(function, ("observation", "agent"), f"show: {name}")

    def shown(observation: Any, agent: str) -> str:
        try:
            text = function(observation, agent)
        except Exception as error:  # the user's code
            raise ConfigError(f"game: show: {name} failed: {told(error)}") from error
        if not isinstance(text, str):
            raise ConfigError(f"game: show: {name} returned {text!r:.80}, expected a text")
        return text

    return shown
