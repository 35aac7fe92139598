"""Game: agents play a turn-based game (SPIRAL, MARSHAL, AT-GRPO, advantage alignment).

The game pays the reward ``env``. The reward ``legal`` is 1 for a legal move and 0 for any other.
"""

import inspect
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from maporl.config.imports import look_up
from maporl.config.parse import validated
from maporl.environments.games import GAMES, Game, IllegalMove
from maporl.errors import ConfigError
from maporl.protocols.base import Play, Protocol
from maporl.text import cleaned, text_option
from maporl.types import Ask, Example, Grade, Utterance, user_says
from trl_ext.errors import retold
from trl_ext.ppo.options import Positive, option


@dataclass(frozen=True)
class PlayGame(Protocol):
    """Plays ``game`` with its ``options``. The agents, in order, are its players.

    An illegal move pays ``illegal`` to the player that made it and ``illegal_others`` to each other player. Methods
    that compare the players turn by turn need games that go on after it.

    Raises:
        ValueError: no game has this name, an option of it is wrong, a prompt lacks a placeholder or has an unknown
            one, ``retries`` is below 1, or the game has no move to make instead of an illegal one, or no passing.
    """

    game: str = option("tictactoe", "The name of the game.")
    options: dict[str, Any] = option({}, "Options of the game.")
    prompt: str = text_option("{observation}", "What a player is asked, with {observation!} and the legal {moves}.")
    memory: bool = option(
        False,
        "Let all turns of a player be one conversation, in which a game that can do so shows only its news. If not, "
        "each turn is a new one.",
    )
    illegal: float | None = option(
        None, "What an illegal move pays to the player that made it. None: as the game says."
    )
    illegal_others: float | None = option(None, "What it pays to each other player. None: as the game says.")
    after_illegal: Literal["end", "replace", "retry", "skip"] = option(
        "end",
        "What follows an illegal move. end: the game ends. replace: it goes on with the move that the game names "
        "instead, by default a random legal one. retry: the player is asked again. skip: the player passes, in a game "
        "that has passing.",
    )
    retries: Positive = option(2, "How often a player is asked again in a turn; then the game ends.")
    again: str = text_option(
        "You said: {said}\nThat was not a legal move. {prompt}", "What it is asked then, with {said} and {prompt}."
    )
    own_questions = True
    roles = True
    records = frozenset({"game", "seed", "state"})
    pays = frozenset({"env", "legal"})

    def __post_init__(self):
        super().__post_init__()
        game = self.new_game()
        if self.after_illegal == "skip" and not game.skips:
            raise ValueError(f"after_illegal: nobody can pass in {self.game}, so skip cannot be; use end or retry")
        if self.after_illegal == "replace" and not game.replaces:
            raise ValueError(f"after_illegal: {self.game} lists no moves, so none can replace an illegal one; use end")

    def new_game(self) -> Game:
        """Return the game before its first move.

        Raises:
            ValueError: no game has this name, an option of it is wrong, or it has no ``longest``.
        """
        # the protocol's section is named by the one who reads it
        with retold(ConfigError, lambda error: ValueError(str(error))):
            game = validated(look_up(self.game, GAMES, "game", Game), self.options, "options")
        longest = inspect.getattr_static(game, "longest", None)
        if longest is None or (isinstance(longest, int) and longest < 1):
            raise ValueError(f"game: {self.game} has no longest; set it to the most moves of a player, as longest = 7")
        return game

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of answers of a player."""
        return self.new_game().longest * (1 + (self.retries if self.after_illegal == "retry" else 0))

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that the game is for so many agents.

        Raises:
            ValueError: it is for more or for fewer.
        """
        least, most = self.new_game().seats()
        if not least <= len(players) <= most:
            number = f"{least}" if least == most else f"{least} to {most}"
            how = f"{self.label} has {number} player{'s' * (most > 1)}"
            raise ValueError(f"{how} but agents are {list(players)}; list that many in protocol.agents")

    @property
    def every_step_scored(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether each move pays its author at once."""
        return self.new_game().pays_every_move

    @property
    def label(self) -> str:
        """The name of the game."""
        return self.game

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the game. The outcome is the total payment of each agent, or "illegal" after an illegal move."""
        game = self.new_game()
        seed = f"{example.id}/{example.meta.get('rollout', 0)}"
        game.begin_with(random.Random(seed), len(agents))
        said: list[Utterance] = []
        paid = dict.fromkeys(agents, 0.0)
        moved: Counter[int] = Counter()
        while movers := self._movers(game, moved):
            asks = [self._ask(game, agents[player], player, seed) for player in movers]
            replies = yield asks
            said += replies
            moves, wrong = _read(game, dict(zip(movers, replies, strict=True)))
            for _ in range(self.retries if self.after_illegal == "retry" else 0):
                if not wrong:
                    break
                self._pay(said, agents, paid, self._fines(game, wrong))
                replies = yield [self._again(asks[movers.index(player)], said) for player in wrong]
                said += replies
                more, wrong = _read(game, dict(zip(wrong, replies, strict=True)))
                moves |= more
            if wrong:
                self._pay(said, agents, paid, self._fines(game, wrong))
                if self.after_illegal in ("end", "retry"):
                    self._grade(said, agents, lambda player, wrong=wrong: False if player in wrong else None)
                    return "illegal"
                if self.after_illegal == "replace":
                    rng = random.Random(f"{seed}/instead/{len(said)}")
                    moves |= {player: game.instead(player, rng) for player in wrong}
            made = {player: moves[player] for player in movers if player in moves}
            self._pay(said, agents, paid, self._payments(game, "step", game.step(made)))
            for player in filter(game.broke_rules, made):
                _last(said, agents[player]).rewards["legal"] = 0.0
            if fined := tuple(filter(game.fines, made)):
                self._pay(said, agents, paid, self._fines(game, fined))
                self._reveal(game, said, agents)
                self._grade(said, agents, lambda player, fined=fined: False if player in fined else None)
                return "illegal"
        self._pay(said, agents, paid, self._payments(game, "outcome", game.outcome()))
        self._reveal(game, said, agents)
        self._grade(said, agents, game.success)
        return paid

    def _again(self, ask: Ask, said: list[Utterance]) -> Ask:
        """Return the ask of a player whose last words meant no legal move."""
        text = self.again.format(said=_last(said, ask.agent).text, prompt=ask.messages[-1]["content"])
        return replace(ask, messages=user_says(text))

    @staticmethod
    def _reveal(game: Game, said: list[Utterance], agents: tuple[str, ...]) -> None:
        """Record what the end of the game tells about its players."""
        for u in said:
            u.tags |= game.revealed(agents.index(u.agent))

    def _movers(self, game: Game, moved: Counter[int]) -> tuple[int, ...]:
        """Return the players to move, and count their moves."""
        movers = game.to_move()
        if not isinstance(movers, tuple | list) or any(player not in range(game.seated) for player in movers):
            raise ConfigError(
                f"game {self.game}: to_move returned {movers!r:.80}, expected a tuple of players from 0 to "
                f"{game.seated - 1}, such as (0,), or () at the end"
            )
        moved.update(movers)
        for player in movers:
            if moved[player] > game.longest:
                raise ConfigError(
                    f"game {self.game}: player {player} moved {moved[player]} times, but longest is {game.longest}; "
                    "let to_move return () at the end, or set a larger longest"
                )
        return tuple(movers)

    def _payments(self, game: Game, method: str, payments: Any) -> dict[int, float]:
        """Return what a ``method`` of the game pays."""
        if not isinstance(payments, dict):
            raise ConfigError(f"game {self.game}: {method} returned {payments!r:.80}, expected {{player: payment}}")
        for player, amount in payments.items():
            if player not in range(game.seated) or not isinstance(amount, int | float) or not math.isfinite(amount):
                raise ConfigError(f"game {self.game}: {method} pays {amount!r:.40} to {player!r:.40}; expected numbers")
        return payments

    def _fines(self, game: Game, wrong: tuple[int, ...]) -> dict[int, float]:
        """Return what each player is paid after the illegal moves of the players in ``wrong``."""
        author = game.illegal if self.illegal is None else self.illegal
        others = game.illegal_others if self.illegal_others is None else self.illegal_others
        return {player: author if player in wrong else others for player in range(game.seated)}

    def _ask(self, game: Game, agent: str, player: int, seed: str) -> Ask:
        observation = cleaned(game.news(player) if self.memory else game.observe(player))
        moves = game.moves(player)
        if not isinstance(moves, tuple | list) or any(not isinstance(move, str) for move in moves):
            raise ConfigError(f"game {self.game}: moves returned {moves!r:.80}, expected a tuple of texts, as ('0',)")
        text = self.prompt.format(observation=observation, moves=", ".join(map(cleaned, moves)))
        tags = {"game": self.game, "seed": seed, "state": f"{player}: {observation}", "moves": list(moves)}
        return Ask(
            agent,
            user_says(text),
            role=game.seat(player),
            fresh=not self.memory,
            tags=tags,
            taught=game.taught(player),
        )

    def _pay(
        self, said: list[Utterance], agents: tuple[str, ...], paid: dict[str, float], payments: dict[int, float]
    ) -> None:
        """Add each payment to the player's last move. A player that has not moved yet has no utterance to credit."""
        for player, amount in payments.items():
            paid[agents[player]] += amount
            last = next((u for u in reversed(said) if u.agent == agents[player]), None)
            if last is not None:
                last.rewards["env"] += amount

    def _grade(self, said: list[Utterance], agents: tuple[str, ...], success: Any) -> None:
        for u in said:
            won = success(agents.index(u.agent))
            u.grade = Grade(
                u.text, won, "the game's end" if won is not None else "another's illegal move ended the game"
            )


def _last(said: list[Utterance], agent: str) -> Utterance:
    """Return the latest utterance of an agent, who has spoken."""
    return next(u for u in reversed(said) if u.agent == agent)


def _read(game: Game, said: dict[int, Utterance]) -> tuple[dict[int, str], tuple[int, ...]]:
    """Return each player's legal move, and the players without one. Each utterance records its move as its action."""
    moves: dict[int, str] = {}
    for player, u in said.items():
        u.rewards |= {"env": 0.0, "legal": 1.0}
        try:
            u.tags["action"] = moves[player] = game.read(player, u.text)
        except IllegalMove:
            u.tags["action"] = None
            u.rewards["legal"] = 0.0
    return moves, tuple(player for player in said if player not in moves)
