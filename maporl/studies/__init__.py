"""Studies of several runs, or before a run: cross-play, sharing of weights between agents, and what
a cluster would do."""
