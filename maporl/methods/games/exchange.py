"""An exchange of signals (Lewis 1969, in both directions): each player can learn the other's number only from its
words."""

import random
from dataclasses import dataclass
from string import ascii_lowercase, digits

from maporl.methods.games.signals import CodeGame


@dataclass
class Exchange(CodeGame):
    """Each player sees a number of its own, from 1 to ``states``. Both say a letter at once, hear the other's letter,
    and then both guess the other's number.

    A first move is worth nothing by itself, and nothing to its own author: only the other player can use it. So the
    game shows whether a reward that a partner earns later reaches the words that made it possible. Nothing
    distinguishes the letters, and two players that know no code learn none, because neither has a reason to begin.
    Therefore a warm start teaches the guesser a code: it takes ``a`` for 1, ``b`` for 2 and so on. It teaches no sender
    what to say.

    Payments: each guess pays its author 1 if it is right, and 0 if it is wrong. A letter pays nobody. An illegal move
    pays its author -1.5 and the other nothing.

    Raises:
        ValueError: ``states`` is outside 2 to 9.
    """

    longest = 2

    def reset(self, rng: random.Random) -> None:
        self.numbers = [rng.randrange(self.states) for _ in range(2)]
        self.letters: dict[int, str] = {}
        self.guesses: dict[int, str] = {}

    def to_move(self) -> tuple[int, ...]:
        return () if self.guesses else (0, 1)

    def observe(self, player: int) -> str:
        return self.letters[1 - player] if self.letters else str(self.numbers[player] + 1)

    def moves(self, player: int) -> tuple[str, ...]:
        return tuple(digits[1 : self.states + 1] if self.letters else ascii_lowercase[: self.states])

    def taught(self, player: int) -> tuple[str, ...]:
        """Any letter, and then the number that the code has for the letter that was heard."""
        return (str(ascii_lowercase.index(self.letters[1 - player]) + 1),) if self.letters else self.moves(player)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        if not self.letters:
            self.letters = dict(moves)
            return {}
        self.guesses = dict(moves)
        return {player: float(self.success(player)) for player in (0, 1)}

    def success(self, player: int) -> bool:
        return self.guesses.get(player) == str(self.numbers[1 - player] + 1)
