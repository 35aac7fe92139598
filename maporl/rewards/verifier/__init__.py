"""A learned verifier as a reward source: in this process, behind a server, or trained beside the team."""
