"""Game: agents play a turn-based game (SPIRAL, MARSHAL, AT-GRPO, advantage alignment).

What the game pays is the reward ``env``; ``legal`` is 1 for a legal move, else 0.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from maporl.config.parse import unknown, validated
from maporl.environments.games import GAMES, Game, IllegalMove
from maporl.errors import ConfigError
from maporl.protocols.base import Play, Protocol, check_template
from maporl.types import Ask, Example, Grade, Utterance


@dataclass(frozen=True)
class PlayGame(Protocol):
    """The agents, in order, are the players of ``game`` (with its ``options``).

    Each is asked ``prompt`` with ``{observation}`` and its legal ``{moves}`` in place. ``memory``: whether a player's turns
    are one conversation, or each is asked afresh. What is no legal move ends the game: it pays ``illegal`` to who said it
    and ``illegal_others`` to the others.
    """

    game: str = "tictactoe"
    options: dict[str, Any] = field(default_factory=dict)
    prompt: str = "{observation}"
    memory: bool = False
    illegal: float = -1.5
    illegal_others: float = 0.5
    roles = True
    records = frozenset({"game", "seed", "state"})
    pays = frozenset({"env", "legal"})

    def __post_init__(self):
        check_template("prompt", self.prompt, {"observation", "moves"}, {"observation"})
        self.new_game()

    def new_game(self) -> Game:
        """The game, not yet begun."""
        if self.game not in GAMES:
            raise ValueError(f"game: {unknown(self.game, GAMES)}")
        try:
            return validated(GAMES[self.game], self.options, "options")
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """Moves of a player at most."""
        return self.new_game().longest

    @property
    def players(self) -> int:  # type: ignore[override]  # it follows from the options
        """How many agents must play."""
        return self.new_game().players

    @property
    def label(self) -> str:
        """The game's name."""
        return self.game

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Outcome: what each player was paid in all, by agent; "illegal" instead where a move was none."""
        game = self.new_game()
        seed = f"{example.id}/{example.meta.get('rollout', 0)}"
        game.reset(random.Random(seed))
        said: list[Utterance] = []
        paid = dict.fromkeys(agents, 0.0)
        while movers := game.to_move():
            replies = yield [self._ask(game, agents[player], player, seed) for player in movers]
            for u in replies:
                u.rewards |= {"env": 0.0, "legal": 1.0}
            said += replies
            moves: dict[int, str] = {}
            wrong: list[int] = []
            for player, u in zip(movers, replies, strict=True):
                try:
                    moves[player] = game.read(player, u.text)
                except IllegalMove:
                    wrong.append(player)
                    u.rewards["legal"] = 0.0
            if wrong:
                self._pay(
                    said,
                    agents,
                    paid,
                    dict.fromkeys(range(len(agents)), self.illegal_others) | dict.fromkeys(wrong, self.illegal),
                )
                self._grade(said, agents, lambda player, wrong=tuple(wrong): False if player in wrong else None)
                return "illegal"
            self._pay(said, agents, paid, game.step(moves))
        self._grade(said, agents, game.success)
        return paid

    def _ask(self, game: Game, agent: str, player: int, seed: str) -> Ask:
        observation, moves = game.observe(player), game.moves(player)
        text = self.prompt.format(observation=observation, moves=", ".join(moves))
        tags = {"game": self.game, "seed": seed, "state": f"{player}: {observation}", "moves": list(moves)}
        return Ask(
            agent, [{"role": "user", "content": text}], role=f"player {player}", fresh=not self.memory, tags=tags
        )

    def _pay(
        self, said: list[Utterance], agents: tuple[str, ...], paid: dict[str, float], payments: dict[int, float]
    ) -> None:
        """To each player's last move; who has not moved yet is paid, but has no words to credit."""
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
