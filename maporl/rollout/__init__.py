"""Play dialogues. The driver advances many of them together, branching forks them, and the player needs no trainer."""
