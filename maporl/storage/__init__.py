"""What is written to disk: whole or not at all, and never over somebody else's."""
