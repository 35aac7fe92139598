"""Games of PettingZoo (https://pettingzoo.farama.org), which needs the package ``pettingzoo``. Imports no torch."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from maporl.config.imports import look_up, must_take, told
from maporl.environments.games.base import Game, IllegalMove
from maporl.errors import ConfigError, install_command, one_line
from maporl.integrations.spaces import check_names, in_words, legal_moves, mask_of, shower, spoken
from trl_ext.ppo.options import option

DEFAULT = "classic/tictactoe-v3"
ALL = "__all__"
"""The key that stands for all agents in the dictionaries of some libraries."""


@dataclass
class PettingZoo(Game):
    """The environment ``env`` of PettingZoo, as ``pettingzoo.make(api, env, **options)`` makes it.

    With ``api: aec`` the agents of the environment move one at a time, and with ``parallel`` those that are left move
    at once. The first agent of the team takes the first of ``possible_agents``, and so on; roles have their names. A
    move is legal if the space of actions has it and the environment's ``action_mask`` allows it.

    Actions of a ``Discrete`` space are their numbers, or ``actions``, a list of their names. Actions of a ``Text``
    space are the words themselves. Observations are printed, arrays by rows. ``show`` names a function ``(observation,
    agent) -> text`` for others, and ``parse`` one ``(words, legal actions or None) -> action``, which raises
    ``ValueError`` for an illegal move. Both are ``MODULE:FUNCTION``. A player makes at most ``longest`` moves; a game
    that asks it for another one ends there.

    An agent takes part no more when the environment says so in any way: by its flags of termination or truncation, by
    the key ``__all__`` among them, which is for everybody, or by leaving it out of ``agents``. Those that are left play
    on. With ``parallel`` an agent that is shown nothing in a step makes no move in it.

    Payments: each step pays each agent what the environment's ``rewards`` say after it, the steps of agents that have
    ended
    included. An illegal move pays its author -1 and the others nothing, as the wrapper of PettingZoo's classic games
    does.
    """

    interests = "mixed"
    illegal = -1.0
    players = (1, 64)
    env: str = option(DEFAULT, "The name of the environment.")
    api: Literal["aec", "parallel"] = option(
        "aec", "aec: the agents of the environment move one at a time. parallel: those that are left move at once."
    )
    options: dict[str, Any] = option({}, "The environment's own options.")
    actions: list[str] = option([], "Names of the actions of a Discrete space. Default: their numbers.")
    show: str | None = option(None, "A function `(observation, agent) -> text` for other texts, as MODULE:FUNCTION.")
    parse: str | None = option(
        None,
        "A function `(words, actions) -> action`, as MODULE:FUNCTION, which gets the legal actions if the "
        "environment lists them, and raises ValueError for an illegal move.",
    )
    longest: int = option(100, "Most moves of a player. A game that asks it for another one ends there.")

    def __post_init__(self) -> None:
        self._show = shower(self.show)
        if self.parse is None:
            check_names(self.actions)
        self._parse: Callable[..., Any] | None = None if self.parse is None else look_up(self.parse, {}, "parse")
        if self._parse is not None:
            must_take(self._parse, ("words", "legal"), f"parse: {self.parse}")

    def reset(self, rng: random.Random) -> None:
        """Begin a new game.

        Raises:
            ConfigError: the package is not installed, it has no such environment, or this is for another number of
                agents.
        """
        self.world: Any = _made(self.api, self.env, self.options)
        self.names: list[str] = list(self.world.possible_agents)
        self.seated = self.seated or len(self.names)
        if len(self.names) != self.seated:
            raise ConfigError(
                f"game pettingzoo: {self.env} has {len(self.names)} seats, {', '.join(self.names)!s:.200}, but "
                f"{self.seated} agents play"
            )
        self.total = dict.fromkeys(range(self.seated), 0.0)
        self.taken = dict.fromkeys(range(self.seated), 0)
        self.owed: dict[int, float] = {}
        self.ended: set[str] = set()
        seed = rng.randrange(2**31)
        if self.api == "parallel":
            self.seen, self.infos = self.world.reset(seed=seed)
        else:
            self.world.reset(seed=seed)
            self._settle()

    def seat(self, player: int) -> str:
        """The environment's own name of the agent."""
        return self.names[player]

    def to_move(self) -> tuple[int, ...]:
        """The agent that the environment selects, or all that are left."""
        left = [name for name in self.world.agents if name not in self.ended]
        if self.api == "parallel":
            left = [name for name in left if name in self.seen]
        if not left:
            return ()
        moving = left if self.api == "parallel" else [self.world.agent_selection]
        movers = tuple(sorted(self.names.index(name) for name in moving))
        return () if any(self.taken[player] >= self.longest for player in movers) else movers

    def observe(self, player: int) -> str:
        """What the agent sees, in words.

        Raises:
            ConfigError: ``show`` failed, or returned something else than a text.
        """
        observation = self._observation(player)
        return in_words(observation) if self._show is None else self._show(observation, self.names[player])

    def moves(self, player: int) -> tuple[str, ...]:
        """The words of the legal actions. None for a ``Text`` space."""
        return tuple(self._legal(player) or ())

    def read(self, player: int, text: str) -> str:
        """The move that ``text`` means.

        Raises:
            IllegalMove: the move is not legal.
        """
        if self._parse is not None:
            self._action(player, text)
            return text
        if self._legal(player) is None:
            return spoken(self.world.action_space(self.names[player]), text)
        return super().read(player, text)

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        """Make the moves, and return what every agent is paid."""
        actions = {self.names[player]: self._action(player, text) for player, text in moves.items()}
        for player in moves:
            self.taken[player] += 1
        if self.api == "parallel":
            self.seen, rewards, terminations, truncations, self.infos = self.world.step(actions)
            self.ended |= self._flagged(terminations) | self._flagged(truncations)
            self._owe(rewards)
        else:
            (action,) = actions.values()
            self.world.step(action)
            self._owe(self.world.rewards)
            self._settle()
        paid, self.owed = self.owed, {}
        return paid

    def success(self, player: int) -> bool | None:
        """Whether the player was paid more than nothing in all."""
        return self.total[player] > 0

    @property
    def replaces(self) -> bool:  # type: ignore[override]  # it follows from the actions
        """Whether legal actions can be listed. This is known when the game has begun."""
        return self.parse is None

    def _settle(self) -> None:
        """Step agents that have ended with None, as PettingZoo wants, until one is selected that has not."""
        in_vain = 0
        while self.world.agents:
            self.ended = self._flagged(self.world.terminations) | self._flagged(self.world.truncations)
            if self.world.agent_selection not in self.ended or (in_vain and self.ended.issuperset(self.world.agents)):
                return
            if in_vain > len(self.names):
                raise ConfigError(
                    f"game pettingzoo: {self.env} selects {self.world.agent_selection!r}, which has ended, and leaves "
                    "it among its agents when it is stepped with None; remove it there, as PettingZoo's environments "
                    "do"
                )
            before = len(self.world.agents)
            self.world.step(None)
            if len(self.world.agents) < before:
                self._owe(self.world.rewards)
            in_vain = 0 if len(self.world.agents) < before else in_vain + 1

    def _flagged(self, flags: dict[str, Any]) -> set[str]:
        """Return the agents whose flag is set."""
        return set(self.names if flags.get(ALL) else (name for name, flag in flags.items() if flag))

    def _owe(self, rewards: dict[str, Any]) -> None:
        for name, reward in rewards.items():
            if name == ALL:  # a total beside the agents' own
                continue
            if name not in self.names:
                raise ConfigError(
                    f"game pettingzoo: {self.env} pays {reward!r:.40} to {name!r:.40}; expected one of its "
                    f"possible_agents, {', '.join(self.names)!s:.200}"
                )
            player = self.names.index(name)
            self.owed[player] = self.owed.get(player, 0.0) + float(reward)
            self.total[player] += float(reward)

    def _observation(self, player: int) -> Any:
        name = self.names[player]
        return self.seen[name] if self.api == "parallel" else self.world.observe(name)

    def _legal(self, player: int) -> dict[str, Any] | None:
        name = self.names[player]
        infos = self.infos if self.api == "parallel" else self.world.infos
        mask = mask_of(self._observation(player), infos.get(name))
        space = self.world.action_space(name)
        if self._parse is not None and type(space).__name__ not in ("Discrete", "Text"):
            return None
        parse = "give parse: MODULE:FUNCTION, which takes a player's words and its legal actions, and returns an action"
        return legal_moves(space, mask, self.actions, f"game pettingzoo: {self.env}", parse)

    def _action(self, player: int, text: str) -> Any:
        """Return the action that ``text`` means, or raise if the user's ``parse`` refuses it."""
        legal = self._legal(player)
        if self._parse is None:
            return text if legal is None else legal[text]
        try:
            return self._parse(text, legal)
        except ValueError as error:
            raise IllegalMove(str(error)) from None
        except Exception as error:  # the user's code
            raise ConfigError(f"game pettingzoo: parse: {self.parse} failed: {told(error)}") from error


def _made(api: str, env: str, options: dict[str, Any]) -> Any:
    """Return PettingZoo's environment."""
    if find_spec("pettingzoo") is None:
        raise ConfigError(
            f"game pettingzoo: the package pettingzoo is not installed; install it with: {install_command('games')}"
        )
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import pettingzoo

    try:
        return pettingzoo.make(api, env, **options)
    except Exception as error:  # each environment raises its own kinds
        said = one_line(error, 200).rstrip(".")
        raise ConfigError(
            f"game pettingzoo: options.env: {env!r:.80} cannot be made with api {api}: {type(error).__name__}: {said}; "
            f"give one of PettingZoo's, such as {DEFAULT}"
        ) from error
