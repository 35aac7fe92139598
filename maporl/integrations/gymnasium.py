"""Environments of Gymnasium (https://gymnasium.farama.org), which needs the package ``gymnasium``. Imports no torch."""

import random
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from maporl.environments.games.base import Game
from maporl.errors import ConfigError, install_command, one_line
from maporl.integrations.spaces import check_names, in_words, legal_moves, mask_of, shower, spoken
from trl_ext.ppo.options import option

DEFAULT = "FrozenLake-v1"


@dataclass
class Gymnasium(Game):
    """The environment ``env`` of Gymnasium, for one agent, as ``gymnasium.make(env, **options)`` makes it.

    The agent is shown the environment's own drawing, if it draws in text (``render_mode: ansi``), and otherwise its
    observation. What is coloured in a drawing stands in brackets. ``show`` names a function ``(observation, agent) ->
    text`` for other texts. Actions of a ``Discrete`` space are their numbers, or ``actions``, a list of their names;
    those of a ``Text`` space are the words themselves. The ``action_mask`` of an observation or of its information says
    what is legal. The agent makes at most ``longest`` moves; an episode that would take longer ends.

    Payments: each step pays the agent its reward. An illegal move pays -1.5.
    """

    players = 1
    env: str = option(DEFAULT, "The name of the environment.")
    options: dict[str, Any] = option({}, "The environment's own options.")
    actions: list[str] = option([], "Names of the actions of a Discrete space. Default: their numbers.")
    show: str | None = option(None, "A function `(observation, agent) -> text` for other texts, as MODULE:FUNCTION.")
    longest: int = option(100, "Most moves of the agent. An episode that would take longer ends.")

    def __post_init__(self) -> None:
        self._show = shower(self.show)
        check_names(self.actions)

    def reset(self, rng: random.Random) -> None:
        """Begin a new episode.

        Raises:
            ConfigError: the package is not installed, it has no such environment, or its actions have no words.
        """
        self.world: Any = _made(self.env, self.options)
        self.seen, self.info = self.world.reset(seed=rng.randrange(2**31))
        self.over, self.taken, self.total = False, 0, 0.0

    def to_move(self) -> tuple[int, ...]:
        return () if self.over or self.taken >= self.longest else (0,)

    def observe(self, player: int) -> str:
        """The environment's drawing, or its observation.

        Raises:
            ConfigError: ``show`` failed, or returned something else than a text.
        """
        if self._show is not None:
            return self._show(self.seen, "agent")
        return in_words(self.world.render() if self.world.render_mode == "ansi" else self.seen)

    def moves(self, player: int) -> tuple[str, ...]:
        """The words of the legal actions. None for a ``Text`` space."""
        return tuple(self._legal() or ())

    def read(self, player: int, text: str) -> str:
        """The move that ``text`` means.

        Raises:
            IllegalMove: the move is not legal.
        """
        return spoken(self.world.action_space, text) if self._legal() is None else super().read(player, text)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        """Make the move, and return what it pays."""
        legal = self._legal()
        action = moves[0] if legal is None else legal[moves[0]]
        self.seen, reward, ended, cut, self.info = self.world.step(action)
        self.over, self.taken, self.total = bool(ended or cut), self.taken + 1, self.total + float(reward)
        if self.over:
            self.world.close()
        return {0: float(reward)}

    def success(self, player: int) -> bool | None:
        """Whether the episode paid more than nothing in all."""
        return self.total > 0

    def _legal(self) -> dict[str, Any] | None:
        mask = mask_of(self.seen, self.info)
        other = "give another env, or register one that makes its actions Discrete (gymnasium.ActionWrapper)"
        return legal_moves(self.world.action_space, mask, self.actions, f"game gymnasium: {self.env}", other)


def _made(env: str, options: dict[str, Any]) -> Any:
    """Return Gymnasium's environment, which draws in text if it can."""
    if find_spec("gymnasium") is None:
        raise ConfigError(
            f"game gymnasium: the package gymnasium is not installed; install it with: {install_command('games')}"
        )
    import gymnasium

    try:
        modes = gymnasium.make(env, **options).metadata.get("render_modes", [])
        drawn: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes and "render_mode" not in options else {}
        return gymnasium.make(env, **drawn, **options)
    except Exception as error:  # each environment raises its own kinds
        said = one_line(error, 200).rstrip(".")
        raise ConfigError(
            f"game gymnasium: options.env: {env!r:.80} cannot be made: {type(error).__name__}: {said}; give one of "
            f"Gymnasium's, such as {DEFAULT}"
        ) from error
