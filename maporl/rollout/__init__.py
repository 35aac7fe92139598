"""Playing dialogues: the driver advances many of them together, branching forks them, the player needs no trainer."""
