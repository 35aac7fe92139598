"""An engine without a model: it makes random moves. A fixed opponent against which players can be measured."""

import random
from collections.abc import Mapping, Sequence

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.errors import ConfigError
from trl_ext.ppo.options import Decoding


class RandomMoves(Engine):
    """Makes a random legal move, which depends on the place in the run only.

    Args:
        moves: for each agent, the moves to choose from in place of the legal ones. A game that reads words itself, as
            TextArena's do, lists none, unless it has ``examples``. A list with one move makes an opponent that always
            makes it.
    """

    remote = True
    between = True

    def __init__(self, moves: Mapping[str, Sequence[str]] | None = None):
        self.moves = dict(moves or {})

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one move for each request, in order.

        Raises:
            ConfigError: an agent is asked where the protocol lists no moves, and was given none.
        """
        return [Reply(self._move(request)) for request in requests]

    def _move(self, request: Request) -> str:
        agent = request.ask.agent
        moves = self.moves.get(agent) or request.ask.tags.get("moves") or request.ask.taught
        if not moves:
            raise ConfigError(
                f"agents.{agent}.engine: random makes legal moves of games, and none are listed here; give "
                f"agents.{agent}.engine_options: {{moves: [...]}}, or another engine"
            )
        rng = random.Random(repr(request.rng_key)) if request.rng_key is not None else random.Random()
        return rng.choice(list(moves))


def build(setup: EngineSetup) -> RandomMoves:
    """Build the engine that :data:`maporl.engines.ENGINES` names.

    Raises:
        ConfigError: an agent's ``engine_options`` have other keys than ``moves``, or its moves are not a list of texts.
    """
    by_agent = {}
    for agent, options in setup.options.items():
        moves = (options or {}).get("moves")
        others = set(options or {}) - {"moves"}
        if others or not (
            moves is None or (isinstance(moves, list) and moves and all(isinstance(m, str) for m in moves))
        ):
            raise ConfigError(f"agents.{agent}.engine_options: expected {{moves: [A, B]}}, got {options!r:.80}")
        if moves is not None:
            by_agent[agent] = moves
    return RandomMoves(by_agent)
