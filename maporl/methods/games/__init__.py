"""Games that come with maporl (:data:`maporl.environments.games.GAMES`). Imports no torch."""
