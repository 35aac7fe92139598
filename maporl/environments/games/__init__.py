"""Games: small turn-based worlds for the protocol ``game``. ``GAMES`` names them all. Imports no torch."""

from maporl.config.imports import Parts
from maporl.environments.games.base import Game as Game
from maporl.environments.games.base import IllegalMove as IllegalMove
from maporl.environments.games.exchange import Exchange as Exchange
from maporl.environments.games.kuhn import KuhnPoker as KuhnPoker
from maporl.environments.games.path_plans import PathPlans as PathPlans
from maporl.environments.games.plan_path import PlanPath as PlanPath
from maporl.environments.games.prisoners import PrisonersDilemma as PrisonersDilemma
from maporl.environments.games.signals import Signals as Signals
from maporl.environments.games.sokoban import Sokoban as Sokoban
from maporl.environments.games.sudoku import Sudoku as Sudoku
from maporl.environments.games.tictactoe import TicTacToe as TicTacToe

GAMES = Parts(
    {
        "tictactoe": TicTacToe,
        "kuhn_poker": KuhnPoker,
        "prisoners_dilemma": PrisonersDilemma,
        "plan_path": PlanPath,
        "path_plans": PathPlans,
        "sokoban": Sokoban,
        "sudoku": Sudoku,
        "signals": Signals,
        "exchange": Exchange,
        "textarena": "maporl.integrations.text_arena:TextArena",
        "pettingzoo": "maporl.integrations.petting_zoo:PettingZoo",
        "gymnasium": "maporl.integrations.gymnasium:Gymnasium",
    }
)
