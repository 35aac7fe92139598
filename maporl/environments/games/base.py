"""The contract of a game: a small turn-based world in which several players act. Imports no torch."""

import random
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from maporl.errors import ConfigError
from trl_ext.ppo.options import Checked

MARKS = str.maketrans(dict.fromkeys("[]<>().,!:;*'\"`", " "))
"""Replaces brackets and punctuation by spaces."""


class IllegalMove(ValueError):
    """The words of a player mean no legal move. The protocol decides what follows; no run ends by it."""


class Game(Checked, ABC):
    """One play of a game. A derived class is a dataclass whose fields are the game's options.

    ``reset`` begins the game. As long as ``to_move`` names players, each of them is shown ``observe`` and answers;
    ``step`` makes the moves that their answers mean and returns what each player is paid, and ``outcome`` what the end
    of the game pays. Everything random comes from the generator that ``reset`` is given. The docstring of a derived
    class says under "Payments" who is paid when.
    """

    interests: ClassVar[Literal["common", "opposed", "mixed"]] = "common"
    """Whether the players win together (``common``), at each other's cost (``opposed``), or partly both (``mixed``)."""
    pays_every_move: ClassVar[bool] = False
    """Whether each move pays its author at once. If not, moves cannot be compared before the game is over."""
    illegal: ClassVar[float] = -1.5
    """What a player is paid for an illegal move."""
    replaces: ClassVar[bool] = True
    """Whether :meth:`instead` has a move to make in place of an illegal one."""
    players: ClassVar[int | tuple[int, int]] = 2
    """How many play: a number, or the least and the most. ``seated`` is how many play this one."""
    skips: ClassVar[bool] = False
    """Whether ``step`` may lack moves of players whose turn it is, who then pass."""
    longest: int
    """The most moves that one player makes."""
    seated: int = 0
    """How many play this game. The protocol sets it before ``reset``."""

    @property
    def illegal_others(self) -> float:
        """What each other player is paid for it: 0.5 for opposed interests (SPIRAL), else 0, as a partner has lost."""
        return 0.5 if self.interests == "opposed" else 0.0

    def begin_with(self, rng: random.Random, players: int) -> None:
        """Begin a new game of so many players.

        Raises:
            ValueError: the game is not for so many.
        """
        least, most = self.seats()
        if not least <= players <= most:
            raise ValueError(f"expected {least if least == most else f'{least} to {most}'} players, got {players}")
        self.seated = players
        self.reset(rng)

    @classmethod
    def seats(cls) -> tuple[int, int]:
        """Return the least and the most players."""
        return (cls.players, cls.players) if isinstance(cls.players, int) else cls.players

    def seat(self, player: int) -> str:
        """The name of a player's role. It may be another one after ``reset``."""
        return f"player {player}"

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

    def outcome(self) -> dict[int, float]:
        """What the end of the game pays each player, beside what the last step has paid: by default nothing."""
        return {}

    def revealed(self, player: int) -> dict[str, Any]:
        """What becomes known of a player at the end, such as a secret role. It stands in the tags of what it said."""
        return {}

    def broke_rules(self, player: int) -> bool:
        """Whether the move that ``player`` has just made turned out to be illegal. It is asked after each step."""
        return False

    def fines(self, player: int) -> bool:
        """Whether the move that ``player`` has just made ends the game and is paid as an illegal move. It is asked
        after each step, for games that judge moves only when they make them."""
        return False

    @abstractmethod
    def success(self, player: int) -> bool | None:
        """Whether ``player`` has won, or solved the task; None if the game does not say."""

    def instead(self, player: int, rng: random.Random) -> str:
        """The move that is made in place of an illegal one, if the protocol goes on: by default a random legal move.

        Raises:
            ConfigError: the game lists no moves.
        """
        moves = self.moves(player)
        if not moves:
            raise ConfigError("protocol.after_illegal: replace needs listed moves, which this lacks; use end or retry")
        return rng.choice(moves)

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
