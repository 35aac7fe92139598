"""What graded dialogues say of a team: accuracy, votes, changes of mind, over one task or a suite."""
