"""Environments, in which agents act: the games that come with maporl."""
