"""Train a team: the trainer, its arguments, and the steps from dialogues to token batches."""
