"""Training a team: the trainer, its arguments, and what becomes of dialogues until a learner sees them."""
