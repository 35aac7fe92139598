"""Who speaks, with whose weights: agents, policies, and how their models are loaded."""
