"""A learned verifier as a reward source: in this process, served, or learning beside the team."""
