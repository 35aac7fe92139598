"""Games: small turn-based worlds for the protocol ``game``. ``GAMES`` names them all. No torch."""

from typing import Any

from maporl.games.base import Game, IllegalMove
from maporl.games.kuhn import KuhnPoker
from maporl.games.plan_path import PlanPath
from maporl.games.prisoners import PrisonersDilemma
from maporl.games.signals import Signals
from maporl.games.text_arena import TextArena
from maporl.games.tictactoe import TicTacToe

GAMES: dict[str, Any] = {
    "tictactoe": TicTacToe,
    "kuhn_poker": KuhnPoker,
    "prisoners_dilemma": PrisonersDilemma,
    "plan_path": PlanPath,
    "signals": Signals,
    "textarena": TextArena,
}

__all__ = [
    "GAMES",
    "Game",
    "IllegalMove",
    "KuhnPoker",
    "PlanPath",
    "PrisonersDilemma",
    "Signals",
    "TextArena",
    "TicTacToe",
]
