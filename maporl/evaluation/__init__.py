"""Measures a team by its graded dialogues: accuracy, votes and changes of mind, on one task or on a suite."""
