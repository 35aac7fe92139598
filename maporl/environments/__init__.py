"""What agents act in: the games that come with maporl."""
