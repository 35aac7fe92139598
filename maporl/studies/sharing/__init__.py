"""Which agents should share weights: each way is trained and compared. ``maporl sharing`` calls it."""
