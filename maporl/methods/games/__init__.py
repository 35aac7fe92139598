"""Games that single papers or claims play (:data:`maporl.environments.games.GAMES`). Imports no torch."""
