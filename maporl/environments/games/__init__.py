"""Games: small turn-based worlds for the protocol ``game``. ``GAMES`` names them all. Imports no torch."""

from typing import Any

from maporl.environments.games.base import Game, IllegalMove
from maporl.environments.games.exchange import Exchange
from maporl.environments.games.gymnasium import Gymnasium
from maporl.environments.games.kuhn import KuhnPoker
from maporl.environments.games.path_plans import PathPlans
from maporl.environments.games.petting_zoo import PettingZoo
from maporl.environments.games.plan_path import PlanPath
from maporl.environments.games.prisoners import PrisonersDilemma
from maporl.environments.games.signals import Signals
from maporl.environments.games.sokoban import Sokoban
from maporl.environments.games.sudoku import Sudoku
from maporl.environments.games.text_arena import TextArena
from maporl.environments.games.tictactoe import TicTacToe

GAMES: dict[str, Any] = {
    "tictactoe": TicTacToe,
    "kuhn_poker": KuhnPoker,
    "prisoners_dilemma": PrisonersDilemma,
    "plan_path": PlanPath,
    "path_plans": PathPlans,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "signals": Signals,
    "exchange": Exchange,
    "textarena": TextArena,
    "pettingzoo": PettingZoo,
    "gymnasium": Gymnasium,
}

__all__ = [
    "GAMES",
    "Exchange",
    "Game",
    "Gymnasium",
    "IllegalMove",
    "KuhnPoker",
    "PathPlans",
    "PettingZoo",
    "PlanPath",
    "PrisonersDilemma",
    "Signals",
    "Sokoban",
    "Sudoku",
    "TextArena",
    "TicTacToe",
]
