"""The contract of a game: a small turn-based world that several players act in. No torch."""

import random
from abc import ABC, abstractmethod
from typing import ClassVar

_MARKS = str.maketrans(dict.fromkeys("[]<>().,!:;*'\"`", " "))


class IllegalMove(ValueError):
    """Words that are no move the rules allow here."""


class Game(ABC):
    """One play of a game; subclasses are dataclasses of their options.

    ``reset`` begins; while ``to_move`` names players, each of them is shown ``observe`` and says something, and ``step``
    takes what they said and returns what each player gets for it. All that is random comes from the seed.
    """

    players: ClassVar[int] = 2
    longest: int
    """Moves of one player at most."""

    @abstractmethod
    def reset(self, rng: random.Random) -> None:
        """Begin anew."""

    @abstractmethod
    def to_move(self) -> tuple[int, ...]:
        """Whose turn it is; several move at once, none when the game is over."""

    @abstractmethod
    def observe(self, player: int) -> str:
        """What ``player`` is shown."""

    @abstractmethod
    def moves(self, player: int) -> tuple[str, ...]:
        """The legal moves of ``player``."""

    @abstractmethod
    def step(self, moves: dict[int, str]) -> dict[int, float]:
        """Make these legal moves; what each player is paid for it, players who are not named 0."""

    @abstractmethod
    def success(self, player: int) -> bool | None:
        """Whether ``player`` has won or solved it; None where nobody can say."""

    def read(self, player: int, text: str) -> str:
        """The move that ``text`` means; :class:`IllegalMove` where it means none. By default: the last word of it, whatever
        its case, without brackets and punctuation."""
        legal = {move.lower(): move for move in self.moves(player)}
        words = text.translate(_MARKS).split()
        word = words[-1].lower() if words else ""
        if word not in legal:
            raise IllegalMove(f"{text!r:.40} is no legal move; there are {', '.join(self.moves(player))}")
        return legal[word]
