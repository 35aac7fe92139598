"""PPO as data and pure functions: options, rows of tokens, advantages, losses. Knows no model."""
