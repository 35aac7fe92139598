"""Games of TextArena (https://github.com/LeonGuertler/TextArena), which needs the package ``textarena``."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from maporl.config.imports import told
from maporl.environments.games.base import Game, IllegalMove
from maporl.errors import ConfigError, install_command, one_line
from trl_ext.ppo.options import option
from trl_ext.process.random_states import forked_generators


@dataclass
class TextArena(Game):
    """The environment ``env`` of TextArena, for 2 to 15 players who move one at a time. It pays its rewards at the end.

    ``options`` are the environment's own, such as its number of rounds.

    A player makes at most ``longest`` moves. A game that asks it for another one ends there and pays nobody.
    ``examples`` are moves of which a warm start teaches a random one. TextArena reads the moves itself, so only an
    empty text is illegal here. A text without brackets is put into brackets.

    :meth:`observe` returns the whole story with the names of the senders, :meth:`news` what the player has not seen
    yet. TextArena draws from Python's global generator. Each game has its own state of it, so games played side by side
    do not change each other, and the generator of the process stays as it was.

    TextArena forgives an invalid move once, and then ends the game or its player's part in it. With ``forgive: false``
    it forgives none, and an invalid move that ends the game is paid as any illegal move, as in SPIRAL. The utterance
    after which it ends has the reward ``legal`` 0. The role that TextArena names at the end is the tag ``secret_role``.

    Payments: the end of the game pays what TextArena gives each player. After an empty text its author gets -1.5 and
    each other player 0.5, as in SPIRAL, because most of TextArena's games are contests; with ``forgive: false`` after
    an invalid move too.
    """

    interests = "opposed"
    replaces = False
    players = (2, 15)
    env: str = option("TicTacToe-v0", "The name of the environment.")
    longest: int = option(30, "Most moves of a player. A game that asks it for another one ends there and pays nobody.")
    examples: list[str] = option([], "Moves of which a warm start teaches a random one.")
    forgive: bool = option(
        True,
        "Forgive an invalid move once, as TextArena does. If not, an invalid move that ends the game is paid as any "
        "illegal move, as in SPIRAL.",
    )
    options: dict[str, Any] = option({}, "The environment's own options, such as its number of rounds.")

    def reset(self, rng: random.Random) -> None:
        """Begin a new game.

        Raises:
            ConfigError: the package ``textarena`` is not installed, has no such game, or cannot begin it for so many
                players.
        """
        if find_spec("textarena") is None:
            raise ConfigError(
                f"game textarena: package textarena is not installed; install it with: {install_command('textarena')}"
            )
        import textarena

        self.seated = self.seated or self.players[0]
        seed = rng.randrange(2**31)
        self.generator = random.Random(seed).getstate()  # some games draw before TextArena seeds the generator
        try:
            # The id with -raw gives only what is new. The plain one repeats the whole story.
            with self._own_generator():
                self.world: Any = textarena.make(env_id=self.env.removesuffix("-raw") + "-raw", **self.options)
                self.world.reset(num_players=self.seated, seed=seed)
                if not self.forgive:
                    self.world.state.error_allowance = 0
        except Exception as error:  # each game raises its own kinds
            said = one_line(error, 200).rstrip(".")
            example = "TicTacToe-v0" if self.seated == 2 else "LiarsDice-v0"
            raise ConfigError(
                f"game textarena: options.env: {self.env!r:.80} cannot begin for {self.seated} players: "
                f"{type(error).__name__}: {said}; give a game of TextArena {textarena.__version__} for {self.seated}, "
                f"such as {example}"
            ) from error
        self.done, self.rewards, self.told = False, dict[int, float](), dict[int, dict[str, Any]]()
        self.taken = dict.fromkeys(range(self.seated), 0)
        self.breaker: int | None = None
        self.story: dict[int, list[str]] = {player: [] for player in range(self.seated)}
        self.fresh: dict[int, list[str]] = {}
        self._look()

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Put this game's state of Python's global generator in place, and the process's state back at the end."""
        with forked_generators():
            random.setstate(self.generator)
            try:
                yield
            finally:
                self.generator = random.getstate()

    def _look(self) -> None:
        with self._own_generator():
            player, messages = self.world.get_observation()
        self.player = int(player)
        senders = self.world.state.role_mapping
        heard = [
            (int(sender), f"[{senders.get(sender, f'Player {sender}')}] {text.strip()}") for sender, text, _ in messages
        ]
        self.story[self.player] += [line for _, line in heard]
        self.fresh[self.player] = [line for sender, line in heard if sender != self.player]

    def to_move(self) -> tuple[int, ...]:
        return () if self.done or self.taken[self.player] >= self.longest else (self.player,)

    def observe(self, player: int) -> str:
        """All that ``player`` has been told, and its own moves, with the names of the senders."""
        return "\n".join(self.story[player])

    def news(self, player: int) -> str:
        """What ``player`` has been told since its last move, without the words of its own."""
        return "\n".join(self.fresh[player])

    def moves(self, player: int) -> tuple[str, ...]:
        """None: TextArena itself judges what players say."""
        return ()

    def taught(self, player: int) -> tuple[str, ...]:
        """The ``examples``."""
        return tuple(self.examples)

    def read(self, player: int, text: str) -> str:
        """``text`` itself, in brackets if it has none.

        Raises:
            IllegalMove: it is empty.
        """
        if not text.strip():
            raise IllegalMove("nothing was said")
        return text if "[" in text or "]" in text else f"[{text.strip()}]"

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        """Make the move, and return what the end of the game pays.

        Raises:
            ConfigError: TextArena's game itself failed.
        """
        ((player, text),) = moves.items()
        self.taken[player] += 1
        info = self.world.state.game_info[player]
        earlier = info["invalid_move"]
        try:
            with self._own_generator():
                self.done = bool(self.world.step(action=text)[0])
            self.breaker = player if info["invalid_move"] and not earlier else None
            if not self.done:
                self._look()
                return {}
            closed = self.world.close()
        except Exception as error:  # each game raises its own kinds
            raise ConfigError(
                f"game textarena: {self.env} failed after the words {text!r:.80} of player {player}: {told(error)}; "
                "this is a fault of the game in TextArena; play another one"
            ) from error
        rewards, infos = closed if isinstance(closed, tuple) else (closed, {})
        self.rewards = {int(player): float(value) for player, value in rewards.items()}
        if self.fines(player):
            self.rewards = {}  # the protocol pays it as an illegal move
        self.told = {int(player): dict(details) for player, details in (infos or {}).items()}
        return self.rewards

    def revealed(self, player: int) -> dict[str, Any]:
        """The role that TextArena names at the end, unless it only numbers the player."""
        role = str(self.told.get(player, {}).get("role") or "")
        return {} if role in ("", f"Player {player}") else {"secret_role": role}

    def broke_rules(self, player: int) -> bool:
        """Whether TextArena has just ended the game, or the player's part in it, by its invalid move."""
        return player == self.breaker

    def fines(self, player: int) -> bool:
        """Whether the invalid move of ``player`` that ended the game is paid as an illegal one."""
        return self.done and not self.forgive and player == self.breaker

    def success(self, player: int) -> bool | None:
        return self.rewards.get(player, 0.0) > 0
