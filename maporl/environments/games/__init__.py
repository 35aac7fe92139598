"""Games: small turn-based worlds for the protocol ``game``. ``GAMES`` names them all; each is imported when asked for.

Imports no torch.
"""

from typing import Any

from maporl.config.imports import Parts, member
from maporl.environments.games.base import Game as Game
from maporl.environments.games.base import IllegalMove as IllegalMove

GAMES = Parts(
    {
        "tictactoe": "maporl.methods.games.tictactoe:TicTacToe",
        "kuhn_poker": "maporl.methods.games.kuhn:KuhnPoker",
        "prisoners_dilemma": "maporl.methods.games.prisoners:PrisonersDilemma",
        "plan_path": "maporl.methods.games.plan_path:PlanPath",
        "path_plans": "maporl.methods.games.path_plans:PathPlans",
        "sokoban": "maporl.methods.games.sokoban:Sokoban",
        "sudoku": "maporl.methods.games.sudoku:Sudoku",
        "signals": "maporl.methods.games.signals:Signals",
        "exchange": "maporl.methods.games.exchange:Exchange",
        "textarena": "maporl.integrations.text_arena:TextArena",
        "pettingzoo": "maporl.integrations.petting_zoo:PettingZoo",
        "gymnasium": "maporl.integrations.gymnasium:Gymnasium",
    }
)


def __getattr__(name: str) -> Any:
    return member(GAMES, name, __name__)
