"""The contract of a game: a small turn-based world in which several players act. Imports no torch."""

import random
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

MARKS = str.maketrans(dict.fromkeys("[]<>().,!:;*'\"`", " "))
"""Replaces brackets and punctuation by spaces."""


class IllegalMove(ValueError):
    """The words of a player mean no legal move. The protocol decides what follows; no run ends by it."""


class Game(ABC):
    """One play of a game. A derived class is a dataclass whose fields are the game's options.

    ``reset`` begins the game. As long as ``to_move`` names players, each of them is shown ``observe`` and answers;
    ``step`` makes the moves that their answers mean and returns what each player is paid. Everything random comes from
    the generator that ``reset`` is given. The docstring of a derived class says under "Payments" who is paid when.
    """

    interests: ClassVar[Literal["common", "opposed", "mixed"]] = "common"
    """Whether the players win together (``common``), at each other's cost (``opposed``), or partly both (``mixed``)."""
    pays_every_move: ClassVar[bool] = False
    """Whether each move pays its author at once. If not, moves cannot be compared before the game is over."""
    illegal: ClassVar[float] = -1.5
    """What a player is paid for an illegal move."""
    replaces: ClassVar[bool] = True
    """Whether :meth:`instead` has a move to make in place of an illegal one."""
    players: ClassVar[int] = 2
    longest: int
    """The most moves that one player makes."""

    @property
    def illegal_others(self) -> float:
        """What each other player is paid for it: 0.5 for opposed interests (SPIRAL), else 0, as a partner has lost."""
        return 0.5 if self.interests == "opposed" else 0.0

    @abstractmethod
    def reset(self, rng: random.Random) -> None:
        """Begin a new game."""

    @abstractmethod
    def to_move(self) -> tuple[int, ...]:
        """The players whose turn it is. Several of them move at once. The tuple is empty when the game is over."""

    @abstractmethod
    def observe(self, player: int) -> str:
        """The text that ``player`` is shown."""

    def news(self, player: int) -> str:
        """What ``player`` is shown where it remembers its earlier turns: by default the same as :meth:`observe`."""
        return self.observe(player)

    @abstractmethod
    def moves(self, player: int) -> tuple[str, ...]:
        """The legal moves of ``player``."""

    def taught(self, player: int) -> tuple[str, ...]:
        """The moves of which a warm start teaches ``player`` a random one here: by default all legal moves."""
        return self.moves(player)

    @abstractmethod
    def step(self, moves: dict[int, str]) -> dict[int, float]:
        """Make these legal moves, and return each player's reward. A player who is not named gets 0."""

    @abstractmethod
    def success(self, player: int) -> bool | None:
        """Whether ``player`` has won, or solved the task; None if the game does not say."""

    def instead(self, player: int, rng: random.Random) -> str:
        """The move that is made in place of an illegal one, if the protocol goes on: by default a random legal move."""
        return rng.choice(self.moves(player))

    def read(self, player: int, text: str) -> str:
        """The move that ``text`` means: by default its last word, without case, brackets and punctuation.

        Raises:
            IllegalMove: the move is not legal.
        """
        legal = {move.lower(): move for move in self.moves(player)}
        words = text.translate(MARKS).split()
        word = words[-1].lower() if words else ""
        if word not in legal:
            raise IllegalMove(f"{text!r:.40} is not a legal move; legal are {', '.join(self.moves(player))}")
        return legal[word]
