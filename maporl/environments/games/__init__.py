"""Games: small turn-based worlds for the protocol ``game``. ``GAMES`` names them all. Imports no torch."""

from typing import Any

from maporl.environments.games.base import Game as Game
from maporl.environments.games.base import IllegalMove as IllegalMove
from maporl.environments.games.exchange import Exchange as Exchange
from maporl.environments.games.gymnasium import Gymnasium as Gymnasium
from maporl.environments.games.kuhn import KuhnPoker as KuhnPoker
from maporl.environments.games.path_plans import PathPlans as PathPlans
from maporl.environments.games.petting_zoo import PettingZoo as PettingZoo
from maporl.environments.games.plan_path import PlanPath as PlanPath
from maporl.environments.games.prisoners import PrisonersDilemma as PrisonersDilemma
from maporl.environments.games.signals import Signals as Signals
from maporl.environments.games.sokoban import Sokoban as Sokoban
from maporl.environments.games.sudoku import Sudoku as Sudoku
from maporl.environments.games.text_arena import TextArena as TextArena
from maporl.environments.games.tictactoe import TicTacToe as TicTacToe

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
